"""Long prompts in chunks: the same tokens on one machine and on several, within the memory of a chunk."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import moesched
from benchmarks.shared.forked_nodes import ForkServer
from benchmarks.shared.random_models import mixtral
from moesched.cluster.cluster_jobs import run_local
from moesched.cluster.node_jobs import LONG_PROMPTS, NodeJob, NodeOrder, NodeRun
from moesched.errors import BadInput, NotFinite, OutOfOrder
from moesched.inputs.options import SizeOptions
from moesched.machines import load_machine
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import Batch
from moesched.requests.chunks import chunks_of
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.runs.virtual_run import VirtualRun
from moesched.steps.plan import Plan
from moesched.steps.roles import Role
from moesched.steps.step import Step
from moesched.testing.symbolic.device import SymbolicDevice
from moesched.testing.symbolic.model import expected_tokens
from runs import predicted
from small_models import SMALL, small_model

POLICIES = (
    "resident", "layer_streaming", "cgopipe", "flexgen", "flexgen_cpu", "expert_streaming", "cpu_ffn",
    "twiddler", "layer_split", "adversarial",
)  # fmt: skip
LENGTHS = (70, 13, 45)
EMULATED: dict[str, Any] = {"device": "emulated", "machine": "t4", "device_settings": {"dilation": 1}}


def prompts_of(lengths: Sequence[int], vocabulary: int = 256) -> list[list[int]]:
    choose = random.Random(5)
    return [[choose.randrange(vocabulary) for _ in range(length)] for length in lengths]


# ---------------------------------------------------------------- what a chunk has


@given(some.lists(some.integers(1, 40), min_size=1, max_size=6), some.integers(1, 50), some.integers(1, 6))
def test_chunks_have_each_token_once_in_order(lengths: list[int], most: int, size: int) -> None:
    requests = range(len(lengths))
    micro_batches = [tuple(requests[start : start + size]) for start in range(0, len(lengths), size)]
    chunks = chunks_of(lengths, micro_batches, most)
    seen = [0] * len(lengths)
    ended: list[int] = []
    for number, chunk in chunks.items():
        assert sum(chunk.tokens) <= most
        assert (chunk.before >= 0) == (chunk.before in chunks)
        assert chunk.before < number
        for request, start, tokens in zip(chunk.requests, chunk.starts, chunk.tokens, strict=True):
            assert request in micro_batches[chunk.micro_batch]
            assert start == seen[request]
            seen[request] += tokens
        assert chunk.ends == tuple(each for each in chunk.requests if seen[each] == lengths[each])
        ended += chunk.ends
    assert seen == lengths
    assert sorted(ended) == list(requests)
    assert sum(chunk.last for chunk in chunks.values()) == len(micro_batches)


def test_prompts_that_fit_are_the_micro_batches_of_decoding() -> None:
    assert list(chunks_of([3, 4, 5], [(0, 1), (2,)], 7)) == [0, 1]
    assert list(chunks_of([3, 4, 5], [(0, 1), (2,)], 6)) == [2, 3, 4]


# ---------------------------------------------------------------- the same tokens


def tokens_of(model: Path, chunk: int | None, lengths: Sequence[int] = LENGTHS, **wanted: Any) -> Any:
    wanted = {"policy": "resident", "max_new_tokens": 6, "batch_size": 3, "micro_batch_size": 2, **wanted}
    return moesched.run_model(model, prompts_of(lengths), prefill_chunk=chunk, **wanted).tokens


@pytest.mark.parametrize(("policy", "machine"), [*zip(POLICIES, cycle([EMULATED, {}]))], ids=str)
def test_every_policy_generates_the_same_tokens_in_chunks_with_one_memory_or_two(
    model: Path, policy: str, machine: dict[str, Any]
) -> None:
    expected = tokens_of(model, None)
    assert tokens_of(model, 16, policy=policy, **machine) == expected


@pytest.mark.parametrize(("chunk", "window"), [(1, 5), (7, None), (7, 24), (32, 5), (32, None)])
def test_tokens_are_those_of_hugging_face(tmp_path: Path, chunk: int, window: int | None) -> None:
    torch.manual_seed(3)
    model = mixtral(initializer_range=0.15, sliding_window=window)
    model.save_pretrained(tmp_path)
    for policy, more in (("resident", {}), ("cgopipe", EMULATED)):
        found = moesched.run_model(
            tmp_path,
            prompts_of([50, 9], 97),
            policy=policy,
            max_new_tokens=8,
            batch_size=2,
            micro_batch_size=2,
            prefill_chunk=chunk,
            **more,
        )
        for prompt, tokens in zip(prompts_of([50, 9], 97), found.tokens or [], strict=True):
            expected = model.generate(
                torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
            )
            assert tokens == expected[0, len(prompt) :].tolist()


def test_beams_and_drawn_tokens_do_not_depend_on_chunks(model: Path) -> None:
    for sampling in (moesched.Sampling(beams=3), moesched.Sampling(temperature=0.8, seed=3)):
        expected = tokens_of(model, None, sampling=sampling)
        assert tokens_of(model, 16, sampling=sampling) == expected
        assert tokens_of(model, 16, sampling=sampling, policy="cgopipe", **EMULATED) == expected


def test_chunks_pass_several_accelerators(model: Path) -> None:
    expected = tokens_of(model, None)
    over_two = {**EMULATED, "machine": "t4x2"}
    assert tokens_of(model, 16, policy="cgopipe", **over_two) == expected


def test_bad_numbers_of_an_early_chunk_are_found(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    from damaged_weights import damage

    damage(model, "layers.1.v")
    with pytest.raises(NotFinite, match=r"weight layers\.1\.v"):
        moesched.run_model(model, prompts_of([40]), policy="cgopipe", prefill_chunk=16, **EMULATED)


# ---------------------------------------------------------------- on symbols, in simulation


def chunked_plan(policy: Any, chunk: int | None = 8, budget: dict[str, int] | None = None) -> Plan:
    lengths = (21, 3, 10, 16)
    batch = Batch(lengths, 3, ((0, 1), (2,), (3,)), prefill_chunk=chunk)
    return plan_run(load_machine("t4"), weight_layout(SHAPES["mixtral-0.8b"]), batch, policy, budget)


@pytest.mark.parametrize(
    ("policy", "seed"),
    [*((policy, 0) for policy in POLICIES[1:-1]), *(("adversarial", seed) for seed in range(30))],
)
def test_every_task_reads_what_it_was_meant_to(policy: str, seed: int) -> None:
    scheduler = make_policy(policy, {"seed": seed} if policy == "adversarial" else {})
    plan = chunked_plan(scheduler, chunk=(8, 5, 3)[seed % 3])
    device = SymbolicDevice()
    device.begin(plan)
    [tokens] = VirtualRun([Rank(plan, scheduler, device)]).run()
    assert tokens == expected_tokens(plan)


def simulated(chunk: int | None, **wanted: Any) -> moesched.JobReport:
    whole: dict[str, Any] = {
        "policy": "cgopipe",
        "workload": moesched.given_lengths([2048], 4),
        "requests": 2,
    }
    return predicted(prefill_chunk=chunk, **whole | wanted)


def test_a_chunk_bounds_the_memory_of_prefill_and_weights_are_fetched_once() -> None:
    whole, cut = (simulated(chunk, batch_size=2, micro_batch_size=2) for chunk in (None, 256))
    assert whole.plan.prefill_chunk is None
    assert cut.plan.prefill_chunk == 256
    policy = make_policy("layer_streaming")
    sizes = [chunked_plan(policy, chunk=chunk).memory("accelerator").used for chunk in (None, 8)]
    assert sizes[1] < sizes[0]
    fetched = [sum(kind.nbytes for kind in each.kinds if kind.kind == "fetch") for each in (whole, cut)]
    assert fetched[1] <= fetched[0] * 1.01


@pytest.mark.parametrize("policy", ["twiddler", "twiddler_makespan", "expert_cache", "lru_offload"])
def test_experts_of_a_prompt_in_chunks_are_moved_no_more_often_than_those_of_a_whole_one(policy: str) -> None:
    prompt: dict[str, Any] = {"policy": policy, "workload": moesched.given_lengths([2048], 2), "requests": 1}
    model = {"budgets": {"gpu": "900MB"}}
    whole, cut = (simulated(chunk, **prompt, **model) for chunk in (None, 512))
    moved = [sum(kind.nbytes for kind in each.kinds if kind.kind == "fetch") for each in (whole, cut)]
    assert 0 < moved[1] <= moved[0]


def test_the_router_of_a_simulation_sees_each_token_once() -> None:
    wanted: dict[str, Any] = {"policy": "twiddler", "routing": "popularity", "batch_size": 1, "requests": 1}
    cut, whole = simulated(100, **wanted), simulated(None, **wanted)
    rows = [sum(kind.flops for kind in each.kinds if kind.kind == "run_expert") for each in (cut, whole)]
    assert rows[0] == pytest.approx(rows[1])


# ---------------------------------------------------------------- chosen by the planner, refused


def test_prompts_are_cut_only_where_memory_asks_for_it() -> None:
    prompts = moesched.given_lengths([4096], 2)
    assert predicted("layer_streaming", workload=prompts).plan.prefill_chunk is None
    tight = predicted("layer_streaming", workload=prompts, budgets={"gpu": "650MB"})
    assert tight.plan.prefill_chunk == 512
    assert tight.peak_bytes["gpu"] <= 650_000_000


class OutOfTurn:
    """Attends to the last chunk first."""

    kv: Role = "accelerator"

    def plan(self, plan: Plan) -> None:
        plan.place_kv(self.kv)
        self.pool = plan.pool("accelerator", "layer", 2 * len(plan.layout.layer(0)), plan.layout.pages)

    async def prefill(self, step: Step) -> None:
        step.fetch(step.pages(0), self.pool)
        for j in step.micro_batches:
            step.embed(j)
        for j in reversed(step.micro_batches):
            step.pre_attention(0, j)
            step.attention(0, j)

    async def decode(self, step: Step) -> None: ...


class OneByOne(OutOfTurn):
    """Takes a chunk through two layers before the next one, with the KV cache on the host."""

    kv: Role = "host"

    async def prefill(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for i in (0, 1):
            step.fetch(step.pages(i), self.pool)
            step.pre_attention(i, 0)
            step.attention(i, 0)
            step.offload_kv(i, 0)
            step.post_attention(i, 0)


@pytest.mark.parametrize(
    ("policy", "message"), [(OutOfTurn, "continues mb"), (OneByOne, "take all of them layer by layer")]
)
def test_an_order_that_would_miss_keys_and_values_is_refused(policy: Any, message: str) -> None:
    scheduler = policy()
    plan = chunked_plan(scheduler)
    with pytest.raises(OutOfOrder, match=message):
        VirtualRun([Rank(plan, scheduler)]).run()


# ---------------------------------------------------------------- what is reported


SCENARIOS: dict[str, dict[str, Any]] = {
    "one request": {"workload": moesched.given_lengths([32], 4)},
    "a long prompt": {"workload": moesched.given_lengths([2048], 4), "prefill_chunk": 512},
    "beams": {"workload": moesched.given_lengths([32], 4), "beams": 4},
}


@pytest.mark.parametrize("policy", ["cgopipe", "twiddler"])
@pytest.mark.parametrize("wanted", SCENARIOS.values(), ids=SCENARIOS)
def test_of_one_request_the_first_token_is_there_when_prefill_is_over(policy: str, wanted: Any) -> None:
    report = predicted(policy, **wanted)
    assert report.first_token_seconds == pytest.approx(report.prefill_seconds)
    assert report.as_dict()["first_token_seconds"] > 0
    assert report.decode_tokens_per_second > 0


@pytest.mark.parametrize("policy", ["cgopipe", "resident"])
def test_of_several_requests_some_have_their_first_token_before_the_others(model: Path, policy: str) -> None:
    wanted: dict[str, Any] = {"policy": policy, "batch_size": 3, "micro_batch_size": 1}
    workload = moesched.given_lengths([900, 300, 600], 4)
    measured = moesched.run_model(model, prompts_of([90, 30, 60]), max_new_tokens=3, **wanted)
    for report in (predicted(workload=workload, **wanted), measured):
        assert report.first_token_seconds is not None
        assert 0 < report.first_token_seconds < report.prefill_seconds


def test_the_table_tells_of_the_first_token(command: Any, model: Path) -> None:
    asked = ("--policy", "resident", "--prompt-ids", "1,2,3", "--max-new-tokens", 3, "--prefill-chunk", 2)
    said = command("run", model, *asked).out
    assert "first token, on average" in said
    assert "prompts in chunks of 2 tokens" in said


def test_a_width_that_fits_in_chunks_is_told_and_fits() -> None:
    wanted: dict[str, Any] = {"workload": moesched.given_lengths([4096], 300), "budgets": {"gpu": "640MB"}}
    with pytest.raises(BadInput, match=r"needs [\d,]+ bytes of gpu.* use --beams \d+, which fits") as refusal:
        predicted("layer_streaming", beams=64, batch_size=1, **wanted)
    width = int(str(refusal.value).rpartition("--beams ")[2].split(",")[0])
    assert width > 1
    assert predicted("layer_streaming", beams=width, batch_size=1, **wanted).plan.prefill_chunk is not None


def test_chunks_that_would_take_minutes_are_refused_with_a_sensible_size() -> None:
    says = "--prefill-chunk is 1, and the batch has up to .* prompt tokens: give 64 or more, or omit it"
    with pytest.raises(BadInput, match=says):
        predicted("cgopipe", "mixtral-8x7b", batch_size=1024, prefill_chunk=1)


# -- chunks on several nodes -----------------------------------------------------------------------

LONG = [1 + number % 50 for number in range(LONG_PROMPTS + 1)]


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = SMALL.varied(layers=2, max_positions=2048)
    return small_model(tmp_path_factory.mktemp("long") / "model", config=config)


@pytest.mark.parametrize(
    ("prompts", "sizes", "chunk"),
    [
        ([LONG], SizeOptions(), LONG_PROMPTS // 2 + 1),
        ([LONG[: LONG_PROMPTS // 2]] * 2, SizeOptions(), LONG_PROMPTS // 2),
        ([LONG[1:-1]], SizeOptions(), None),
        ([LONG], SizeOptions(prefill_chunk=100), 100),
        ([LONG, LONG], SizeOptions(batch_size=2, micro_batch_size=1), None),
    ],
    ids=["long", "long together", "short", "as asked", "two micro-batches already"],
)
def test_two_chunks_are_in_flight(
    long_model: Path, prompts: list[list[int]], sizes: SizeOptions, chunk: int | None
) -> None:
    ask = NodeOrder(nodes=2, node=0, prompts=prompts, new_tokens=2, sizes=sizes)
    with closing(NodeJob(open_checkpoint(long_model), NodeRun(policy="ep_naive"))) as job:
        found, _ = job.prepare(ask)
    assert found.prefill_chunk == chunk


@pytest.mark.parametrize("device", ["torch", "mlx"])
@pytest.mark.parametrize("decentralised", [True, False])
def test_the_tokens_are_those_of_one_process(
    long_model: Path, forks: ForkServer, device: str, decentralised: bool
) -> None:
    if device == "mlx":
        pytest.importorskip("mlx.core", reason="there is no MLX for this platform")
    ours = run_local(
        long_model,
        [LONG],
        nodes=2,
        policy="ep_naive",
        settings={"decentralised": decentralised},
        device=device,
        max_new_tokens=4,
        start=forks,
    )
    assert ours.plan.prefill_chunk == LONG_PROMPTS // 2 + 1
    assert ours.tokens == moesched.run_model(long_model, [LONG], policy="resident", max_new_tokens=4).tokens
