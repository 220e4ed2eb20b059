"""The seams: protocols of everything that can be plugged in, with their promises.

All of them are structural: no base class is needed. `moesched.testing` has conformance suites for plug-in authors.
Two stand in packages below, which use them: cost models in `moesched.machines`, eviction rules in `moesched.steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec

from moesched.machines.demand import CostModel as CostModel
from moesched.machines.demand import Demand as Demand
from moesched.machines.demand import at_once as at_once
from moesched.steps.eviction_rule import Eviction as Eviction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from moesched.machines import Machine
    from moesched.machines.weights_home import WeightsHome
    from moesched.models.checkpoint import Checkpoint
    from moesched.models.layout import Page, WeightLayout
    from moesched.requests.sampling import Sampling
    from moesched.steps.plan import Plan
    from moesched.steps.step import Step
    from moesched.tasks import Task

    Array = npt.NDArray[Any]


class Policy(Protocol):
    """Plans a run and schedules its steps.

    Each batch gets a new instance, made with the user's `--set` values as keyword arguments; see `KeepsState`. It
    submits tasks through the step's verbs in program order, and may await nothing but their handles. If it has a
    setting `kv_on_gpu`, the share (0 to 1) of the micro-batches whose KV cache stays on the accelerator, the planner
    searches that too.

    On a machine with several equal accelerators the model is divided among all of them (tensor parallelism), and a
    policy sees one, with its share. A class for anything else declares it: `Pipelined`, `ExpertParallel`.
    """

    def plan(self, plan: Plan) -> None:
        """Declare where the KV cache lives, which pages stay, and which pools other pages stream through."""

    async def prefill(self, step: Step) -> None:
        """Schedule the prompts, up to and including each micro-batch's `sample`."""

    async def decode(self, step: Step) -> None:
        """Schedule one more token of each sequence, up to and including each micro-batch's `sample`.

        Some micro-batches may hold prompts instead (`Step.phase`), where a caller adds requests to a run.
        """


@runtime_checkable
class Pipelined(Protocol):
    """A policy class that declares whether it is a pipeline: each of several accelerators has layers of its own.

    If True, it sees the whole machine, and its plan has a stage per accelerator.
    """

    pipelines: bool


@runtime_checkable
class ExpertParallel(Protocol):
    """A policy class that declares whether several machines share a model's experts, each with a policy of its own.

    If True, its `plan` calls `Plan.place_experts` and its steps call `Step.assign`, with equal arguments on all
    machines. Without a declaration it runs on one machine.
    """

    expert_parallel: bool


@runtime_checkable
class KeepsState(Protocol):
    """A policy class that declares whether an instance serves all batches of a run, one after the other.

    If True, `plan` is called once for each batch, and what else the instance holds outlives it. Predictions schedule
    every step, since steps that look alike may differ later.
    """

    keeps_state: bool


def keeps_state(policy: object) -> bool:
    """Test a policy, or a class of policies, for `keeps_state = True`."""
    return isinstance(policy, KeepsState) and policy.keeps_state


def is_pipelined(policy: object) -> bool:
    """Test whether a policy, or its class, declares `pipelines = True`."""
    return isinstance(policy, Pipelined) and policy.pipelines


def is_expert_parallel(policy: object) -> bool:
    """Test whether a policy, or its class, declares `expert_parallel = True`."""
    return isinstance(policy, ExpertParallel) and policy.expert_parallel


class Delay(Protocol):
    """Adds time to a lane's tasks that depends on the tasks before them; for virtual clocks only.

    Unlike a cost model it may keep state: it is called once for every task that starts on its lane, in the order of
    their starts.
    """

    def __call__(self, task: Task, now: int) -> int:
        """Return the nanoseconds that a task starting now takes beyond the cost of its work."""


LaneKind: TypeAlias = Literal["thread", "guest", "loop", "awaitable", "stream"]
"""The way in which the tasks of a lane run."""


class Issued(Protocol):
    """A task that was issued to a device's stream."""

    def wait(self) -> None:
        """Block until the task ends; raises the task's error."""

    @property
    def value(self) -> Any:
        """The task's result."""

    def span(self) -> tuple[int, int]:
        """The task's start and end in nanoseconds on the driver's clock; known once `wait` has returned."""


