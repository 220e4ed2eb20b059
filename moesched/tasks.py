"""The vocabulary of the engine: blocks of data, lanes, and the typed tasks that run on them.

A task is a value with two halves. The first is what the policy said: a lane, a kind of work, what it is about
(layer, micro-batch, expert). The second belongs to the engine: state, edges, times. Tasks are structs without
garbage-collector tracking, since a schedule makes hundreds of thousands of them; that is safe because a task
refers to later tasks only, and forgets them when it settles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from types import CodeType
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

S = TypeVar("S")

WAITING, READY, RUNNING, ISSUED, DONE, FAILED, CANCELLED = range(7)
STATE_NAMES = ("waiting", "ready", "running", "issued", "done", "failed", "cancelled")

Discipline = Literal["in_order", "ready_first"]

DEMAND, PREFETCH, IDLE = range(3)
"""Classes of a link's transfers: a lower class goes first."""

_CLASS_SHIFT = 48


class Block:
    """A named piece of data in one memory: what dependencies attach to.

    `tag` says which value the block holds, as the policy's program order sees it; `None` is no value yet.
    `writer` and `readers` are the tasks that touched it last, from which the engine infers edges.
    """

    __slots__ = ("memory", "name", "nbytes", "readers", "tag", "writer")

    def __init__(self, name: str, nbytes: int = 0, memory: str = "") -> None:
        self.name = name
        self.nbytes = nbytes
        self.memory = memory
        self.tag: int | None = None
        self.writer: Task | None = None
        self.readers: list[Task] = []

    def __repr__(self) -> str:
        place = self.memory or "no memory"
        return f"<{type(self).__name__} {self.name} in {place}: {self.nbytes} bytes, tag {self.tag}>"


class Lane:
    """One serial resource: a compute stream, a copy direction, a CPU pool, a disk queue, a network card.

    `in_order` issues tasks as submitted; `ready_first` takes the ready task of the lowest class, then the earliest.
    Lanes of one `domain` are streams of one device: an edge between two of them holds on the device itself, so a task
    is handed to its stream as soon as those before it were, at most `depth` ahead of the stream's progress.
    `busy` adds up the nanoseconds that the lane ran. `simple` lanes are no streams and carry no collectives.
    """

    __slots__ = (
        "busy",
        "depth",
        "domain",
        "heap",
        "in_flight",
        "in_order",
        "index",
        "name",
        "queue",
        "running",
        "simple",
    )

    def __init__(
        self, name: str, discipline: Discipline = "ready_first", *, domain: str | None = None, depth: int = 2
    ) -> None:
        self.name = name
        self.in_order = discipline == "in_order"
        self.simple = domain is None
        self.domain = domain
        self.depth = depth
        self.in_flight = 0
        self.index = -1
        self.busy = 0
        self.running: Task | None = None
        self.heap: list[tuple[int, Task]] = []
        self.queue: deque[Task] = deque()

    def __repr__(self) -> str:
        return f"<Lane {self.name}>"


class WorkPart(NamedTuple):
    """Operations of one sort within a work, as measured cost tables know them.

    Attributes:
        operation: the sort, such as "expert" (weights as they were read) or "resident expert" (weights that stay).
        size: of one of them: bytes of weights, bytes moved where there are none, FLOPs of a prompt's attention, bytes
            of a KV head in a step's.
        rows: what the weights are multiplied with: tokens, by expert a mean over experts. Of a transfer, its pages;
            of a step's attention, its KV heads.
        times: how many; not whole where it is an expectation.
    """

    operation: str
    size: float
    rows: float = 1.0
    times: float = 1.0


class Work(msgspec.Struct, eq=False):
    """What a task asks of the machine. Shared by all tasks of the same kind and size in a step.

    Attributes:
        kind: the kind of operation, for cost tables and reports, such as "expert_ffn".
        flops: floating-point operations on the task's processor.
        nbytes: bytes read from and written to the processor's memory, or carried over a link.
        tokens: rows of the operation, for cost tables.
        resource: the processor, link or network of the machine that does it.
        parts: what it consists of, for cost tables.
        nanoseconds, lead, demand: the time alone on the machine, what of it passes before a task starts, and the
            shares of its resources; the virtual driver fills them in.
    """

    kind: str
    resource: str
    flops: float = 0.0
    nbytes: float = 0.0
    tokens: int = 0
    parts: tuple[WorkPart, ...] = ()
    nanoseconds: int = -1
    lead: int = 0
    demand: Any = None


