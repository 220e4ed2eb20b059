"""Tensor parallelism, simulated: how a model and a machine are cut, what all-reduces cost, one rank for all."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesched
from commands import ONLY_FIGURES
from moesched.drivers.validation import CheckedEngine
from moesched.errors import BadInput
from moesched.inputs.accelerators import cut_over_ranks
from moesched.jobs.report import JobReport
from moesched.machines import INTERCONNECT, AcceleratorGroup, CostPoint, Machine, load_machine
from moesched.machines.changes import changed
from moesched.machines.rank import rank_share
from moesched.machines.roofline import Roofline
from moesched.machines.staging import staged
from moesched.machines.sustained import at_peak
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.models.operations import Operations
from moesched.models.reading import require_plain_layers, runs
from moesched.models.shapes import SHAPES
from moesched.models.tensor_parallel import cut_config
from moesched.models.tensors import tensor_shapes
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.runs.simulation import simulate
from moesched.runs.virtual_run import VirtualRun
from moesched.steps.plan import Plan
from moesched.tasks import DONE, Lane, Task
from moesched.trace import Recorder, Slice
from moesched.work import Work
from small_models import SMALL

POLICIES = [
    "cgopipe", "layer_streaming", "flexgen", "flexgen_cpu", "expert_streaming", "resident", "adversarial",
]  # fmt: skip

MODEL = SMALL.varied(heads=8, kv_heads=4)
RING = 2 * 3 / 4  # what each of four ranks sends for each byte of a sum


def plan_on(
    machine: str | Machine, ranks: int, policy: Any, config: ModelConfig = MODEL, new_tokens: int = 5
) -> Plan:
    whole = at_peak(load_machine(machine)) if isinstance(machine, str) else machine
    cut, share, _ = cut_over_ranks(config, whole, None, ranks)
    budgets = {} if type(policy).__name__ == "Resident" else {"gpu": 80_000 + 480_000 // ranks}
    batch = split_batch([7, 9, 4, 12, 5], new_tokens, 2)
    return plan_run(share, weight_layout(cut, "float32"), batch, policy, budgets)


# -- the cut ---------------------------------------------------------------------------------------


def _is_cut(config: ModelConfig) -> bool:
    """Test whether ranks take the model."""
    with suppress(BadInput):
        require_plain_layers(config, "a rank")
        return config.attention.qk_norm != "projection"
    return False


CUT = sorted(name for name, config in SHAPES.items() if runs(config) and _is_cut(config))


@given(st.sampled_from(CUT), st.sampled_from([2, 4]))
def test_all_ranks_together_have_every_weight(name: str, ranks: int) -> None:
    config = SHAPES[name]
    whole, cut = tensor_shapes(config), tensor_shapes(cut_config(config, ranks))
    assert whole.keys() == cut.keys()
    for tensor, shape in whole.items():
        kept = tensor.rpartition(".")[2] in (
            "embedding", "attention_norm", "ffn_norm", "final_norm", "router", "router_bias", "q_norm",
            "k_norm",
        )  # fmt: skip
        smaller = [few * ranks == all_ for few, all_ in zip(cut[tensor], shape, strict=True)]
        assert sum(smaller) == (0 if kept else 1), tensor


@given(st.sampled_from(CUT), st.sampled_from([2, 4]), st.integers(1, 300))
def test_ranks_share_out_the_work_of_products_and_attention(name: str, ranks: int, tokens: int) -> None:
    whole, cut = (
        Operations(config, "bfloat16") for config in (SHAPES[name], cut_config(SHAPES[name], ranks))
    )
    assert cut.pre_attention(tokens).flops * ranks == whole.pre_attention(tokens).flops
    assert cut.output_projection(tokens).flops * ranks == whole.output_projection(tokens).flops
    assert cut.experts(tokens).flops * ranks == pytest.approx(whole.experts(tokens).flops)
    assert cut.attention_step([tokens]).flops * ranks == whole.attention_step([tokens]).flops
    assert cut.sample(tokens).flops * ranks == whole.sample(tokens).flops
    shares = SHAPES[name].routed.shared  # the network that every token uses is cut, the router is not
    assert shares or cut.router(tokens) == whole.router(tokens)
    assert cut.kv_bytes * ranks == whole.kv_bytes
    assert cut.hidden_bytes == whole.hidden_bytes


def test_a_rank_has_its_own_accelerator_and_a_share_of_all_else() -> None:
    whole = staged(changed(at_peak(load_machine("t4x4")), ["processor.cpu.expert_bandwidth=60GB/s"]), "64GB")
    share = rank_share(whole, 4)
    assert share.accelerator == whole.accelerator
    assert share.memories["gpu"] == whole.memories["gpu"]
    assert share.link("pinned", "gpu") == whole.link("pinned", "gpu")
    assert share.link("gpu", "host") == whole.link("gpu", "host")
    assert share.peak("cpu", "bfloat16") * 4 == whole.peak("cpu", "bfloat16")
    assert share.host.expert_bandwidth == 15e9
    for memory in ("host", "pinned"):
        assert share.memories[memory].nbytes * 4 == whole.memories[memory].nbytes
        assert share.memories[memory].bandwidth * 4 == whole.memories[memory].bandwidth
    assert share.link("host", "pinned").bandwidth * 4 == whole.link("host", "pinned").bandwidth
    assert share.accelerator_group.interconnect == whole.accelerator_group.interconnect


def test_one_rank_of_a_group_has_all_that_they_share() -> None:
    whole = at_peak(load_machine("t4x4"))
    assert rank_share(whole, 1) == msgspec.structs.replace(whole, accelerator_group=AcceleratorGroup())


# -- what an all-reduce costs ----------------------------------------------------------------------


def all_reduce(machine: Machine, nbytes: int) -> float:
    """Seconds of an all-reduce among the machine's ranks."""
    config = msgspec.structs.replace(SMALL, ranks=machine.accelerator_group.count)
    sent = Operations(config, "float32").all_reduce(nbytes).nbytes
    return Roofline(machine, "bfloat16").work(Work("all_reduce", INTERCONNECT, nbytes=sent)).seconds


