"""Choices of routers, and values that SiLU lets through: recorded, counted, drawn and replayed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F

import moesched
from commands import ONLY_FIGURES, refused
from moesched.analysis.heat_map import draw_heat_map
from moesched.devices.kernels import expert_functions
from moesched.devices.products.linear import linear
from moesched.jobs.profiling import profile_routing
from moesched.jobs.sparsity import THRESHOLDS, SparsityCounter, sparsity_of
from moesched.routing.files import read_routing_file
from moesched.routing.profile import RoutingProfile, read_routing_profile
from moesched.routing.trace import RoutingTrace, write_routing_trace
from moesched.runs.listeners import Listener
from moesched.tasks import Task
from odd_models import GLM, GPT_OSS, stored
from reference import Reference
from small_models import SMALL, small_model

PROMPTS = [[1, 2, 3, 4, 5], [9, 8], [7, 7, 7, 20, 30, 40, 50, 60], [100]]
NEW_TOKENS = 4
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def trace(model: Path) -> RoutingTrace:
    """Experts that the prompts and their generated tokens chose."""
    return profile_routing(model, PROMPTS, max_new_tokens=NEW_TOKENS).trace


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in PROMPTS))
    return file


class WatchedReference(Reference):
    """Remembers what its routers chose."""

    def experts(self, layer: int, x_TD: Any, residual_TD: Any) -> Any:
        chosen_Tk, _ = expert_functions.route(
            x_TD, {"router": [self.weights[f"layers.{layer}.router"]]}, self.config.routed
        )
        self.chosen.append(chosen_Tk.numpy())
        return super().experts(layer, x_TD, residual_TD)

    def choices(self, tokens: list[int]) -> Any:
        """The experts (T, layers, k) of a sequence's tokens."""
        self.chosen: list[Any] = []
        cache = self.cache()
        cache.table.open(0)
        self.logits(cache, [0], [tokens])
        return np.stack(self.chosen, axis=1)


# -- what is recorded