def _set_plainly(cls: type[S]) -> type[S]:
    """Let the interpreter set a struct's attributes by itself, which takes a quarter of the time that msgspec takes.

    What msgspec adds is for the garbage collector, which does not know of tasks.
    """
    cls.__setattr__ = object.__setattr__  # type: ignore[method-assign]
    cls.__delattr__ = object.__delattr__  # type: ignore[method-assign]
    return cls


@_set_plainly
class Task(msgspec.Struct, eq=False, gc=False):
    """One operation on a lane. Submitting one gives it back: the task is its own handle, `await task` its value.

    `deps` are the ids of the tasks that it waits for, the first `inputs` of which it needs the results of.
    `followers` are the tasks that wait for it; None once it has settled.
    `taken` is when its lane took it, on real hardware: what passes until `start` is the waking of a thread.
    """

    lane: Lane
    work: Work
    verb: str
    layer: int = -1
    micro_batch: int = -1
    expert: int = -1
    operands: Any = None
    step: int = -1
    id: int = -1
    key: int = 0
    state: int = WAITING
    waits: int = 0
    start: int = -1
    end: int = -1
    deps: list[int] = []
    inputs: int = 0
    followers: list[Task] | None = []
    after: list[Task] | None = None
    released: list[Task] | None = None
    waiter: Any = None
    value: Any = None
    cause: BaseException | None = None
    code: CodeType | None = None
    instruction: int = -1
    taken: int = -1

    def __await__(self) -> Generator[Task, Any, Any]:
        if self.state < DONE:
            yield self
        if self.state != DONE:
            assert self.cause is not None
            raise self.cause
        return self.value

    @property
    def label(self) -> str:
        """What a reader calls the task: verb, layer, micro-batch, expert."""
        parts = [self.verb]
        if self.layer >= 0:
            parts.append(f"L{self.layer}")
        if self.expert >= 0:
            parts.append(f"E{self.expert}")
        if self.micro_batch >= 0:
            parts.append(f"mb{self.micro_batch}")
        return " ".join(parts)

    @property
    def line(self) -> str:
        """The policy line that submitted the task, as `file:line`; empty where it was not recorded."""
        if self.code is None:
            return ""
        return f"{self.code.co_filename}:{_line_of(self.code, self.instruction)}"

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} #{self.id} {self.label} on {self.lane.name}: {STATE_NAMES[self.state]}>"
        )


@_set_plainly
class Kernel(Task, gc=False, eq=False):
    """An operation on the accelerator."""


@_set_plainly
class HostKernel(Task, gc=False, eq=False):
    """An operation on the host's processor: CPU attention, a CPU expert."""


@_set_plainly
class PageTransfer(Task, gc=False, eq=False):
    """A copy between memories: weight pages into slots, or a micro-batch's activations."""

    pages: tuple[Any, ...] = ()
    slots: tuple[Any, ...] = ()


@_set_plainly
class Decision(Task, gc=False, eq=False):
    """An operation whose value a policy may need to know: routing, sampling."""


@_set_plainly
class Collective(Task, gc=False, eq=False):
    """An operation that all ranks carry out together; `ticket` numbers it, `signature` must agree among the ranks."""

    ticket: int = -1
    signature: str = ""


@_set_plainly
class Join(Task, gc=False, eq=False):
    """Takes no lane and no time: one node that stands for many, so that n readers of n pages need 2n edges."""


def priority(link_class: int, task_id: int) -> int:
    """The key of a ready task: its link class first, then program order."""
    return link_class << _CLASS_SHIFT | task_id


def link_class(key: int) -> int:
    """The link class that `priority` put into a key."""
    return key >> _CLASS_SHIFT


def _line_of(code: CodeType, instruction: int) -> int:
    """The source line of a byte offset in a code object: kept as an offset, since looking it up costs a microsecond."""
    line = code.co_firstlineno
    for start, _, number in code.co_lines():
        if start > instruction:
            break
        if number is not None:
            line = number
    return line
