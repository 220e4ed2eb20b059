"""The seams: every place where something of yours can be plugged in, with what it promises.

All of them are structural: no base class is needed. Each has a conformance suite that plug-in authors can import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from moesched.drivers.lanes import LaneKind, Streams
    from moesched.machines import Machine
    from moesched.models.checkpoint import Checkpoint
    from moesched.models.layout import Page, WeightLayout
    from moesched.requests.sampling import Sampling
    from moesched.runs.outcome import Emulation
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
    sees one, with its share. A policy for anything else declares it on its class: `Pipelined`, `ExpertParallel`.
    """

    def plan(self, plan: Plan) -> None:
        """Decide where the KV cache lives, which pages stay, which pools the others stream through."""

    async def prefill(self, step: Step) -> None:
        """Schedule the prompts, up to and including each micro-batch's `sample`."""

    async def decode(self, step: Step) -> None:
        """Schedule one more token of each sequence, up to and including each micro-batch's `sample`."""


@runtime_checkable
class Pipelined(Protocol):
    """A policy class that declares whether it gives each of several accelerators layers of its own.

    With True it sees the whole machine, and its plan has a stage per accelerator.
    """

    pipelines: bool


@runtime_checkable
class ExpertParallel(Protocol):
    """A policy class that declares whether several machines share a model's experts, each with a policy of its own.

    With True its `plan` calls `Plan.place_experts` and its steps `Step.assign`, alike on all machines. Without a
    declaration it runs on one machine.
    """

    expert_parallel: bool


def is_pipelined(policy: object) -> bool:
    """Whether a policy, or its class, declares `pipelines = True`."""
    return isinstance(policy, Pipelined) and policy.pipelines


def is_expert_parallel(policy: object) -> bool:
    """Whether a policy, or its class, declares `expert_parallel = True`."""
    return isinstance(policy, ExpertParallel) and policy.expert_parallel


class Demand(NamedTuple):
    """The demand of one task on the machine.

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
    """The canonical name of a set of concurrent sorts of task."""
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
        """The nanoseconds by which a task that starts now takes longer than its work says."""


class Device(Protocol):
    """Runs tasks on real hardware, batch after batch of one model.

    The framework calls, in this order: the constructor; `slot_bytes`, whenever a policy plans; then for each batch
    `kinds`, `begin`, `streams` and `execute`, once the tasks of the batch before have ended; `aclose`, once.
    Whatever else a device can do is one of the small protocols below; none of them is required.
    """

    def __init__(self, checkpoint: Checkpoint, layout: WeightLayout, **settings: Any) -> None:
        """Open a model's files; weights are read later.

        Args:
            checkpoint: the tensors in the files, of this rank's share where the model is cut.
            layout: the same tensors cut into pages, and the dtype to compute in.
            settings: the user's `--device-set` values, as keyword arguments with defaults, checked against their types.

        Raises:
            BadInput: the hardware is not there, or a setting is out of range. Nothing stays open then.
        """

    @property
    def layout(self) -> WeightLayout:
        """The layout that it was made with."""

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        """The kind of each lane by name; lanes that are not listed are worker threads. Constant for a batch."""

    @property
    def streams(self) -> Streams | None:
        """The issuer of tasks to lanes of kind "stream", on the driver's clock; None without such lanes."""

    def slot_bytes(self, page: Page) -> int:
        """Bytes of memory that a page takes in a slot, at least `page.nbytes`; constant. Called before any `begin`."""

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Get ready for a batch: allocate what the plan reserves, no more, and take in the prompts' token ids.

        The plan's pages that stay come with `load` tasks in every batch; a device that still has such a page from
        the batch before need not read it again. Everything else of that batch is freed. Called on the main thread.

        Raises:
            BadInput: the device cannot run such a batch. `aclose` follows.
        """

    def execute(self, task: Task) -> Any:
        """Run one task and return its value once its effects are there.

        Called on the thread of the task's lane, one task at a time for each lane, several lanes at once; a task
        starts when all that it depends on has ended. The value of `route` is the number of rows of each expert that
        has any, of `sample` one token for each sequence that ends its prompt or decodes; other verbs return None.

        Raises:
            Exception: of any kind; the driver turns it into the task's failure, and ends the run.
        """

    async def aclose(self) -> None:
        """Free everything. Called once by whoever opened the device, after the last task has ended; must not raise."""


@runtime_checkable
class JoinsRanks(Protocol):
    """A device that can be one of several: ranks that a model is cut over, or nodes that share its experts."""

    def join(self, rank: int, transport: Transport, first: Device) -> None:
        """Become a rank. Called once before the first batch, or on a node before each order.

        Args:
            rank: its number, from 0.
            transport: carries the exchanges of its `Collective` tasks; the caller closes it.
            first: rank 0's device where that is in this process, which begins each batch last; else the device itself.

        Raises:
            BadInput: there is no hardware for that rank.
        """


@runtime_checkable
class DescribesMachine(Protocol):
    """A device class that knows more about this machine than the system tells, such as its GPU."""

    @staticmethod
    def machine(host: Machine) -> Machine:
        """The machine that `--machine auto` stands for: the host, with what the device adds to it.

        Raises:
            BadInput: the hardware is not there, or the user has to name a machine.
        """


@runtime_checkable
class ChecksMachine(Protocol):
    """A device class that runs on some machines only."""

    @staticmethod
    def check_machine(machine: Machine) -> None:
        """Accept a machine.

        Raises:
            BadInput: the device cannot be that machine.
        """


@runtime_checkable
class KeepsTime(Protocol):
    """A device that imitates another machine, whose clock all times are read from."""

    def clock(self) -> int:
        """Nanoseconds on that machine's clock; never goes back. Called from any thread."""


