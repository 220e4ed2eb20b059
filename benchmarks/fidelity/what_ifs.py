"""`explain --what-if` against the truth: the same changes made on the virtual clock, for policies of both sorts.

Links change in the machine, and kernels in its costs. Fixed graphs submit the
same tasks after a change; policies that await routers may decide otherwise, which a what-if does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.fidelity._planted import Dear
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of, at_most, together
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


class Case(msgspec.Struct, frozen=True):
    """A policy on a machine, and the changes that are asked about.

    Attributes:
        changes: each with the settings that make it for real, if it changes a pool.
    """

    machine: str
    requests: int
    changes: Mapping[str, Settings]
    settings: Settings = {}


PINNED = "16GB"
"""Page-locked memory, so that weights pass through two links."""
SORTS = msgspec.toml.decode(
    Path(__file__).with_name("what_ifs.toml").read_bytes(), type=dict[str, dict[str, Case]]
)
FIXED, DECIDING = SORTS["fixed"], SORTS["deciding"]
CASES = FIXED | DECIDING


def claims(result: Result) -> Iterator[Claim]:
    """`explain --what-if` beside the same changes made on the virtual clock."""
    fixed, deciding = result["fixed"], result["deciding"]
    words = "what-ifs of fixed graphs"
    yield together(
        f"{words}, median and worst error",
        at_most("", fixed["median_error_percent"], 1, "{:.1f} %"),
        at_most("", fixed["worst_error_percent"], 5, "{:.1f} %"),
    )
    words = "what-ifs of policies that decide as they go"
    yield together(
        f"{words}, median error and right signs",
        at_most("", deciding["median_error_percent"], 5, "{:.1f} %"),
        all_of("", deciding["right_signs"], deciding["answers"]),
    )


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=CASES,
    rounds_help="the clock is virtual: more than one gives the same",
    by_machine=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask about all changes, and make them; 1 where a sign is wrong."""
    options = BENCHMARK.parse(arguments)
    answers = [answer for policy in track(options.only, "asking") for answer in answers_for(policy)]
    summary = {sort: summary_of(answers, cases) for sort, cases in (("fixed", FIXED), ("deciding", DECIDING))}
    return BENCHMARK.write({**summary, "answers": answers})


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
