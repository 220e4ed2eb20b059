"""The MLX device: the tokens of mlx-lm, of Hugging Face and of the torch device, the same bits under every policy."""

# ruff: noqa: E402  # what needs MLX is imported after the check that it is there
from __future__ import annotations

import asyncio
import gc
import importlib
import json
from collections.abc import Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

mx = pytest.importorskip("mlx.core", reason="there is no MLX for this platform")

import moesched
from against_hugging_face import assert_same_tokens, generated
from benchmarks.shared.random_models import (
    dbrx,
    mixtral,
    random_dbrx,
    random_mixtral,
    random_olmoe,
    random_qwen,
)
from benchmarks.shared.small_runs import ONE_MEMORY, Generated, same_bits
from commands import refused
from damaged_weights import damage
from moesched.devices.mlx.device import MlxDevice
from moesched.devices.mlx.machine import ProcessLimit, with_gpu
from moesched.devices.mlx.stacks import stacks_for
from moesched.devices.torch.device import TorchDevice
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.testing import check_device
from odd_models import DBRX, MIXTRAL, OLMOE, layout_of, stored
from odd_runs import Choices, one_batch
from small_models import small_model
from test_nodes import MODELS as NODE_MODELS
from test_nodes import POLICIES as NODE_POLICIES
from test_nodes import expected as one_machines_tokens
from test_nodes import run_nodes

# ---------------------------------------------------------------- the models


def mlx_lm_logits(directory: Path, tokens: list[int]) -> torch.Tensor:
    """Logits of mlx-lm's own class for a prompt: (T, V), float32."""
    config = json.loads((directory / "config.json").read_text())
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    stored = {
        name: each for file in directory.glob("*.safetensors") for name, each in mx.load(str(file)).items()
    }
    model.load_weights(list(model.sanitize(stored).items()))
    return torch.from_numpy(np.array(model.eval()(mx.array([tokens]))[0].astype(mx.float32)))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(mixtral, id="mixtral"),
        pytest.param(partial(mixtral, num_local_experts=9, num_experts_per_tok=4), id="mixtral, top-4 of 9"),
        pytest.param(partial(mixtral, tie_word_embeddings=True, num_attention_heads=8), id="mixtral, tied"),
        pytest.param(dbrx, id="dbrx"),
        pytest.param(partial(dbrx, ffn={"moe_num_experts": 16, "moe_top_k": 4}), id="dbrx, top-4 of 16"),
        pytest.param(partial(dbrx, attention={"clip_qkv": 0.5, "kv_n_heads": 1}), id="dbrx, clip that bites"),
    ],
)
def test_tokens_equal_those_of_mlx_lm_and_of_hugging_face(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(1)
    model = make()
    model.save_pretrained(tmp_path)
    ours = generated(tmp_path, kind=MlxDevice)
    assert_same_tokens(model, ours, lambda _, tokens: mlx_lm_logits(tmp_path, tokens))
    assert_same_tokens(model, ours)


@pytest.mark.parametrize(
    ("make", "seed"),
    [(random_mixtral, 0), (random_dbrx, 1), (random_olmoe, 2), (random_qwen, 4), (random_qwen, 5)],
)
def test_tokens_of_a_random_model_equal_those_of_hugging_face(tmp_path: Path, make: Any, seed: int) -> None:
    model = make(seed)
    model.save_pretrained(tmp_path)
    assert_same_tokens(model, generated(tmp_path, page_bytes=5_000, kind=MlxDevice))


@pytest.mark.parametrize("config", [MIXTRAL, DBRX, OLMOE], ids=lambda config: config.name)
def test_bfloat16_is_about_as_close_to_float32_as_torch_is(tmp_path: Path, config: ModelConfig) -> None:
    model = write_random_model(config, tmp_path / "model", seed=3, dtype="float32")
    exact = generated(model).logits_RSV
    torch_kernels = partial(TorchDevice, kernel="torch")
    ours, torchs = (generated(model, "bfloat16", kind=kind).logits_RSV for kind in (MlxDevice, torch_kernels))
    assert 0 < (ours[:, 0] - exact[:, 0]).abs().mean() < 2 * (torchs[:, 0] - exact[:, 0]).abs().mean()


# ---------------------------------------------------------------- the schedules


@pytest.fixture(scope="module", params=[MIXTRAL, DBRX], ids=lambda config: config.name)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return stored(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def layout(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> WeightLayout:
    return layout_of(checkpoint.config, request.param)


on_mlx = partial(one_batch, machine=ONE_MEMORY, keep_open=True)
"""One batch under a policy, with room for a share of the weights."""


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint, layout: WeightLayout) -> Generated:
    return on_mlx(MlxDevice(checkpoint, layout, keep_logits=True), "resident", weights=1.0)


@pytest.mark.parametrize(
    ("policy", "settings", "weights"),
    [
        ("layer_streaming", {}, 0.8),
        ("cgopipe", {}, 0.8),
        ("expert_streaming", {}, 0.8),
        ("fastdecode", {}, 0.8),
        ("twiddler", {}, 0.8),
        ("adversarial", {"seed": 4}, 0.8),
        ("moesched.testing.random_rows:RandomRows", {"seed": 5}, 1.0),
    ],
)
def test_every_policy_gives_the_same_logits(
    checkpoint: Checkpoint,
    layout: WeightLayout,
    expected: Generated,
    policy: str,
    settings: Mapping[str, int],
    weights: float,
) -> None:
    device = MlxDevice(checkpoint, layout, keep_logits=True)
    got = on_mlx(device, policy, settings, weights=weights)
    asyncio.run(device.aclose())
    assert got.tokens == expected.tokens
    assert same_bits(got.logits_RSV, expected.logits_RSV)


def test_it_passes_the_suite_of_devices_with_the_tokens_of_torch() -> None:
    check_device(MlxDevice, ONE_MEMORY)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.8, 1.2, 0.8)])
