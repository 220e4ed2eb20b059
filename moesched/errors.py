"""Every error that moesched raises on purpose. An error that ends a run has the run's results so far as `report`.

MoeschedError
├── BadInput            the user's input: a file, a flag, a size; the command line prints one line
│   ├── DoesNotFit      no policy fits the memories; carries the bytes that each policy lacks
│   ├── NotFinite       the logits of a step are not finite, as those of a damaged checkpoint may be
│   └── OutOfMemory     the system has less memory left than the plan takes
├── PolicyError         a policy submitted something illegal; raised at the policy's own line
│   ├── OutOfOrder      a verb whose input does not exist yet, or was consumed already
│   ├── NotResident     a page that is not in the memory that a kernel reads it from
│   └── OverBudget      more bytes than the budget of a memory allows
├── KernelFailed        a kernel of a plug-in raised, or returned a wrong type, shape or dtype
├── WrongValue          a device returned a value that is no result of a task; names device, value and task
├── TaskFailed          a task raised an error on its lane; names task, lane and line
├── TransportError      a collective cannot end: a rank is missing or gave up, or the transport was closed
│   └── RankLost        a rank is gone: its process ended, its machine is silent, or it left
│       └── NodeLost    a node of a cluster is gone, and the others cannot continue without it
└── TaskCancelled       the task never ran, because a task that it depends on failed or was cancelled
"""

from __future__ import annotations

import errno
from typing import Any


def attach_report(error: BaseException, report: Any) -> None:
    """Store the report of a run as the attribute `report` of the error that ended the run."""
    vars(error)["report"] = report


def report_of(error: BaseException) -> Any:
    """Return the report of the run that an error ended; None where no run had begun."""
    return vars(error).get("report")


class MoeschedError(Exception):
    """Base of all errors that moesched raises on purpose."""


class BadInput(MoeschedError):
    """The user's input cannot be used; the message names the value and the remedy in one line."""


class DoesNotFit(BadInput):
    """No policy fits the machine's memories.

    Attributes:
        ranking: all policies that were tried, each as a `Ranked`, with the bytes that it lacks.
    """

    def __init__(self, message: str, ranking: list[Any]) -> None:
        super().__init__(message)
        self.ranking = ranking


class NotFinite(BadInput):
    """The logits of a step are not finite; the message names the step and the first tensor with such values."""


class OutOfMemory(BadInput):
    """The system refused memory, or a thread; the message says how many bytes the plan takes."""


class PolicyError(MoeschedError):
    """A policy submitted an illegal task; raised at the line that submitted it.

    Attributes:
        line: the policy's line, as file:line, if the policy has moved on and the traceback lacks that line; else empty.
    """

    line = ""


class OutOfOrder(PolicyError):
    """A verb was submitted before its input exists, or after its input was consumed."""


class NotResident(PolicyError):
    """A kernel needs a page that is not in the memory from which the kernel reads."""


class OverBudget(PolicyError):
    """More bytes are needed than the budget of a memory allows."""


class KernelFailed(MoeschedError):
    """A kernel of a plug-in raised, or returned a wrong type, shape or dtype; the message names the kernel."""


class WrongValue(MoeschedError):
    """A device returned an invalid value for a task; the message names the device, the value and the task."""


class TaskFailed(MoeschedError):
    """A task raised an error on its lane; the message names the task, its lane, and the line that submitted it."""


class TransportError(MoeschedError):
    """A collective cannot end: a rank is missing or gave up, or the transport was closed."""


class RankLost(TransportError):
    """Ranks are gone and take part in no further collective.

    Attributes:
        ranks: numbers of the lost ranks.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class NodeLost(RankLost):
    """A node of a cluster is gone, and the others cannot continue without it.

    Attributes:
        report: the results so far; None if there are none.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, (rank,))
        self.report: Any = None

    @property
    def rank(self) -> int:
        """The rank of the lost node."""
        return self.ranks[0]


class TaskCancelled(MoeschedError):
    """A task never ran, because a task that it depends on failed or was cancelled."""


GPU_REFUSALS = (
    "cuda out of memory",
    "cuda error: out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
"""Phrases in the errors of torch and of CUDA's libraries which say that a GPU has no memory left."""

_REFUSALS = (
    *GPU_REFUSALS,
    "not enough memory",
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "can't start new thread",
    "could not create a primitive",
    "failed to map segment",
    "insufficient memory",
    "attempting to allocate",
    "unable to allocate",
    "resource limit",
)
"""Phrases in the errors of torch, MLX, Python, CUDA, Metal and the dynamic linker which say that memory ran out."""


def memory_refusal(error: BaseException | None) -> str | None:
    """Return the phrase in which an error or one of its causes says that memory ran out; None if none says so."""
    seen: set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, BaseExceptionGroup):
            return next(filter(None, map(memory_refusal, error.exceptions)), None)
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return "cannot allocate memory"
        if isinstance(error, RuntimeError | ImportError):
            text = str(error).lower()
            for part in _REFUSALS:
                if part in text:
                    return part
        error = error.__cause__ or error.__context__
    return None
