"""`explain --what-if` against the truth: the same changes made on the virtual clock, for policies of both sorts.

Links change in the machine, kernels in its costs, and pools by the policy's settings. Fixed graphs submit the same
tasks after a change; policies that await routers may decide otherwise, which a what-if does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from _options import SIMULATION, Benchmark, track
from _planted import Dear

from moesched.analysis.replayed_run import without_loading
from moesched.analysis.what_if import what_if
from moesched.machines import load_machine
from moesched.machines.changes import changed
from moesched.machines.staging import staged
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.trace import Recorder, Recording

NEW_TOKENS = 16
PROMPT = 77
"""The mean length of MTBench's prompts."""

Settings = Mapping[str, Any]


class Case(NamedTuple):
    """A policy on a machine, and the changes that are asked about.

    Attributes:
        changes: each with the settings that make it for real, if it changes a pool.
    """

    machine: str
    requests: int
    settings: Settings
    changes: Mapping[str, Settings]


def unset(*changes: str) -> dict[str, Settings]:
    """Changes that no setting makes."""
    return {change: {} for change in changes}


PINNED = "16GB"
"""Page-locked memory, so that weights pass through two links."""
FIXED = {
    "layer_streaming": Case(
        "t4",
        32,
        {},
        unset(
            "link host->gpu x0.5",
            "link host->gpu x4",
            "kernel post_attention x10",
            "kernel post_attention x0.5",
            "link host->gpu x8, kernel post_attention x2",
        ),
    ),
    "cgopipe": Case(
        "t4",
        64,
        {},
        unset(
            "link host->gpu x0.5",
            "link host->gpu x2",
            "link host->gpu x2, link host->pinned x2",
            "kernel cpu_attention x50",
            "kernel post_attention x8",
        ),
    ),
    "flexgen": Case(
        "l4",
        64,
        {},
        unset(
            "link host->gpu x0.5",
            "link host->gpu x2",
            "link gpu->host x0.1",
            "kernel post_attention x10",
            "kernel attention x0.5, link host->gpu x1.5",
        ),
    ),
}
DECIDING = {
    "lru_offload": Case(
        "a100-80g",
        1,
        {"offload_per_layer": 6},
        {
            "link host->gpu x0.5": {},
            "link host->gpu x2": {},
            "kernel run_expert x20": {},
            "pool experts x1.5": {"offload_per_layer": 5},
            "pool experts x2": {"offload_per_layer": 4},
        },
    ),
    "least_stale": Case(
        "a100-80g",
        1,
        {"experts": 30},
        {
            "link host->gpu x0.5": {},
            "link host->gpu x2": {},
            "kernel run_expert x20": {},
            "pool experts x1.5": {"experts": 45},
            "pool experts x2": {"experts": 60},
        },
    ),
    "expert_cache": Case(
        "t4",
        4,
        {},
        {
            "link host->gpu x0.7": {},
            "link host->gpu x1.5": {},
            "kernel run_expert x0.7": {},
            "kernel run_expert x1.5": {},
            "kernel attention x20": {},
        },
    ),
}
CASES = FIXED | DECIDING

BENCHMARK = Benchmark(
    __doc__,
    "what_ifs",
    measures=(*SIMULATION, "moesched/analysis", "moesched/trace", "benchmarks/_planted.py"),
    parts=CASES,
    rounds_help="the clock is virtual: more than one gives the same",
    by_machine=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask about all changes, and make them; 1 where a sign is wrong."""
    options = BENCHMARK.parse(arguments)
    answers = [answer for policy in track(options.only, "asking") for answer in answers_for(policy)]
    for each in answers:
        print(
            f"{each['policy']:<16} {each['change']:<44} {each['speedup']:6.3f}x, {each['true_speedup']:6.3f}x "
            f"for real: {each['error_percent']:+.2f} %{'' if each['right_sign'] else ', WRONG SIGN'}"
        )
    summary = {sort: summary_of(answers, cases) for sort, cases in (("fixed", FIXED), ("deciding", DECIDING))}
    print(summary)
    BENCHMARK.write({**summary, "answers": answers})
    return int(not all(each["right_sign"] for each in answers))


def answers_for(policy: str) -> Iterator[dict[str, Any]]:
    """The answers for one policy, each beside the truth."""
    case = CASES[policy]
    before = recorded(policy, case)
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


def made_for_real(policy: str, case: Case, change: str, settings: Settings, before: Recording) -> Recording:
    """The run on the changed machine, at changed costs, or with more room."""
    machine, dear = [], {}
    for part in change.split(", "):
        kind, name, factor = part.split()
        if kind == "link":
            machine.append(f"link.{name}={factor}")
        elif kind == "kernel":
            kinds = {each.task.kind for each in before.slices if each.task.verb == name}
            dear.update(dict.fromkeys(kinds, float(factor[1:])))
    return recorded(policy, case, machine, dear, settings)


def recorded(
    policy: str,
    case: Case,
    changes: Sequence[str] = (),
    dear: Mapping[str, float] | None = None,
    settings: Settings | None = None,
) -> Recording:
    """A run of Mixtral 8x7B on the virtual clock."""
    machine = changed(staged(load_machine(case.machine), PINNED, ring=False), changes)
    layout = weight_layout(SHAPES["mixtral-8x7b"])
    made = make_policy(policy, {**case.settings, **(settings or {})})
    batch = split_batch([PROMPT] * case.requests, NEW_TOKENS, max(1, case.requests // 4))
    recorder = Recorder()
    plan = plan_run(machine, layout, batch, made)
    simulate(plan, made, cost=Dear(machine, layout.dtype, dear) if dear else None, recorder=recorder)
    return recorder.recording()


def seconds(recording: Recording) -> float:
    """The duration of a run without loading."""
    run = without_loading(recording)
    return (run.end - run.start) / 1e9


def same_sign(speedup: float, true: float) -> bool:
    """Test whether both are faster, both slower, or both the same within a thousandth."""
    return (speedup - 1) * (true - 1) >= 0 or max(abs(speedup - 1), abs(true - 1)) < 0.001


def summary_of(answers: Sequence[dict[str, Any]], cases: Mapping[str, Case]) -> dict[str, Any]:
    """The errors for the policies of one sort."""
    chosen = [each for each in answers if each["policy"] in cases]
    errors = [abs(each["error_percent"]) for each in chosen]
    return {
        "answers": len(chosen),
        "right_signs": sum(each["right_sign"] for each in chosen),
        "median_error_percent": median(errors) if errors else None,
        "worst_error_percent": max(errors, default=None),
    }


if __name__ == "__main__":
    raise SystemExit(main())
