"""`explain` against the truth: planted causes of slowness that it is to name, and what-ifs beside the changes made.

Causes: runs with a planted cause, of which each is to be named as the bottleneck. Simulated runs are of Mixtral 8x7B on
changed machines, with dear kinds of work, or under policies with one weakness. Measured ones are of a small random
model on worker threads, with a device that is slow where the cause is planted.

What-ifs: the same changes made on the virtual clock, for policies of both sorts. Links change in the machine, and
kernels in its costs. Fixed graphs submit the same tasks after a change; policies that await routers may decide
otherwise, which a what-if does not know.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from benchmarks.fidelity._planted import Dear, SlowTorch
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of, at_most, together
from benchmarks.shared.small_runs import TWO_MEMORIES
from moesched.analysis.explanation import explain
from moesched.analysis.replayed_run import without_loading
from moesched.analysis.what_if import what_if
from moesched.machines import Machine, load_machine
from moesched.machines.changes import changed
from moesched.machines.networks import load_network
from moesched.machines.staging import staged
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import Batch, split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.runs.simulation import simulate
from moesched.seams import Observer, Routing
from moesched.tasks import Task
from moesched.trace import About, Recorder, Recording

LAYOUT = weight_layout(SHAPES["mixtral-8x7b"])
NEW_TOKENS, WHAT_IF_TOKENS = 4, 16
PROMPT = 77
"""Of what-ifs: the mean length of MTBench's prompts."""
PINNED = "16GB"
"""Page-locked memory, so that weights pass through two links."""

Settings = Mapping[str, Any]


class Cause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A planted cause: the run, and what its bottleneck has to be.

    Attributes:
        truth: the fields of the bottleneck that tell the cause apart from others.
        popular: the experts among which all tokens choose; of all if empty.
        dear: factors of kinds of work. slow: seconds that tasks of a verb take besides.
        dawdles: whether the driver is kept from going on after each task.
    """

    policy: str
    truth: dict[str, str]
    settings: dict[str, Any] = {}
    machine: str = "t4"
    changes: list[str] = []
    requests: int = 8
    prompt: int = 128
    dear: dict[str, float] = {}
    popular: list[int] = []
    nodes: int = 1
    network_times: float = 1.0
    slow: dict[str, float] = {}
    prompts: tuple[tuple[int, ...], ...] = ((1, 2, 3, 4, 5, 6, 7, 8),) * 4
    dawdles: bool = False


class WhatIf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy on a machine, and the changes that are asked about.

    Attributes:
        changes: each with the settings that make it for real, if it changes a pool.
    """

    machine: str
    requests: int
    changes: dict[str, dict[str, Any]]
    settings: dict[str, Any] = {}


class Cases(msgspec.Struct, frozen=True):
    """The questions: causes by name, what-ifs by policy."""

    causes: dict[str, Cause]
    fixed: dict[str, WhatIf]
    deciding: dict[str, WhatIf]


CASES = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=Cases)
WHAT_IFS = CASES.fixed | CASES.deciding