def test_the_next_batch_finds_the_weights_that_stay(
    checkpoint: Checkpoint, layout: WeightLayout, expected: Generated, weights: tuple[float, ...]
) -> None:
    device, read = MlxDevice(checkpoint, layout, keep_logits=True), [0]
    for share in weights:
        got = on_mlx(device, "resident" if share == 1 else "layer_streaming", weights=share)
        assert same_bits(got.logits_RSV, expected.logits_RSV)
        read.append(device.bytes_read)
    if set(weights) == {1.0}:
        assert read[2] == read[1] > 0
    asyncio.run(device.aclose())


def test_standing_by_between_batches_uses_the_weights_that_stay_and_changes_nothing(
    checkpoint: Checkpoint, layout: WeightLayout, expected: Generated
) -> None:
    device = MlxDevice(checkpoint, layout, keep_logits=True)
    assert device.stand_by() == 0
    for _ in range(2):
        got = on_mlx(device, "resident", weights=1.0)
        assert same_bits(got.logits_RSV, expected.logits_RSV)
        assert device.stand_by() > checkpoint.config.layers
    for _ in range(2):
        asyncio.run(device.aclose())  # the second one does nothing


@pytest.mark.parametrize("policy", ["resident", "cgopipe"])
def test_long_prompts_pass_in_chunks(no_text: Path, policy: str) -> None:
    prompts = [[*range(1, 71)], [*range(5, 18)], [*range(9, 54)]]
    asked: dict[str, Any] = {"policy": policy, "max_new_tokens": 4, "prefill_chunk": 24}
    ours, torchs = (
        moesched.run_model(no_text, prompts, device=device, **asked).tokens for device in ("mlx", "torch")
    )
    assert ours == torchs


def test_many_rows_of_one_length_are_the_tokens_of_torch(no_text: Path) -> None:
    prompts = [[each, *range(20, 40)] for each in range(6)]
    ours, torchs = (
        moesched.run_model(no_text, prompts, device=device, max_new_tokens=5, micro_batch_size=3).tokens
        for device in ("mlx", "torch")
    )
    assert ours == torchs


@pytest.mark.parametrize("policy", ["resident", "expert_streaming"])
def test_it_takes_no_more_memory_than_the_plan_says(no_text: Path, policy: str) -> None:
    gc.collect()  # arrays of earlier runs, freed meanwhile, would count as memory that this one did not take
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    prompts = [[1, 2, 3], [4] * 40]
    report = moesched.run_model(no_text, prompts, device="mlx", policy=policy, max_new_tokens=3)
    taken = mx.get_peak_memory() - before
    embedding_and_head = 2 * 256 * 32 * 4
    assert embedding_and_head < taken <= report.peak_bytes["host"]
    gc.collect()
    assert mx.get_active_memory() < before + 4096


# ---------------------------------------------------------------- several nodes


@pytest.fixture(scope="module", params=NODE_MODELS)
def shared_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("nodes") / request.param, config=NODE_MODELS[request.param])