def test_an_all_reduce_goes_round_a_ring_twice() -> None:
    assert all_reduce(rank_share(at_peak(load_machine("t4x4")), 4), 12_000_000) == pytest.approx(
        RING * 1e-3 + 6 * 20e-6
    )
    assert all_reduce(rank_share(at_peak(load_machine("a100-80gx2")), 2), 300_000_000) == pytest.approx(
        1e-3 + 2 * 5e-6
    )


def test_accelerators_without_an_interconnect_reduce_through_the_host() -> None:
    group = AcceleratorGroup(count=4)
    share = rank_share(msgspec.structs.replace(at_peak(load_machine("t4x4")), accelerator_group=group), 4)
    assert share.accelerator_group.interconnect is not None
    assert (
        share.accelerator_group.interconnect.bandwidth == 12e9
    )  # of the links; 100e9 / 4 / 2 of the host is more
    assert all_reduce(share, 12_000_000) == pytest.approx(RING * 1e-3 + 6 * 20e-6)


def test_an_all_reduce_slows_the_links_that_carry_it() -> None:
    sharing = {
        name: dict(
            Roofline(at_peak(load_machine(name)), "bfloat16")
            .work(Work("all_reduce", INTERCONNECT, nbytes=1e9))
            .shares
        ).keys()
        for name in ("t4x2", "a100-80gx2")
    }
    assert sharing == {"t4x2": {INTERCONNECT, "host->gpu", "gpu->host"}, "a100-80gx2": {INTERCONNECT}}


def test_an_all_reduce_on_a_machine_with_one_accelerator_has_no_cost() -> None:
    with pytest.raises(BadInput, match="machine t4 has no cost for all_reduce on 'interconnect'"):
        Roofline(at_peak(load_machine("t4")), "bfloat16").work(Work("all_reduce", INTERCONNECT, nbytes=1.0))


# -- the verbs -------------------------------------------------------------------------------------


def run_together(policy: str, machine: str, ranks: int) -> list[list[Task]]:
    """Each rank's tasks, with a policy, a plan and an engine for each, on one virtual clock."""
    engines: list[CheckedEngine] = []

    def make_engine(lanes: Iterable[Lane]) -> CheckedEngine:
        engines.append(CheckedEngine(lanes))
        return engines[-1]

    policies = [make_policy(policy) for _ in range(ranks)]
    VirtualRun(
        [Rank(plan_on(machine, ranks, own), own) for own in policies], make_engine=make_engine, sharing=False
    ).run()
    return [engine.tasks for engine in engines]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_rank_stands_for_all(policy: str) -> None:
    alone = make_policy(policy)
    recorder = Recorder()
    simulate(plan_on("t4x4", 4, alone), alone, recorder=recorder)
    for tasks in run_together(policy, "t4x4", 4):
        ran = [task for task in tasks if task.verb != "join" and task.state == DONE]
        spans = sorted((task.end, task.start, task.label) for task in ran)
        slices = recorder.recording().slices
        assert spans == sorted((each.end, each.start, each.task.label) for each in slices)


