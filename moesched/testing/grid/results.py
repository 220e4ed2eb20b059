"""Results of a check over a grid: the policy's faults, advice to it, and the figures of each cell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    from moesched.testing.grid.cells import Cell

TIE = 1.001
"""Factor within which two times count as equal."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of the policy.

    Attributes:
        line: the policy's line, as file:line.
        message: the error's type and text.
        case: the first case in which the fault was found.
        cases: number of cases in which this line had a fault of this type.
        more: further lines of text: the policy's own frames, and a hint.
    """

    line: str
    message: str
    case: str
    cases: int = 1
    more: list[str] = []

    @property
    def key(self) -> tuple[str, str]:
        """The line and type of the fault; faults with equal keys are reported once, although their texts may differ."""
        return self.line, self.message.partition(":")[0]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A finding about a policy that is no fault, but costs time or memory.

    Attributes:
        line: the policy's line, as file:line; empty if there is none.
        kind: a short text for the kind of advice, the same in all cases with this advice.
        message: the finding as text.
        case: the first case of the finding.
        cases: number of cases with this finding.
    """

    line: str
    kind: str
    message: str
    case: str
    cases: int = 1

    @property
    def key(self) -> tuple[str, str]:
        """The line and the kind of the advice; findings with equal keys are reported once."""
        return self.line, self.kind


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the policy in one cell of the grid; None stands for a figure that is not known.

    Attributes:
        seconds: predicted time of the batch, from the end of loading to the last token.
        lower_bound_seconds: the least time of the batch with the same tasks in any order; see `least_nanoseconds`.
        rank: 1 for the fastest of all policies that fit; policies within 0.1 % share a rank.
        fitting: number of policies that fit, this one included.
        fastest, fastest_seconds: name and time of the fastest shipped policy.
        problem: the reason why there are no figures; empty otherwise.
    """

    model: str
    machine: str
    batch_size: int
    seconds: float | None = None
    lower_bound_seconds: float | None = None
    rank: int | None = None
    fitting: int | None = None
    fastest: str | None = None
    fastest_seconds: float | None = None
    problem: str = ""

    def of(self, cell: Cell) -> bool:
        """Test whether this is the result of a given cell."""
        return (self.model, self.machine, self.batch_size) == (cell.model, cell.machine, cell.batch_size)


class GridReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a check found about a policy.

    Attributes:
        trials: number of small cases that were run.
        unfit: number of small cases in which the policy's plan did not fit.
        cases: the results of the grid's cells.
        unchecked: names of what was not checked: small cases, cells, or the policy's rank in a cell.
        reason: the reason why something was not checked; empty if everything was.
        seconds: duration of the check.
    """

    policy: str
    faults: list[Fault]
    advice: list[Advice]
    cases: list[CellResult]
    trials: int
    unfit: int
    unchecked: list[str]
    reason: str
    seconds: float


Found = TypeVar("Found", Fault, Advice)


def merged(found: Iterable[Found]) -> list[Found]:
    """Join findings with equal keys into one, and add up their numbers of cases; the order is kept."""
    first: dict[tuple[str, str], Found] = {}
    for each in found:
        known = first.get(each.key)
        first[each.key] = each if known is None else replace(known, cases=known.cases + each.cases)
    return list(first.values())


def rank_among(seconds: float, others: Iterable[float]) -> int:
    """Return the rank of the time `seconds`: 1, plus 1 for each other time that is shorter by more than 0.1 %."""
    return 1 + sum(other * TIE < seconds for other in others)
