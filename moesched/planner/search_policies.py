"""The search for the best policy: bounds first, then schedules, the most promising first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from moesched import plugins
from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.machines.cost import cost_model
from moesched.models.layout import Page, WeightLayout
from moesched.planner.candidate import NEAR, Candidate, Seen
from moesched.planner.resources import Gain, gains
from moesched.planner.traits import KV_SHARE, Setting, splits_kv
from moesched.planner.uncertainty import Uncertainty
from moesched.settings import check_settings
from moesched.steps.process import Process

POLICIES = ("resident", "cgopipe", "flexgen", "layer_streaming", "cpu_ffn")
"""The policies to choose from where none is named."""


class Refused(msgspec.Struct, frozen=True):
    """A policy that does not fit, and the reason."""

    policy: str
    why: str


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan found.

    Attributes:
        seen: its sizes, and the predicted figures of its schedule.
        bound: tokens per second if the lanes of this schedule overlapped perfectly.
        lanes: seconds that one layer of a decode step keeps link, host and accelerator busy.
        bound_by: the busiest lane in a decode step.
        gains: relative increase of the bound for a tenth more of each resource, the most useful first.
        others: the best simulated schedule of each other policy.
        uncertainty: the band of the schedule's figures.
    """

    policy: str
    seen: Seen
    attention_on_gpu: bool
    ffn_on_gpu: bool
    bound: float
    lanes: dict[str, float]
    bound_by: str
    gains: list[Gain]
    others: dict[str, Seen]
    refused: list[Refused]
    uncertainty: Uncertainty


def plan_best(
    machine: Machine,
    layout: WeightLayout,
    lengths: Sequence[int],
    new_tokens: int,
    *,
    policies: Iterable[str] = POLICIES,
    settings: Mapping[str, Any] | None = None,
    budgets: Mapping[str, int] | None = None,
    slot_bytes: Callable[[Page], int] | None = None,
    process: Process | None = None,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Best:
    """Search for the plan with the most tokens per second.

    Args:
        lengths: prompt lengths in tokens; their number is the most requests of a batch.
        policies: names, or file.py:Class, which all take `settings`.
        process: the process that would run the plan.
        on_progress: called with the name of each stage of the search.

    Raises:
        BadInput: no policy fits; the message names the memory and the missing bytes.
    """
    candidates: list[Candidate] = []
    refused: list[Refused] = []
    for name in policies:
        on_progress(f"bound of {name}")
        policy = plugins.find("policies", name)
        setting = Setting(
            make=partial(policy, **check_settings(policy, name, settings or {})),
            machine=machine,
            layout=layout,
            lengths=tuple(lengths),
            new_tokens=new_tokens,
            cost=cost_model(machine, layout.dtype),
            budgets=dict(budgets or {}),
            slot_bytes=slot_bytes,
            splits_kv=splits_kv(policy, machine),
            kv_on_gpu=(settings or {}).get(KV_SHARE),
            process=process,
        )
        try:
            candidates.append(Candidate(name, setting))
        except BadInput as error:
            refused.append(Refused(name, str(error)))
    if not candidates:
        raise BadInput("; ".join(_reasons(refused)))
    seen = _look(candidates, on_progress)
    on_progress("gain from more of each resource")
    return _best_of(seen, refused)


def _best_of(seen: Mapping[Candidate, Seen], refused: list[Refused]) -> Best:
    best = max(seen, key=lambda candidate: seen[candidate].throughput)
    sizes = seen[best]
    return Best(
        policy=best.name,
        seen=sizes,
        attention_on_gpu=best.traits.attention_on_gpu,
        ffn_on_gpu=best.traits.ffn_on_gpu,
        bound=best.choice.throughput,
        lanes=best.choice.lanes,
        bound_by=max(sizes.trial_run.utilization, key=sizes.trial_run.utilization.__getitem__),
        gains=gains(best),
        others={candidate.name: one for candidate, one in seen.items() if candidate is not best},
        refused=refused,
        uncertainty=best.uncertainty(sizes),
    )


def _look(candidates: list[Candidate], on_progress: Callable[[str], None]) -> dict[Candidate, Seen]:
    """Simulate schedules, the highest bound first, until no remaining bound comes near the best result."""
    seen: dict[Candidate, Seen] = {}
    most = 0.0
    for candidate in sorted(candidates, key=lambda each: each.choice.throughput, reverse=True):
        if candidate.choice.throughput * NEAR < most:
            break
        on_progress(f"schedules of {candidate.name}")
        seen[candidate] = candidate.look()
        most = max(most, seen[candidate].throughput)
    return seen


def _reasons(refused: Sequence[Refused]) -> list[str]:
    """The reasons why nothing fits, each once, with the first policy that it is for."""
    reasons: dict[str, str] = {}
    for each in refused:
        reasons.setdefault(each.why.partition(" does not fit: ")[2], each.why)
    return list(reasons.values())