def slices_of(policy: Any) -> list[Slice]:
    recorder = Recorder()
    simulate(plan_on("t4x2", 2, policy), policy, recorder=recorder)
    return sorted(recorder.recording().slices, key=lambda each: each.id)


def verbs_of(slices: list[Slice], *, step: int, layer: int) -> list[str]:
    """Tasks of the first micro-batch in program order, without transfers."""
    of_layer = [
        each for each in slices if (each.step, each.task.layer, each.task.micro_batch) == (step, layer, 0)
    ]
    return [each.task.verb for each in of_layer if each.task.type != "PageTransfer"]


def test_what_a_rank_has_in_part_is_summed_before_it_is_needed_whole() -> None:
    slices = slices_of(make_policy("resident"))
    layer = ["pre_attention", "attention", "output_projection", "all_reduce", "post_attention", "all_reduce"]
    assert verbs_of(slices, step=1, layer=2) == layer
    assert verbs_of(slices, step=1, layer=-1) == ["embed", "logits", "all_reduce", "sample"]
    by_expert = verbs_of(slices_of(make_policy("expert_streaming")), step=1, layer=0)
    assert by_expert[:5] == ["pre_attention", "attention", "output_projection", "all_reduce", "route"]
    assert by_expert[-2:] == ["combine", "all_reduce"]


# -- jobs ------------------------------------------------------------------------------------------


def predicted(machine: str | Machine, **changes: Any) -> JobReport:
    sizes: dict[str, Any] = {
        "gen": 4, "batch_size": 32, "micro_batch_size": 8, "policy": "cgopipe", "band": False, **changes,
    }  # fmt: skip
    machine = at_peak(load_machine(machine) if isinstance(machine, str) else machine)
    return moesched.simulate_model("mixtral-8x22b", machine=machine, workload="mtbench", **sizes)


@cache
def on_four() -> JobReport:
    return predicted("t4x4")


def test_all_accelerators_of_a_machine_are_used_unless_fewer_are_asked_for() -> None:
    two, four = predicted("t4x2"), on_four()
    half = predicted("t4x4", tensor_parallel=2)
    assert (two.tensor_parallel, four.tensor_parallel, half.tensor_parallel) == (2, 4, 2)
    assert half.throughput_tokens_per_second == two.throughput_tokens_per_second
    assert 1.9 < four.throughput_tokens_per_second / two.throughput_tokens_per_second < 3.5
    assert "interconnect" in two.lanes


def test_shared_memories_are_reported_for_all_ranks_and_the_gpu_for_one() -> None:
    machine, report = at_peak(load_machine("t4x4")), on_four()
    weights = weight_layout(SHAPES["mixtral-8x22b"]).pages
    assert sum(page.nbytes for page in weights) < report.peak_bytes["host"] < machine.memories["host"].nbytes
    assert report.peak_bytes["gpu"] <= machine.memories["gpu"].nbytes
    assert report.budget_bytes == {"gpu": 15360 * 2**20 - 7 * 10**8, "host": 416 * 10**9 - 4 * 2**30}


def test_a_budget_of_a_shared_memory_is_for_all_ranks() -> None:
    report = predicted("t4x4", budgets={"host": "400GB", "gpu": "12GB"})
    assert (report.budget_bytes["host"], report.budget_bytes["gpu"]) == (400 * 10**9, 12 * 10**9)


def test_a_plan_for_several_accelerators_says_so() -> None:
    proposal = moesched.plan_model(
        "mixtral-0.8b", machine="t4x2", policy="cgopipe", gen=4, budgets={"gpu": "700MB"}, band=False
    )
    assert proposal.tensor_parallel == 2
    assert proposal.predicted.utilization["interconnect"] > 0
    assert proposal.predicted.peak_bytes["gpu"] <= 700_000_000


def test_measured_costs_of_one_accelerator_are_not_used_for_several() -> None:
    measured = msgspec.structs.replace(
        at_peak(load_machine("t4x2")), cost_table=[CostPoint(operation="dispatch", size=0, seconds=1e-6)]
    )
    with pytest.raises(BadInput, match=r"machine t4x2 has measured costs.*--tensor-parallel 1"):
        predicted(measured)


def test_the_command_line_reports_the_number_of_ranks(command: Any) -> None:
    line = "simulate --model mixtral-8x7b --machine a100-80gx2 --policy cgopipe --workload mtbench --gen 2"
    said = command(*line.split(), "--batch-size", 8, *ONLY_FIGURES, "--json")
    assert (said.code, said.json["tensor_parallel"]) == (0, 2)