def test_every_token_is_recorded_with_the_experts_that_a_plain_forward_pass_chooses(
    model: Path, trace: RoutingTrace
) -> None:
    report = moesched.run_model(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    reference = WatchedReference(model)
    expected = [
        reference.choices([*prompt, *generated[:-1]])
        for prompt, generated in zip(PROMPTS, report.tokens or [], strict=True)
    ]
    assert trace.request_tokens.tolist() == [len(prompt) + NEW_TOKENS - 1 for prompt in PROMPTS]
    assert trace.prompt_tokens.tolist() == list(map(len, PROMPTS))
    assert trace.shape == (SMALL.layers, SMALL.routed.experts, SMALL.routed.top_k)
    assert (trace.chosen == np.concatenate(expected)).all()


@pytest.mark.parametrize(
    "how",
    [
        {"policy": "resident"},
        {"policy": "cgopipe", "micro_batch_size": 1},
        {"policy": "layer_streaming", "batch_size": 3, "micro_batch_size": 2},
    ],
)
def test_neither_policy_nor_batches_change_what_is_recorded(
    model: Path, trace: RoutingTrace, how: dict[str, Any]
) -> None:
    found = profile_routing(model, PROMPTS, max_new_tokens=NEW_TOKENS, **how).trace
    assert (found.chosen == trace.chosen).all()
    assert (found.request_tokens == trace.request_tokens).all()


def test_layers_without_experts_have_zeros(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    given: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "progress": lambda *choices: told.append(choices)}
    trace = profile_routing(stored(GLM, tmp_path).path, PROMPTS[:3], **given).trace
    assert told[-1][0] == told[-1][1], "the progress ends with all choices"
    assert trace.request_tokens.tolist() == [len(prompt) + NEW_TOKENS - 1 for prompt in PROMPTS[:3]]
    chosen = trace.chosen.astype(int)
    assert not chosen[:, 0].any()
    assert (np.diff(chosen[:, 1:], axis=-1) > 0).all()


def test_what_a_request_does_after_its_end_is_not_recorded(
    tmp_path: Path, model: Path, trace: RoutingTrace
) -> None:
    first = moesched.run_model(model, PROMPTS, max_new_tokens=NEW_TOKENS).tokens or []
    stopping = small_model(tmp_path / "stopping", stop_tokens=(first[0][1],))
    kept = moesched.run_model(stopping, PROMPTS, max_new_tokens=NEW_TOKENS).tokens or []
    assert len(kept[0]) < NEW_TOKENS
    found = profile_routing(stopping, PROMPTS, max_new_tokens=NEW_TOKENS).trace
    lengths = [len(prompt) + len(each) - 1 for prompt, each in zip(PROMPTS, kept, strict=True)]
    assert found.request_tokens.tolist() == lengths
    assert (found.chosen[: lengths[0]] == trace.chosen[: lengths[0]]).all()


def test_ctrl_c_keeps_what_was_recorded_until_then(model: Path, trace: RoutingTrace) -> None:
    def interrupt(choices: int, most: int) -> None:
        if choices == SMALL.layers * (16 + 4 * 10):  # after the prompts' 16 tokens and ten steps
            os.kill(os.getpid(), signal.SIGINT)

    done = profile_routing(model, PROMPTS, max_new_tokens=500, progress=interrupt)
    assert done.interrupted
    lengths = done.trace.request_tokens.tolist()
    starts, known = np.cumsum([0, *lengths]), np.cumsum([0, *trace.request_tokens])
    for request, prompt in enumerate(PROMPTS):
        assert len(prompt) + NEW_TOKENS <= lengths[request] < 500
        mine = done.trace.chosen[starts[request] :][: len(prompt) + NEW_TOKENS - 1]
        assert (mine == trace.chosen[known[request] : known[request + 1]]).all()


# -- replay


class Choices(Listener):
    """Remembers what every `route` came to."""

    def __init__(self) -> None:
        self.all: dict[tuple[int, int, int], dict[int, int]] = {}

    def ended(self, task: Task) -> None:
        if task.verb == "route":
            self.all[task.step, task.layer, task.micro_batch] = task.value


def test_a_simulation_takes_the_choices_of_the_run_that_was_recorded(
    model: Path, trace: RoutingTrace, prompts: Path, tmp_path: Path
) -> None:
    sizes: Any = {"policy": "expert_streaming", "batch_size": 3, "micro_batch_size": 2}
    real, replayed, uniform = Choices(), Choices(), Choices()
    moesched.run_model(model, PROMPTS[:3], max_new_tokens=NEW_TOKENS, listener=real, **sizes)
    write_routing_trace(trace, tmp_path / "routing.npz")
    simulated: Any = {"machine": "t4", "workload": PROMPTS[:3], "gen": NEW_TOKENS, **sizes}
    routing = str(tmp_path / "routing.npz")
    moesched.simulate_model(model, routing=routing, listener=replayed, **simulated)
    moesched.simulate_model(model, listener=uniform, **simulated)
    assert len(real.all) == NEW_TOKENS * SMALL.layers * 2
    assert replayed.all == real.all
    assert uniform.all != real.all


def test_what_is_simulated_depends_on_the_routing(command: Any) -> None:
    simulated = (
        "simulate", "--model", "mixtral-0.8b", "--machine", "t4", "--policy", "expert_streaming",
        "--workload", "mtbench", "--batch-size", 8, "--micro-batch-size", 8, "--gen", 4, "--json", *ONLY_FIGURES,
    )  # fmt: skip
    even = json.loads(command(*simulated).out)
    uneven = json.loads(command(*simulated, "--routing", "zipf", "--routing-set", "exponent=4").out)
    assert uneven["tasks"] < even["tasks"]


# -- the command


def test_the_command_prints_the_figures_and_writes_both_files(
    command: Any, model: Path, trace: RoutingTrace, prompts: Path, tmp_path: Path
) -> None:
    files = ("--out", tmp_path / "routing.csv", "--out", tmp_path / "routing.npz")
    wanted = ("profile-routing", model, "--prompts", prompts, "--max-new-tokens", NEW_TOKENS)
    said = command(*wanted, *files, "--gpu-experts", 5)
    assert said.code == 0
    assert "small: 4 layers of 4 experts, top 2; 28 tokens" in said.out
    assert re.search(r"\nmean +0\.\d\d\n", said.out)
    assert re.search(r"\n5 of 16 +\d+\.\d% +\d+\.\d% +31\.2%\n", said.out)
    written = read_routing_file(tmp_path / "routing.npz", SMALL)
    assert isinstance(written, RoutingTrace)
    assert (written.chosen == trace.chosen).all()
    assert read_routing_profile(tmp_path / "routing.csv") == trace.profile()


def test_the_json_holds_the_figures_and_the_counts(
    command: Any, model: Path, trace: RoutingTrace, prompts: Path
) -> None:
    wanted = ("profile-routing", model, "--prompts", prompts, "--max-new-tokens", NEW_TOKENS, "--json")
    found = json.loads(command(*wanted).out)
    assert found["counts"] == [list(row) for row in trace.profile().counts]
    assert found["tokens"] == 28
    assert [rate["gpu_experts"] for rate in found["hit_rates"]] == [4, 8]
    assert found["interrupted"] is False


def test_files_give_the_figures_of_the_run_that_they_are_of(
    command: Any, model: Path, prompts: Path, tmp_path: Path
) -> None:
    csv, npz = tmp_path / "routing.csv", tmp_path / "routing.npz"
    ran = command("profile-routing", model, "--prompts", prompts, "--out", csv, "--out", npz)
    read = command("profile-routing", model, "--routing", npz, "--out", tmp_path / "again.csv")
    assert ran.out == read.out == command("profile-routing", model, "--routing", csv).out
    assert (tmp_path / "again.csv").read_bytes() == csv.read_bytes()


def test_only_layers_with_experts_have_experts_to_put_on_a_gpu(command: Any) -> None:
    said = command("profile-routing", "llama-4-maverick", "--routing", "uniform", "--gpu-experts", 3072)
    assert "llama-4-maverick: 48 layers, 24 of them of 128 experts, top 1; " in said.out
    assert re.search(r"\n3072 of 3072 +100\.0% +100\.0% +100\.0%\n", said.out)


def test_a_generator_needs_no_model_but_its_shape(command: Any, tmp_path: Path) -> None:
    said = command(
        "profile-routing", "mixtral-8x7b", "--routing", "popularity", "--out", tmp_path / "made.csv"
    )
    assert re.search(r"\nmean +0\.71\ndeviation +0\.08\nminimum +0\.22\n", said.out)
    assert re.search(r"\n56 of 256 +25\.2% +18\.7% +21\.9%\n125 of 256 +53\.0% +44\.6% +48\.8%\n", said.out)
    assert read_routing_profile(tmp_path / "made.csv").experts == 8


def test_broken_lines_of_prompts_are_told_and_the_others_are_profiled(
    command: Any, model: Path, prompts: Path
) -> None:
    prompts.write_text(prompts.read_text() + "nothing\n")
    said = command("profile-routing", model, "--prompts", prompts, "--max-new-tokens", NEW_TOKENS)
    assert said.code == 2
    assert "28 tokens" in said.out
    assert re.fullmatch(r"moesched: .*prompts\.jsonl:5: [^\n]*skipped[^\n]*\n", said.err)


def test_a_dense_model_has_nothing_to_profile(command: Any, tmp_path: Path, prompts: Path) -> None:
    dense = small_model(tmp_path / "dense", experts=1, top_k=1)
    said = command("profile-routing", dense, "--prompts", prompts)
    refused(said, "has one expert in a layer and no router")


def test_a_device_that_cannot_be_watched_is_told(command: Any, model: Path, prompts: Path) -> None:
    said = command("profile-routing", model, "--prompts", prompts, "--device", "emulated", "--machine", "t4")
    refused(said, "device EmulatedDevice does not report its routing: use --device torch")


@pytest.mark.parametrize(
    "line",
    [
        "simulate --model mixtral-8x7b --machine t4 --policy cgopipe --workload mtbench --gen 2",
        "profile-routing mixtral-8x7b",
    ],
)
def test_a_profile_of_another_model_is_refused_in_one_line(command: Any, line: str, tmp_path: Path) -> None:
    file = tmp_path / "dbrx.csv"
    command("profile-routing", "dbrx", "--routing", "popularity", "--out", file)
    said = command(*line.split(), "--routing", file)
    shapes = "dbrx, 40 layers of 16 experts, top 4, but mixtral-8x7b has 32 layers of 8 experts, top 2"
    refused(said, rf"dbrx\.csv is of {shapes}")


# -- pictures


def test_the_heat_map_is_drawn(command: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said = command("profile-routing", "dbrx", "--routing", "zipf", "--picture", tmp_path / "map.png")
    assert said.code == 0
    assert (tmp_path / "map.png").read_bytes().startswith(PNG)


def test_the_heat_map_names_what_it_shows_and_is_the_same_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    profile = RoutingProfile(
        model="small", layers=2, experts=3, top_k=1, tokens=1200, counts=((600, 600, 0), (0, 0, 1200))
    )
    for name in ("a.svg", "b.svg"):
        draw_heat_map(profile, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    for text in ("small, 1,200 tokens", ">expert<", ">layer<", ">popularity<"):
        assert text in drawn
    assert drawn == (tmp_path / "b.svg").read_text()


# -- values after SiLU -----------------------------------------------------------------------------

SHORT = [[1, 2, 3, 4, 5], [9, 8], [7, 7, 7, 20, 30, 40, 50, 60]]


class SiluReference(Reference):
    """Remembers what each layer's SiLU let through."""

    def expert(self, layer: int, expert: int, x_nD: Any) -> Any:
        gate = self.weights[f"layers.{layer}.experts.{expert}.gate"]
        self.seen[layer].append(F.silu(linear(x_nD, [gate])).flatten().numpy())
        return super().expert(layer, expert, x_nD)

    def values(self, prompts: list[list[int]]) -> list[Any]:
        self.seen: list[list[Any]] = [[] for _ in range(self.config.layers)]
        cache = self.cache()
        for sequence in range(len(prompts)):
            cache.table.open(sequence)
        self.logits(cache, list(range(len(prompts))), prompts)
        return [np.concatenate(parts) for parts in self.seen]


@pytest.mark.parametrize("policy", ["expert_streaming", "resident"])
def test_the_shares_are_those_of_a_plain_forward_pass(model: Path, policy: str) -> None:
    report = sparsity_of(model, SHORT, policy=policy)
    expected = SiluReference(model).values(SHORT)
    assert report.values == tuple(len(values) for values in expected)
    assert report.values[0] == 15 * SMALL.routed.top_k * SMALL.routed.intermediate
    for below, values in zip(report.below, expected, strict=True):
        shares = [np.mean(np.abs(values) < threshold) for threshold in THRESHOLDS]
        assert below == pytest.approx(shares, abs=2 / len(values))


def test_values_are_counted_below_each_threshold() -> None:
    counter = SparsityCounter(2)
    counter.activated(1, np.array([[0.0005, -0.005], [0.05, -0.5]], np.float32))
    counter.activated(1, np.array([[2.0, -0.0009]], np.float32))
    assert counter.values == [0, 6]
    for layer, sixths in enumerate([(0, 0, 0, 0), (2, 3, 4, 5)]):
        assert counter.shares()[layer] == pytest.approx([n / 6 for n in sixths])


def test_the_command_prints_a_row_for_each_layer(command: Any, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in SHORT))
    said = command("sparsity", model, "--prompts", file)
    assert said.code == 0
    assert "small (float32): values after SiLU, 15 tokens of the prompts" in said.out
    rows = re.findall(r"^(\d)((?: +\d+\.\d\d%){4})$", said.out, flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    found = json.loads(command("sparsity", model, "--prompts", file, "--json").out)
    assert [f"{share:.2%}" for share in found["below"][2]] == rows[2][1].split()
    assert found["thresholds"] == [0.001, 0.01, 0.1, 1.0]


def test_a_layer_without_experts_is_printed_as_dense(command: Any, tmp_path: Path) -> None:
    model, file = stored(GLM, tmp_path).path, tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt_ids": SHORT[0]}) + "\n")
    said = command("sparsity", model, "--prompts", file)
    assert said.code == 0
    assert re.findall(r"^(\d) +(dense|\d+\.\d\d%)", said.out, flags=re.MULTILINE)[:1] == [("0", "dense")]
    assert said.out.count("dense") == len(THRESHOLDS)


def test_experts_without_silu_are_refused(command: Any, tmp_path: Path) -> None:
    refused(command("sparsity", stored(GPT_OSS, tmp_path).path), "the experts of .* have no SiLU")


def test_without_prompts_tokens_are_drawn_by_lot_and_the_seed_says_which(command: Any, model: Path) -> None:
    first, same, other = (
        json.loads(command("sparsity", model, "--seed", seed, "--json").out) for seed in (0, 0, 1)
    )
    assert first == same
    assert first["random_prompts"] is True
    assert first["tokens"] == 16 * 64
    assert first["below"] != other["below"]