def claims(result: Result) -> Iterator[Claim]:
    """Planted causes, and what-ifs beside the same changes made on the virtual clock."""
    yield all_of("planted causes that `explain` names as the bottleneck", result["named"], result["causes"])
    fixed, deciding = result["fixed"], result["deciding"]
    if fixed["answers"]:
        yield together(
            "what-ifs of fixed graphs, median and worst error",
            at_most("", fixed["median_error_percent"], 1, "{:.1f} %"),
            at_most("", fixed["worst_error_percent"], 5, "{:.1f} %"),
        )
    if deciding["answers"]:
        yield together(
            "what-ifs of policies that decide as they go, median error and right signs",
            at_most("", deciding["median_error_percent"], 5, "{:.1f} %"),
            all_of("", deciding["right_signs"], deciding["answers"]),
        )


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=(*CASES.causes, *WHAT_IFS),
    rounds_help="runs of each cause; the clock of what-ifs is virtual",
    by_machine=False,
    replaces=("bottlenecks", "what_ifs"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant causes, ask about changes, and make them; 1 where an answer is wrong."""
    options = BENCHMARK.parse(arguments)
    runs: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for name in track(options.only, "asking"):
        if name in CASES.causes:
            runs += [named(name) for _ in range(options.rounds)]
        else:
            answers += answers_for(name)
    causes = {each["planted"] for each in runs}
    missed = {each["planted"] for each in runs if not each["named"]}
    return BENCHMARK.write(
        {
            "causes": len(causes),
            "named": len(causes) - len(missed),
            "runs": runs,
            "fixed": summary_of([each for each in answers if each["policy"] in CASES.fixed]),
            "deciding": summary_of([each for each in answers if each["policy"] in CASES.deciding]),
            "answers": answers,
        }
    )


def simulated(
    policy: str,
    settings: Settings,
    machine: Machine,
    batch: Batch,
    dear: Mapping[str, float],
    routing: Routing | None = None,
    nodes: int = 1,
) -> Recording:
    """A run of Mixtral 8x7B on the virtual clock."""
    ranks = []
    for node in range(nodes):
        made = make_policy(policy, dict(settings))
        ranks.append(Rank(plan_run(machine, LAYOUT, batch, made, nodes=nodes, node=node), made))
    first, *peers = ranks
    recorder = Recorder()
    cost = Dear(machine, LAYOUT.dtype, dear) if dear else None
    simulate(first.plan, first.policy, cost=cost, routing=routing, recorder=recorder, peers=peers)
    return recorder.recording()


# -- causes ----------------------------------------------------------------------------------------


def named(name: str) -> dict[str, Any]:
    """The bottleneck that `explain` names in a run of a cause."""
    cause = CASES.causes[name]
    planted, _, figures = name.rpartition(", ")
    measures = figures == "measured"
    recording = measured(cause) if measures else of_cause(cause)
    found = explain(recording, About(driver="realtime" if measures else "virtual")).bottleneck
    assert found is not None
    return {
        "planted": planted,
        "figures": figures,
        "truth": cause.truth,
        "bottleneck": {field: getattr(found, field) for field in ("lane", "kind", "cause")},
        "share": round(found.share, 3),
        "saved": round(found.saved, 3),
        "named": all(getattr(found, field) == value for field, value in cause.truth.items()),
    }


class Popular:
    """All tokens choose two among a few experts of each layer."""

    def __init__(self, experts: Sequence[int]) -> None:
        self._experts = list(experts)

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        chosen = np.random.default_rng((step, layer, micro_batch)).permutation(self._experts)[:2]
        return {int(expert): tokens for expert in sorted(chosen)}


def of_cause(cause: Cause) -> Recording:
    """A prediction with the cause in it."""
    machine = changed(load_machine(cause.machine), cause.changes)
    if cause.nodes > 1:
        joined, times = load_network("10gbe"), cause.network_times
        network = replace(
            joined, latency_seconds=joined.latency_seconds * times, bandwidth=joined.bandwidth / times
        )
        machine = replace(machine, network=network)
    batch = split_batch([cause.prompt] * cause.requests, NEW_TOKENS, max(1, cause.requests // 2))
    routing = Popular(cause.popular) if cause.popular else None
    return simulated(cause.policy, cause.settings, machine, batch, cause.dear, routing, cause.nodes)


class Dawdler:
    """Keeps the driver from going on after each task."""

    def ended(self, task: Task) -> None:
        """Sleep."""
        time.sleep(0.01)


def measured(cause: Cause) -> Recording:
    """A run of a small random model on worker threads."""
    sizes = {"layers": 4, "hidden": 64, "intermediate": 128, "vocabulary": 256, "head_dim": 8}
    config = SHAPES["mixtral-0.8b"].varied(**sizes, dtype="float32")
    with TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(write_random_model(config, Path(folder) / "model"))
        device = SlowTorch(checkpoint, weight_layout(config), cause.slow)
        policy, batch = make_policy(cause.policy), split_batch([*map(len, cause.prompts)], NEW_TOKENS, 2)
        plan = plan_run(TWO_MEMORIES, device.layout, batch, policy, slot_bytes=device.slot_bytes)
        recorder = Recorder()
        observers: list[Observer] = [Dawdler()] if cause.dawdles else []
        run(plan, policy, device, cause.prompts, observers=observers, recorder=recorder)
    return recorder.recording()


# -- what-ifs --------------------------------------------------------------------------------------


def answers_for(policy: str) -> Iterator[dict[str, Any]]:
    """The answers for one policy, each beside the truth."""
    case = WHAT_IFS[policy]
    before = of_what_if(policy, case, [], {}, {})
    for answer, (change, settings) in zip(
        what_if(before, [*case.changes]), case.changes.items(), strict=True
    ):
        true = seconds(before) / seconds(made_for_real(policy, case, change, settings, before))
        yield {
            "policy": policy,
            "change": change,
            "seconds": answer.seconds,
            "speedup": answer.speedup,
            "true_speedup": true,
            "error_percent": round(100 * (true / answer.speedup - 1), 3),
            "right_sign": same_sign(answer.speedup, true),
            "decisions_unchanged": answer.decisions_unchanged,
        }


def made_for_real(policy: str, case: WhatIf, change: str, settings: Settings, before: Recording) -> Recording:
    """The run on the changed machine, at changed costs, or with more room."""
    machine, dear = [], {}
    for part in change.split(", "):
        kind, name, factor = part.split()
        if kind == "link":
            machine.append(f"link.{name}={factor}")
        elif kind == "kernel":
            kinds = {each.task.kind for each in before.slices if each.task.verb == name}
            dear.update(dict.fromkeys(kinds, float(factor[1:])))
    return of_what_if(policy, case, machine, dear, settings)


def of_what_if(
    policy: str, case: WhatIf, changes: Sequence[str], dear: Mapping[str, float], settings: Settings
) -> Recording:
    """The run of a case, with changes."""
    machine = changed(staged(load_machine(case.machine), PINNED, ring=False), changes)
    batch = split_batch([PROMPT] * case.requests, WHAT_IF_TOKENS, max(1, case.requests // 4))
    return simulated(policy, {**case.settings, **settings}, machine, batch, dear)


def seconds(recording: Recording) -> float:
    """The duration of a run without loading."""
    run = without_loading(recording)
    return (run.end - run.start) / 1e9


def same_sign(speedup: float, true: float) -> bool:
    """Test whether both are faster, both slower, or both the same within a thousandth."""
    return (speedup - 1) * (true - 1) >= 0 or max(abs(speedup - 1), abs(true - 1)) < 0.001


def summary_of(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The errors for the policies of one sort."""
    errors = [abs(each["error_percent"]) for each in answers]
    return {
        "answers": len(answers),
        "right_signs": sum(each["right_sign"] for each in answers),
        "median_error_percent": median(errors) if errors else None,
        "worst_error_percent": max(errors, default=None),
    }


if __name__ == "__main__":
    raise SystemExit(main())