class Streams(Protocol):
    """A device's interface for its streams."""

    def issue(self, task: Task, after: list[Task]) -> Issued:
        """Issue a task to its lane's stream; it waits there for the tasks `after` on the device's other streams."""


class Device(Protocol):
    """Runs tasks on real hardware, batch after batch of one model.

    The framework calls, in this order: the constructor; `slot_bytes`, whenever a policy plans; then for each batch
    `kinds`, `begin`, `streams` and `execute`, once the tasks of the batch before have ended; `aclose`, once.
    Optional abilities are the small protocols below.
    """

    def __init__(self, checkpoint: Checkpoint, layout: WeightLayout, **settings: Any) -> None:
        """Open a model's files; weights are read later.

        Args:
            checkpoint: the tensors in the files; in tensor-parallel runs, this rank's share.
            layout: the same tensors cut into pages, and the dtype to compute in.
            settings: the user's `--device-set` values, checked against the types of the device's own keyword
                arguments, which have defaults.

        Raises:
            BadInput: the hardware is not there, or a setting is out of range. Nothing stays open then.
        """

    @property
    def layout(self) -> WeightLayout:
        """The layout passed to the constructor."""

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        """The kind of each lane by name; lanes that are not listed are worker threads. Constant during a batch."""

    @property
    def streams(self) -> Streams | None:
        """The issuer of tasks to lanes of kind "stream", on the driver's clock; None without such lanes."""

    def slot_bytes(self, page: Page) -> int:
        """Bytes of memory that a page takes in a slot, at least `page.nbytes`; constant. Called before any `begin`."""

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Prepare a batch: allocate what the plan reserves, no more, and store the prompts' token ids.

        The plan's resident pages come with `load` tasks in every batch; a device that still has such a page from the
        previous batch need not read it again. Everything else of that batch is freed. Called on the main thread.

        Raises:
            BadInput: the device cannot run such a batch. `aclose` follows.
        """

    def execute(self, task: Task) -> Any:
        """Run one task and return its value once its effects are complete.

        Called on the thread of the task's lane: one task at a time for each lane, several lanes concurrently. A task
        starts when all its dependencies have ended. The value of `route` and `preview_route` is the number of rows of
        each expert that has any, with router scores where the plan requests them (`moesched.routing.ScoredTokens`);
        that of `sample` is one token for each sequence that ends its prompt or decodes; other verbs return None.
        `run_expert` has the rows of `Task.expert_rows`; each row's bits must be those that it has if all of its
        micro-batch's rows run together. The operands of `load_routed` are pairs of an expert and a range of its rows.

        Raises:
            Exception: of any kind; the driver turns it into the task's failure, and ends the run.
        """

    async def aclose(self) -> None:
        """Free everything. Called once, by the owner, after the last task has ended; must not raise."""


@runtime_checkable
class JoinsRanks(Protocol):
    """A device that can be one of several: tensor-parallel ranks, or nodes that share a model's experts."""

    def join(self, rank: int, transport: Transport, first: Device) -> None:
        """Become a rank. Called once before the first batch, or on a node before each order.

        Args:
            rank: its number, from 0.
            transport: carries the exchanges of its `Collective` tasks; the caller closes it.
            first: rank 0's device if it is in this process, otherwise this device; rank 0 begins each batch last.

        Raises:
            BadInput: there is no hardware for that rank.
        """


@runtime_checkable
class DescribesMachine(Protocol):
    """A device class that knows more about this machine than the system reports, such as its GPU."""

    @staticmethod
    def machine(host: Machine) -> Machine:
        """The machine that `--machine auto` stands for: the host with the device's additions.

        Raises:
            BadInput: the hardware is not there, or the user has to name a machine.
        """


@runtime_checkable
class ChecksMachine(Protocol):
    """A device class that runs only on some machines."""

    @staticmethod
    def check_machine(machine: Machine) -> None:
        """Accept a machine.

        Raises:
            BadInput: the device cannot run as that machine.
        """


@runtime_checkable
class IsCalibrated(Protocol):
    """A device class whose speed `moesched calibrate` measures, so that its runs are predicted."""

    @staticmethod
    def processors() -> str:
        """The processors of this machine that the device runs on, as `Machine.measured_on` names a calibration's.

        Raises:
            BadInput: the hardware is not there.
        """