@runtime_checkable
class Emulates(Protocol):
    """A device that slows itself down to another machine's speed."""

    def emulation(self) -> Emulation:
        """Real work compared with the emulated machine's time, since `begin`. Called after a batch."""


@runtime_checkable
class CountsReads(Protocol):
    """A device that counts the bytes that it reads from the checkpoint's files."""

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, over all batches."""


@runtime_checkable
class HasOwnBytes(Protocol):
    """A device that takes memory beyond what plans reserve."""

    @property
    def own_bytes(self) -> int:
        """These bytes, for the report."""


@runtime_checkable
class StandsBy(Protocol):
    """A device whose weights would be paged out while it idles."""

    def stand_by(self) -> object:
        """Use the weights a little. Called several times a second while a node waits for work."""


@runtime_checkable
class ObservesRouting(Protocol):
    """A device that reports which experts the routers choose."""

    def observe_routing(self, observer: RoutingObserver) -> None:
        """Report to an observer from the next batch on."""


@runtime_checkable
class ObservesActivations(Protocol):
    """A device that reports the experts' activations."""

    def observe_activations(self, observer: ActivationObserver) -> None:
        """Report to an observer from the next batch on."""


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
    Every call returns the same bits on every rank that it returns something on. Parts are not changed; results belong
    to the caller.

    Each rank has a transport of its own, unless the ranks are threads of one process, which may share one.

    Raises:
        TransportError: a rank does not come in time, is lost, or names another exchange. Every call may raise it, on
            each rank that waits for the others.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Meet the other ranks. The parameters say how.

        `(ranks)`: the ranks are threads that share the transport. `(addresses, rank, *, keys, listen, epoch,
        lost_after_seconds)`: each process listens at one of the addresses. `(rank, ranks)`: rank 0 is found by
        MASTER_ADDR and MASTER_PORT. `()`: the environment says it all.

        Raises:
            TransportError: the ranks do not meet in time.
        """

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """The sum of all ranks' parts, which are alike in shape and type, added in the order of the ranks."""

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """The array of the rank `root`, on all ranks; the others give None, and need not know its shape."""

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """The parts of all ranks in their order, which may differ in shape, on the rank `root`; None on the others."""

    async def aclose(self) -> None:
        """Free everything; ranks that wait get a TransportError. Called once by whoever opened it; must not raise."""


@runtime_checkable
class Abandons(Protocol):
    """A transport on which a rank can say that it will not come."""

    def abandon(self, rank: int, exchange: Exchange, reason: str) -> None:
        """End an exchange with a TransportError, which gives the reason, on the ranks that wait for this one."""


class Routing(Protocol):
    """Says which experts tokens take where no router runs. Pure in its arguments and its seed."""

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """The number of a micro-batch's tokens for each expert that gets any, in ascending order of expert."""
