"""The seams: every place where something of yours can be plugged in, with what it promises.

All of them are structural: no base class is needed. Each has a conformance suite that plug-in authors can import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from moesched.drivers.lanes import LaneKind, Streams
    from moesched.requests.sampling import Sampling
    from moesched.steps.plan import Plan
    from moesched.steps.step import Step
    from moesched.tasks import Task, Work

    Array = npt.NDArray[Any]


class Policy(Protocol):
    """Plans a run and schedules its steps.

    A policy is made anew for each run, with the user's `--set` values as keyword arguments. It submits tasks through
    the step's verbs in program order and may await their handles, and nothing else. For one with a setting `kv_on_gpu`,
    the share of the micro-batches whose KV cache stays on the accelerator, from 0 to 1, the planner searches that too.

    On a machine with several equal accelerators the model is cut over all of them (tensor parallelism), and a policy
    sees one, with its share. A class with `pipelines = True` sees the whole, and its `plan` calls `Plan.pipeline`.

    Where several machines share a model's experts, each has a policy of its own, with `expert_parallel = True`.
    Its `plan` calls `Plan.place_experts` and its steps `Step.assign`, alike on all of them.
    """

    def plan(self, plan: Plan) -> None:
        """Decide where the KV cache lives, which pages stay, which pools the others stream through."""

    async def prefill(self, step: Step) -> None:
        """Schedule the prompts, up to and including each micro-batch's `sample`."""

    async def decode(self, step: Step) -> None:
        """Schedule one more token of each sequence, up to and including each micro-batch's `sample`."""


class Demand(NamedTuple):
    """What one task asks of the machine.

    Attributes:
        seconds: its time alone on the machine.
        shares: the share of each resource that it takes meanwhile, between 0 and 1, to three decimals, so that
            tasks of nearly the same kind share alike.
        sort: what others that run beside it are slowed by; empty where that was not measured.
        slowed: its speed beside tasks of other sorts, relative to being alone, as (`at_once` of the sorts, speed).
        lead: how many of the seconds pass before it starts: until the thread of its lane has it.
    """

    seconds: float
    shares: tuple[tuple[str, float], ...]
    sort: str = ""
    slowed: tuple[tuple[str, float], ...] = ()
    lead: float = 0.0


def at_once(sorts: Iterable[str]) -> str:
    """What tasks of these sorts are called while they run at once."""
    return " + ".join(sorted(sorts))


class CostModel(Protocol):
    """Says how long work takes. Pure: the same work always costs the same, and nothing random is drawn."""

    def work(self, work: Work) -> Demand:
        """Time alone on the machine and the share of each resource meanwhile.

        Raises:
            BadInput: it has no cost for this work; it never guesses zero.
        """


class Delay(Protocol):
    """Says what tasks of a lane take longer for what was, or was not, done before them: on a virtual clock only.

    It may remember what it was asked, unlike a cost model. It is asked once of every task that starts on its lane, in
    the order of their starts.
    """

    def __call__(self, task: Task, now: int) -> int:
        """How many nanoseconds longer than its work says a task takes that starts now."""


class Device(Protocol):
    """Runs tasks on real hardware.

    A device runs batches of one model, one after the other: each starts with `begin`, once the tasks of the batch
    before have ended. `execute` is called on the thread of the task's lane, one task at a time for each lane, and
    returns when the result is there. Foreign exceptions may leave it: the driver turns them into the task's failure.

    A device may also have `clock()`, nanoseconds of the machine that it imitates, which all times are then read from;
    `emulation()`, how that went; `own_bytes`, what it takes beside what plans reserve; `stand_by()`, called several
    times a second while a node waits for something to do; `join(rank, transport, first)`,
    called once, before the first batch, where it is one of several ranks that a model is cut over, or of several nodes
    that share its experts, `first` being the first one in this process, which begins each batch last; on its class
    `machine(host)`, what `--machine auto` is with it, and `check_machine(machine)`, which raises BadInput for a machine
    that it is not. It may let itself be watched, from the first batch on: `observe_routing(observer)` and
    `observe_activations(observer)`.
    """

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        """What each lane is, by its name; a worker thread where nothing is said."""

    @property
    def streams(self) -> Streams | None:
        """What issues tasks to lanes that are streams; None where there are none."""

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Get ready for a batch: allocate what the plan says, no more, and take in the prompts' token ids.

        The plan's pages that stay come with `load` tasks in every batch; a device that still has such a page from
        the batch before need not read it again. All else of that batch is let go of.

        Raises:
            BadInput: the prompts cannot be used.
        """

    def execute(self, task: Task) -> Any:
        """Run one task and return its value."""

    async def aclose(self) -> None:
        """Free what the device holds. Called once, after the last batch or before the first; must not raise."""


class Observer(Protocol):
    """Is told of every task that ran."""

    def ended(self, task: Task) -> None:
        """A task's start, end, value and edges are known. Called from any thread, but never at once."""


class TokenSpan(NamedTuple):
    """Tokens of one request that lie together.

    Attributes:
        request: its index among all requests of the run.
        first: the first one's position in the request.
        tokens: how many they are.
    """

    request: int
    first: int
    tokens: int


class RoutingObserver(Protocol):
    """Is told what a model's routers chose on a device."""

    def routed(self, layer: int, spans: Sequence[TokenSpan], experts_Tk: npt.NDArray[np.int64]) -> None:
        """A layer's experts of some tokens, ascending; the rows are those of the spans, one after the other.

        Every token is told of once for each layer. Called from any thread, but never at once.
        """


class ActivationObserver(Protocol):
    """Is told what the experts' activation function let through on a device."""

    def activated(self, layer: int, values_nI: npt.NDArray[np.float32]) -> None:
        """The values after SiLU of an expert, for some tokens that were routed to it: a row for each.

        Called from any thread, and several at once.
        """


class Exchange(NamedTuple):
    """One collective of a run, as every rank that takes part in it names it.

    Attributes:
        ticket: its number in the sequence of all collectives, from 0.
        signature: what it is about; ranks that say otherwise are told of each other.
        step, layer: where it belongs; -1 where it belongs to none.
    """

    ticket: int
    signature: str = ""
    step: int = -1
    layer: int = -1


class Transport(Protocol):
    """Carries collectives between ranks: arrays of numbers, in the host's memory.

    Calls come in the same order on all ranks, each on the thread of a lane, which it blocks until the result is there.
    Every call returns the same bits on every rank that it returns something on, or raises TransportError: a rank did
    not come in time, is lost, or says that another exchange is due. Parts are not changed, results are the caller's.

    Each rank has a transport of its own, but for those whose ranks are threads of one process.
    """

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """The sum of all ranks' parts, which are alike in shape and type, added in the order of the ranks."""

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """The array of the rank `root`, on all ranks; the others give None, and need not know its shape."""

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """The parts of all ranks in their order, which may differ in shape, on the rank `root`; None on the others."""

    async def aclose(self) -> None:
        """Free what the transport holds; waiting ranks get an error. Must not raise."""


class Routing(Protocol):
    """Says which experts tokens take where no router runs. Pure in its arguments and its seed."""

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """How many of a micro-batch's tokens go to each expert that gets any, in ascending order of expert."""
