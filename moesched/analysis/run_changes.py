"""Parses changes of a run as users write them, such as "link host->gpu x2". A kind of change is a row of `KINDS`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from moesched.errors import BadInput

if TYPE_CHECKING:
    from moesched.trace.recording import LaneName, Recording, TaskInfo

FACTOR = re.compile(r"([a-z]+) (.+) x([0-9]*\.?[0-9]+)")
NO_HANDOVERS = "no handovers"

Cost = Literal["time", "rate"]
"""The cost that a factor multiplies: the whole time of a task, or the bytes that its lane moves in a second."""


class Kind(NamedTuple):
    """A kind of change, which multiplies one cost of some tasks, and which users write as "WORD NAME xFACTOR".

    Attributes:
        example: an example of such a change.
        effect: the effect of the example, in words.
        named: a description of the things that NAME may be, such as lanes.
        cost: the cost that FACTOR multiplies.
        names: a function that returns all values of NAME that occur in a recording.
        name_of: a function from a task and its lane to the value of NAME that applies to the task.
    """

    example: str
    effect: str
    named: str
    cost: Cost
    names: Callable[[Recording], set[str]]
    name_of: Callable[[TaskInfo, LaneName], str]


KINDS: Mapping[str, Kind] = {
    "link": Kind(
        "link host->gpu x2",
        "twice the rate",
        "lane",
        "rate",
        names=lambda recording: {lane.name for lane in recording.lanes},
        name_of=lambda task, lane: lane.name,
    ),
    "kernel": Kind(
        "kernel run_expert x0.7",
        "0.7 of the time",
        "kind of task",
        "time",
        names=lambda recording: {each.task.verb for each in recording.slices},
        name_of=lambda task, lane: task.verb,
    ),
}
"""The kinds of changes, by WORD."""

CHOICES = ", ".join(f'"{kind.example}" ({kind.effect})' for kind in KINDS.values())
EXAMPLES = ", ".join(f'"{kind.example}"' for kind in KINDS.values()) + f' or "{NO_HANDOVERS}"'


@dataclass(frozen=True)
class Change:
    """One change of a run, or several that are made together.

    Attributes:
        factors: FACTORs by WORD and NAME (see `Kind`).
        handovers: True to replay with the recorded mean times between tasks, False with no time between tasks.
    """

    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    handovers: bool = True

    def factor(self, cost: Cost, task: TaskInfo, lane: LaneName) -> float:
        """Return the factor by which the change multiplies a cost of a task on a lane."""
        return prod(
            factors.get(kind.name_of(task, lane), 1.0)
            for word, factors in self.factors.items()
            if (kind := KINDS[word]).cost == cost
        )


def parse_change(text: str, recording: Recording) -> Change:
    """Parse the text of a change of a run, or of several changes joined by commas.

    Raises:
        BadInput: the text cannot be read, or names something that the run does not have.
    """
    factors: dict[str, dict[str, float]] = {}
    handovers = True
    for part in (part.strip() for part in text.split(",")):
        if part == NO_HANDOVERS:
            handovers = False
            continue
        if not part and text.strip():
            raise BadInput(f"{text!r} has an empty change: write changes with one comma between two")
        found = FACTOR.fullmatch(part)
        if found is None or found[1] not in KINDS or not 1e-6 <= float(found[3]) <= 1e6:
            raise BadInput(f"{part!r} is no change of a run: write, for instance, {EXAMPLES}")
        word, name, factor = found[1], found[2], float(found[3])
        kind = KINDS[word]
        known = kind.names(recording)
        if name not in known:
            there = f", only {', '.join(sorted(known))}" if known else ""
            raise BadInput(f"{part!r}: the run has no {kind.named} {name!r}{there}")
        of_kind = factors.setdefault(word, {})
        of_kind[name] = of_kind.get(name, 1.0) * factor
    return Change(factors, handovers)
