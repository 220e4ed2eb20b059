"""Logits that are not finite: generation stops, says where they began, and keeps what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moesched
from damaged_weights import damage, damage_scale
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.kv_blocks import KV_BLOCK_TOKENS
from moesched.models.random_model import write_random_model
from moesched.trace import check_trace
from odd_models import MIXTRAL, stored
from scores import Scores
from small_models import small_model

EMULATED = ("--device", "emulated", "--device-set", "dilation=1", "--machine", "t4")
RUNS = {
    "one memory": ("--policy", "resident"),
    "experts by the policy": ("--policy", "twiddler", *EMULATED),
    "KV cache on the host": ("--policy", "cgopipe", *EMULATED),
    "several ranks": ("--policy", "cgopipe", *EMULATED[:-1], "t4x2"),
}
TOKENS = 6
CODED = {"layers": 2, "hidden": 64, "heads": 4, "head_dim": 16, "intermediate": 64, "window": None}
"""Sizes of a small model whose rows consist of whole blocks."""
PROMPTS = ("--prompt-ids", "1,2,3;4,5", "--max-new-tokens", TOKENS)
TOGETHER = (*PROMPTS, "--batch-size", 2, "--micro-batch-size", 2)
"""The prompts in one micro-batch: nothing is searched for."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of its own, to be damaged."""
    return small_model(tmp_path / "model")


def refused(said: Any) -> str:
    """The line of a run that has no token."""
    assert said.code == 2
    assert not said.out
    (line,) = said.err.splitlines()
    return str(line.removeprefix("moesched: "))


def stopped(said: Any) -> str:
    """The line of a run that stopped after some tokens."""
    assert said.code == 1
    (line,) = said.err.splitlines()
    assert line.startswith("moesched: after ")
    assert said.json["interrupted"] is False
    assert said.json["failure"] in line
    return str(said.json["failure"])


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", ["layers.1.v", "layers.3.router", "layers.2.experts.", "lm_head"])
def test_the_damaged_weight_is_named(command: Any, model: Path, name: str, run: tuple[str, ...]) -> None:
    """Of experts, one that tokens were routed to."""
    for each in [name] if "experts" not in name else [f"{name}{expert}.down" for expert in range(4)]:
        damage(model, each)
    line = refused(command("run", model, *run, *TOGETHER, "--json"))
    assert line.startswith("prefill: the logits of request ")
    assert f"the first bad tensor is weight {name}" in line


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_tokens_before_are_kept_and_the_trace_so_far_is_written(
    command: Any, model: Path, tmp_path: Path, run: tuple[str, ...]
) -> None:
    good = command("run", model, *run, *TOGETHER, "--json").json["tokens"]
    place = next(
        n for n in range(1, TOKENS - 1) if good[0][n] not in (*good[0][:n], *good[1][: n + 2], *range(6))
    )
    damage(model, "embedding", row=good[0][place])
    trace = tmp_path / "trace.json"
    said = command("run", model, *run, *TOGETHER, "--json", "--trace", trace)
    line = stopped(said)
    assert f"decode step {place + 1}: the logits of request 0 at position {3 + place + 1} are" in line
    assert "the first bad tensor is weight embedding" in line
    assert said.json["tokens"] == [tokens[: place + 1] for tokens in good]
    assert len(said.json["step_seconds"]) == place + 1
    assert not check_trace(trace)


def test_an_activation_is_named_where_the_weights_are_numbers(command: Any, model: Path) -> None:
    stored = open_checkpoint(model).tensors["layers.1.o"]
    for row in range(stored.shape[0]):
        for number in (3e38, -3e38):
            damage(model, "layers.1.o", row=row, number=number)
    damage(model, "layers.1.v", number=3e38)
    line = refused(command("run", model, "--policy", "resident", *PROMPTS, "--json"))
    assert "weight" not in line.partition("first bad tensor")[2].partition(":")[0]
    assert "layer 1:" in line


def test_batches_after_the_one_that_stopped_do_not_run(command: Any, model: Path) -> None:
    damage(model, "embedding", row=4)
    said = command("run", model, "--policy", "resident", *PROMPTS, "--batch-size", 1, "--json")
    assert "prefill: the logits of request 1" in stopped(said)
    assert [len(tokens) for tokens in said.json["tokens"]] == [TOKENS, 0]


@pytest.mark.parametrize(
    ("stored_as", "scale"), [("q8_0", b"\x00\x7e"), ("q4_0", b"\x00\xfc"), ("mxfp4", b"\xff")]
)
def test_a_scale_of_a_gguf_that_is_no_number_is_found_before_the_first_token(
    command: Any, tmp_path: Path, stored_as: str, scale: bytes
) -> None:
    model = write_random_model(MIXTRAL.varied(**CODED), tmp_path / "model.gguf", stored_as=stored_as)
    damage_scale(model, "layers.1.o", scale)
    line = refused(command("run", model, "--policy", "expert_cache", "--prompt-ids", "1,2"))
    assert "the first bad tensor is weight layers.1.o" in line


def test_whoever_only_watches_a_run_is_told(model: Path) -> None:
    damage(model, "final_norm")
    with pytest.raises(moesched.MoeschedError, match="weight final_norm"):
        moesched.profile_routing(model, [[1, 2]], max_new_tokens=2)
    with pytest.raises(moesched.MoeschedError, match="weight final_norm"):
        moesched.sparsity_of(model, [[1, 2]])


def first_bad(checkpoint: Checkpoint, prompt: list[int], *, fused: bool) -> str | None:
    """The first bad tensor of a prefill step, searched in memory of its own."""
    from moesched.devices.kernels.qkv_functions import rotary_angles
    from moesched.devices.runner.micro_batch import MicroBatchState
    from moesched.devices.shared.page_reader import PageReader
    from moesched.devices.torch.first_bad_tensor import FirstBadTensor
    from moesched.devices.torch.kv_cache import BlockedKV
    from moesched.models.layout import weight_layout

    config = checkpoint.config
    state = MicroBatchState([0], [prompt])
    state.add_cache(BlockedKV(config, -(-len(prompt) // KV_BLOCK_TOKENS)))
    state.caches[0].table.open(0)
    state.extend()
    state.angles = rotary_angles(torch.tensor(state.step.positions), config.attention)
    layout = weight_layout(config)
    with PageReader(checkpoint, layout) as reader:
        return FirstBadTensor(reader, layout, torch.device("cpu"), fused=fused).name(state)


def test_the_search_holds_few_scores_on_a_gpu_without_fused_attention(tmp_path: Path) -> None:
    from moesched.devices.kernels.fused_attention import PIECE_BYTES

    config = MIXTRAL.varied(layers=1, window=None)
    with Scores() as scores:
        said = first_bad(stored(config, tmp_path), [1] * 2000, fused=False)
    assert said is None, "a second run that is good is told as it is"
    assert 0 < scores.most <= PIECE_BYTES < 4 * config.attention.heads * 2000**2


def test_beam_search_stops_as_well(command: Any, model: Path) -> None:
    damage(model, "lm_head", row=5)
    line = refused(command("run", model, "--policy", "resident", *PROMPTS, "--beams", 3, "--json"))
    assert line.startswith(
        "prefill: the logits of request 0 at position 3 are not finite, and the first bad tensor"
    )
    assert "weight lm_head" in line