@runtime_checkable
class ChoosesDtype(Protocol):
    """A device class that chooses the dtype to compute in, such as float16 where its hardware lacks bfloat16."""

    @staticmethod
    def chosen_dtype(own: str) -> str:
        """The dtype to compute in where the user names none; `own` is the model's, and the default."""
        return own


@runtime_checkable
class KeepsTime(Protocol):
    """A device that imitates another machine, and provides the clock of all times."""

    def clock(self) -> int:
        """Monotonic nanoseconds on that machine's clock. Called from any thread."""


class Dilations(msgspec.Struct, frozen=True):
    """Real seconds for each second of an emulated machine."""

    prefill: float
    decode: float


class EmulatedLane(msgspec.Struct, frozen=True):
    """One lane of an emulated machine.

    Attributes:
        real_share: seconds of real work over the dilated seconds of the modelled work; below a third in a good
            emulation.
        overruns: tasks whose real work took more than a third of their dilated time.
        late: those whose real work took longer than that time, so that they ended late.
        excess_seconds: total time that tasks took longer than modelled, in the emulated machine's time.
    """

    real_share: float
    overruns: int
    late: int
    excess_seconds: float


class Emulation(msgspec.Struct, frozen=True):
    """Quality of an emulation. All other times of a report are the emulated machine's.

    Attributes:
        dilation: factor by which time passed more slowly than on the emulated machine.
        core_load: share of this machine's cores that the run kept busy.
    """

    dilation: Dilations
    core_load: float
    lanes: dict[str, EmulatedLane]


@runtime_checkable
class Emulates(Protocol):
    """A device that slows itself down to another machine's speed."""

    def emulation(self) -> Emulation:
        """Compare real work with the emulated machine's time since `begin`. Called after a batch."""


Progress: TypeAlias = Callable[[str, float, float], object]
"""Progress callback: name of the work, amount done, total amount."""


def ignore_progress(what: str, done: float, total: float) -> None:
    """Ignore progress."""


@runtime_checkable
class TellsProgress(Protocol):
    """A device whose `begin` may take long: it calls `tell`, assigned before the first batch, with its progress."""

    tell: Progress


@runtime_checkable
class WarmsUp(Protocol):
    """A device that runs its kernels once before the first step, while pages that stay are loaded."""

    def warm_up_seconds(self) -> float | None:
        """Seconds that the warm-up of the last batch took; None if it had nothing to warm up. Called after a batch."""


@runtime_checkable
class CountsReads(Protocol):
    """A device that counts the bytes that it reads from the checkpoint's files."""

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, over all batches."""


@runtime_checkable
class ReportsHome(Protocol):
    """A device that knows several ways to keep weights in the host's memory."""

    @property
    def weights_home(self) -> WeightsHome | None:
        """The way that the last batch used; None if the host kept no weights for a GPU."""


@runtime_checkable
class NamesKernels(Protocol):
    """A device that has several kernels for an operation."""

    @property
    def kernels(self) -> Mapping[str, Sequence[str]]:
        """The names of the kernels that ran so far, by operation."""


class KernelRow(NamedTuple):
    """A row of a device's table of kernels.

    Attributes:
        takes: the cases that the kernel computes, in words.
        problem: the reason why it computes none on this machine; None where it does.
    """

    operation: str
    name: str
    takes: str
    problem: str | None


@runtime_checkable
class ListsKernels(Protocol):
    """A device whose table of kernels can be read without a model."""

    @staticmethod
    def kernel_rows() -> Sequence[KernelRow]:
        """The rows of all operations. Of an operation's rows, the first that takes a case computes it."""


class Kernel(Protocol):
    """A kernel from outside the tree, for one operation; see `moesched.devices.kernels.seam`."""

    def refusal(self, case: Any) -> str:
        """The reason why the kernel does not take a case; empty if it does."""

    def bind(self, case: Any, weights: Any, memory: Any) -> Callable[..., Any]:
        """Make the function that computes a case with its weights; called only for cases that the kernel takes."""


@runtime_checkable
class HasOwnBytes(Protocol):
    """A device that uses memory beyond the plan's reservations."""

    @property
    def own_bytes(self) -> int:
        """Bytes of that memory, for the report."""