@pytest.mark.parametrize(("policy", "decentralised"), [*zip(NODE_POLICIES, cycle([True, False]))], ids=str)
def test_two_nodes_give_the_tokens_of_one_machine(
    shared_model: Path, policy: str, decentralised: bool
) -> None:
    tokens, devices = run_nodes(shared_model, policy, 2, kind=MlxDevice, decentralised=decentralised)
    assert tokens == one_machines_tokens(shared_model)
    for (_, mine), (_, theirs) in zip(devices[0].logits, devices[1].logits, strict=decentralised):
        assert np.array_equal(mine, theirs)


def test_an_expert_that_stays_in_all_layers_is_one_array(shared_model: Path) -> None:
    checkpoint = open_checkpoint(shared_model)
    layout = weight_layout(checkpoint.config, "float32")
    held = [page for page in layout.pages if page.expert in (0, 2)]
    assert {tuple(key) for key in stacks_for(layout, held).values()} == {("expert", 0), ("expert", 2)}
    some = [page for page in held if page.layer or page.expert]
    assert {tuple(key) for key in stacks_for(layout, some).values()} == {("expert", 2)}
    assert {key.by for key in stacks_for(layout, layout.pages).values()} == {"layer"}


# ---------------------------------------------------------------- a Mac, as far as it can be had elsewhere


def test_a_gpu_that_shares_the_hosts_memory_is_limited_to_what_the_system_recommends() -> None:
    mac = with_gpu(ONE_MEMORY, "an M2 Ultra", 8 * 10**8)
    assert mac.unified
    assert mac.accelerator != mac.host
    assert mac.memories["host"].nbytes == 8 * 10**8
    check_device(MlxDevice, mac, ["resident", "cgopipe"])


def test_a_limit_of_the_process_is_what_was_asked_for_and_then_what_it_was_before() -> None:
    limits = [5]

    def set_limit(nbytes: int) -> int:
        limits.append(nbytes)
        return limits[-2]

    limit = ProcessLimit(set_limit)
    limit.set(300)
    limit.set(4000)
    limit.give_back()
    limit.give_back()
    assert limits == [5, 300, 4000, 5]


# ---------------------------------------------------------------- who watches, what is refused


RUN = ("run", "--policy", "resident")


@pytest.mark.parametrize("policy", ["resident", "expert_streaming"])
def test_who_watches_the_routers_is_told_what_torch_tells(tmp_path: Path, policy: str) -> None:
    checkpoint = open_checkpoint(small_model(tmp_path / "model"))
    seen = []
    for kind in (MlxDevice, TorchDevice):
        device, choices = kind(checkpoint, weight_layout(checkpoint.config), keep_logits=True), Choices()
        device.observe_routing(choices)
        on_mlx(device, policy, weights=1.0)
        seen.append(choices.of)
        asyncio.run(device.aclose())
    assert seen[0] == seen[1]


def test_the_command_runs_it(command: Any, model: Path) -> None:
    asked = ("--prompt-ids", "1,2,3;4,5", "--max-new-tokens", 4, "--json")
    ours, torchs = (command(*RUN, model, *asked, "--device", device) for device in ("mlx", "torch"))
    assert ours.code == 0, ours.err
    assert ours.json["tokens"] == torchs.json["tokens"]


def test_it_is_listed(command: Any) -> None:
    assert listed(command)["problem"] is None


def test_without_mlx_it_is_listed_with_the_remedy(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.import_module("sys").modules, "mlx.core", None)
    monkeypatch.delitem(importlib.import_module("sys").modules, "moesched.devices.mlx.device")
    assert "pip install 'moesched[mlx]'" in listed(command)["problem"]


def listed(command: Any) -> Any:
    """The entry of the device in the list of all."""
    devices = command("list", "devices", "--json").json["devices"]
    return next(each for each in devices if each["name"] == "mlx")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--beams", 2), "device mlx has no beam search"),
        (("--machine", "t4"), "machine t4 has an accelerator with a memory of its own"),
        (("--machine", "m2-ultra"), "machine m2-ultra describes other hardware"),
        (("--device-set", "kernel=torch"), "device mlx has no setting 'kernel'"),
    ],
)
def test_what_it_cannot_do_is_refused(
    command: Any, model: Path, options: tuple[object, ...], complaint: str
) -> None:
    said = command(*RUN, model, "--device", "mlx", "--prompt-ids", "1,2", "--max-new-tokens", 2, *options)
    refused(said, complaint)


def test_a_damaged_weight_is_named(command: Any, tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    damage(model, "layers.2.attention_norm")
    said = command(*RUN, model, "--device", "mlx", "--prompt-ids", "1,2,3", "--max-new-tokens", 3, "--json")
    refused(said, "the first bad tensor is weight layers.2.attention_norm:")
