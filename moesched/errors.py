"""Every error that moesched raises on purpose.

MoeschedError
├── BadInput            the user's input: a file, a flag, a size; the command line prints one line, exit code 2
│   └── NotFinite       the logits of a step are no numbers: of a damaged checkpoint, say
├── PolicyError         a policy submitted something illegal; raised at the policy's own line
│   ├── OutOfOrder      a verb whose input is not there yet, or was consumed already
│   ├── NotResident     a page that is not in the memory that a kernel reads it from
│   └── OverBudget      more bytes than a memory's budget holds
├── TaskFailed          a task raised on its lane; carries the task's story
├── TransportError      a collective cannot end: a rank did not come, gave up, or the transport was closed
│   └── RankLost        a rank is there no more: its process ended, its machine is silent, or it left
│       └── NodeLost    a node of a cluster, without which the others cannot go on
└── TaskCancelled       the task never ran, since something that it needed failed or was cancelled
"""

from __future__ import annotations

from typing import Any


class MoeschedError(Exception):
    """Base of all errors that moesched raises on purpose."""


class BadInput(MoeschedError):
    """The user's input cannot be used; the message names the value and the remedy in one line."""


class NotFinite(BadInput):
    """The logits of a step are no numbers; the message names the step and where the bad numbers began."""


class PolicyError(MoeschedError):
    """A policy submitted an illegal task; raised at the line that submitted it."""


class OutOfOrder(PolicyError):
    """A verb was submitted before its input exists, or after its input was consumed."""


class NotResident(PolicyError):
    """A kernel needs a page that is not in the memory that it reads."""


class OverBudget(PolicyError):
    """A memory's budget does not hold what was asked of it."""


class TaskFailed(MoeschedError):
    """A task raised on its lane; the message tells its story: label, lane, what it waited for, who submitted it."""


class TransportError(MoeschedError):
    """A collective cannot end: a rank did not come, gave up, or the transport was closed."""


class RankLost(TransportError):
    """Ranks are there no more, and take part in nothing again.

    Attributes:
        ranks: which ones.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class NodeLost(RankLost):
    """A node of a cluster is gone, and the others cannot go on without it.

    Attributes:
        report: what came out so far, where there is anything.
    """

    def __init__(self, message: str, rank: int, report: Any = None) -> None:
        super().__init__(message, (rank,))
        self.report = report

    @property
    def rank(self) -> int:
        """The node's."""
        return self.ranks[0]


class TaskCancelled(MoeschedError):
    """A task was never run, because something that it needed failed or was cancelled."""