@runtime_checkable
class StandsBy(Protocol):
    """A device whose weights would be paged out while it idles."""

    def stand_by(self) -> object:
        """Touch the weights. Called several times a second while a node waits for work."""


@runtime_checkable
class GivesScores(Protocol):
    """A device whose routers give scores where a plan requests them; on other devices such a plan is refused."""

    gives_scores: bool


@runtime_checkable
class KeepsRowsApart(Protocol):
    """A device that can leave sequences out of a micro-batch once they have ended.

    The operands of `embed` are the micro-batch's requests in its step. Requests that are missing never come back.
    """

    def rows_apart(self, rows: int) -> bool:
        """Test whether no row's bits depend on another row, in decode steps of micro-batches of up to `rows` rows.

        The answer stays the same once `begin` was called.
        """


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
    """Receives every task that ran."""

    def ended(self, task: Task) -> None:
        """Receive a task with its start, end, value and edges. Called from any thread, one call at a time."""


class TokenSpan(NamedTuple):
    """Consecutive tokens of one request.

    Attributes:
        request: its index among all requests of the run.
        first: the first token's position in the request.
        tokens: number of tokens.
    """

    request: int
    first: int
    tokens: int


class RoutingObserver(Protocol):
    """Receives the choices of a model's routers on a device."""

    def routed(self, layer: int, spans: Sequence[TokenSpan], experts_Tk: npt.NDArray[np.int64]) -> None:
        """Receive the experts of some tokens in a layer, ascending in each row; the rows follow the spans in order.

        Every token is reported once for each layer. Called from any thread, one call at a time.
        """


class ActivationObserver(Protocol):
    """Receives the experts' activations on a device."""

    def activated(self, layer: int, values_nI: npt.NDArray[np.float32]) -> None:
        """Receive an expert's values after SiLU, with a row for each of some tokens that were routed to it.

        Called from any thread, possibly concurrently.
        """


class Exchange(NamedTuple):
    """One collective of a run, as every rank that takes part in it names it.

    Attributes:
        ticket: its number in the sequence of all collectives, from 0.
        signature: text that says what is exchanged; ranks with different signatures get an error that names them.
        step, layer: those that it belongs to; -1 for none.
    """

    ticket: int
    signature: str = ""
    step: int = -1
    layer: int = -1


class Transport(Protocol):
    """Carries out collectives between ranks, on arrays in host memory.

    Calls come in the same order on all ranks, each on the thread of a lane, which it blocks until the result is there.
    Every call returns the same bits on every rank that gets a result. Parts are not changed; results belong to the
    caller. Each rank has a transport of its own, unless the ranks are threads of one process, which may share one.

    Raises:
        TransportError: a rank does not arrive in time, is lost, or is in another exchange. Every call may raise it, on
            each rank that waits for the others.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Connect to the other ranks, as the parameters describe.

        `(ranks)`: the ranks are threads that share the transport. `(addresses, rank, *, keys, listen, epoch,
        lost_after_seconds)`: each process listens at one of the addresses. `(rank, ranks)`: rank 0 is found by
        MASTER_ADDR and MASTER_PORT. `()`: all settings come from the environment.
        """

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """The sum of all ranks' parts, which have one shape and type, added in the order of the ranks."""

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """The array of the rank `root`, on all ranks; the others pass None, and need not know its shape."""

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """The parts of all ranks in their order, on the rank `root`; None on the others. Shapes may differ."""

    async def aclose(self) -> None:
        """Free everything; waiting ranks get a TransportError. Called once, by the owner; must not raise."""


@runtime_checkable
class Abandons(Protocol):
    """A transport on which a rank can announce that it takes no part in an exchange."""

    def abandon(self, rank: int, exchange: Exchange, reason: str) -> None:
        """End an exchange with a TransportError that gives the reason, on the ranks that wait for this one."""


class Routing(Protocol):
    """Chooses experts where no router runs. A pure function of its arguments and its seed."""

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """Count a micro-batch's tokens for each expert that gets any, in ascending order of expert.

        step: the micro-batch's step: 0 for its prompts, then 1, 2, ... for the tokens that follow them.
        """
