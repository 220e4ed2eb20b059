"""The seams of devices and of their kernels. Each optional ability of a device is a small protocol of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesched.machines import Machine
    from moesched.machines.weights_home import WeightsHome
    from moesched.models.checkpoint import Checkpoint
    from moesched.models.layout import Page, WeightLayout
    from moesched.requests.sampling import Sampling
    from moesched.steps.plan import Plan
    from moesched.tasks import Task

    from .observer import ActivationObserver, RoutingObserver
    from .transport import Transport


LaneKind: TypeAlias = Literal["thread", "guest", "loop", "awaitable", "stream"]
"""Ways in which a lane runs its tasks: on a thread of its own; as a guest, also on other lanes' threads; on the event
loop; as awaitables there; or on a stream of the device.
"""


class Issued(Protocol):
    """A task that was issued to a device's stream."""

    def wait(self) -> None:
        """Block until the task ends; raises the task's error."""

    @property
    def value(self) -> Any:
        """The task's result, once `wait` has returned."""

    def span(self) -> tuple[int, int]:
        """Return the task's start and end in nanoseconds on the driver's clock; known once `wait` has returned."""


class Streams(Protocol):
    """A device's interface for its streams."""

    def issue(self, task: Task, after: list[Task]) -> Issued:
        """Issue a task to its lane's stream; it waits there for the tasks `after` on the device's other streams."""


class Device(Protocol):
    """Runs tasks on real hardware, for one model and one batch after the other.

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
        """The object that issues tasks to lanes of kind "stream"; None without such lanes.

        The times of its tasks are on the driver's clock.
        """

    def slot_bytes(self, page: Page) -> int:
        """Return the bytes that a page takes in a slot, at least `page.nbytes`; constant. Called before any `begin`."""

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
        starts when all its dependencies have ended. The value of `route`, `preview_route` and `post_attention` is a
        mapping from each expert that has rows to the number of its rows. If the plan requests router scores, the value
        of `route` and `preview_route` has the scores, too (`moesched.routing.ScoredTokens`). The value of `sample` is a
        list of tokens, one for each sequence that decodes or whose prompt ends in this step. Other verbs return None.
        Values may have numpy's numbers in place of Python's.
        A `run_expert` task computes the rows that `Task.expert_rows` names; each row must get the same bits as if all
        rows of its micro-batch ran together. The operands of `load_routed`, which copies outputs from the host, are
        pairs: an expert that ran on the host, and the range of its rows that it computed there.

        Raises:
            Exception: of any kind; the driver turns it into the task's failure, and ends the run.
        """

    async def aclose(self) -> None:
        """Free everything. Called once, by the owner, after the last task has ended; must not raise."""


@runtime_checkable
class Serves(Protocol):
    """A device whose requests may join and leave between steps."""

    def serve(self, plan: Plan) -> None:
        """Prepare as `begin` does, with no request yet.

        The plan is for a batch that takes as much memory as all requests may take at one time. While serving, the
        operands of `embed` are `moesched.requests.rows.Rows`: the requests that left the micro-batch, and the new
        tokens of each request in it.
        """


@runtime_checkable
class JoinsRanks(Protocol):
    """A device that can be one of several: tensor-parallel ranks, or nodes that share a model's experts."""

    def join(self, rank: int, transport: Transport, first: Device) -> None:
        """Make this device one of several. Called once, before the first batch; on a cluster, before each run.

        If all ranks are in one process, `begin` is called on rank 0's device last, in each batch.

        Args:
            rank: this device's number among the ranks, from 0.
            transport: carries the exchanges of its `Collective` tasks; the caller closes it.
            first: rank 0's device if it is in this process, otherwise this device.

        Raises:
            BadInput: there is no hardware for that rank.
        """


@runtime_checkable
class DescribesMachine(Protocol):
    """A device class that knows more about this machine than the system reports, such as its GPU."""

    @staticmethod
    def machine(host: Machine) -> Machine:
        """Return the machine that `--machine auto` stands for: the host with the device's additions.

        Raises:
            BadInput: the hardware is not there, or the user has to name a machine.
        """


@runtime_checkable
class ChecksMachine(Protocol):
    """A device class that runs only on some machines."""

    @staticmethod
    def check_machine(machine: Machine) -> None:
        """Check that the device, on this computer, can run batches that were planned for `machine`.

        Raises:
            BadInput: the device cannot run such batches.
        """


@runtime_checkable
class IsCalibrated(Protocol):
    """A device class whose speed `moesched calibrate` measures, so that reports compare its runs with predictions."""

    @staticmethod
    def processors() -> str:
        """Return the processors of this machine that the device runs on, named as in `Machine.measured_on`.

        Raises:
            BadInput: the hardware is not there.
        """


@runtime_checkable
class ChoosesDtype(Protocol):
    """A device class that chooses the dtype to compute in, such as float16 where its hardware lacks bfloat16."""

    @staticmethod
    def chosen_dtype(own: str) -> str:
        """Return the dtype to compute in where the user names none; `own`, the model's dtype, is the default."""
        return own


Progress: TypeAlias = Callable[[str, float, float], object]
"""Progress callback: name of the work, amount done, total amount."""


def ignore_progress(what: str, done: float, total: float) -> None:
    """Ignore a report of progress: the `Progress` callback of a device whose progress nobody follows."""


@runtime_checkable
class TellsProgress(Protocol):
    """A device that reports how far its `begin` has come, since `begin` may take long.

    Attributes:
        tell: called with the name of the work, the amount done and the total amount; assigned before the first batch.
    """

    tell: Progress


@runtime_checkable
class WarmsUp(Protocol):
    """A device that runs its kernels once before the first step, while the plan's resident pages are loaded."""

    def warm_up_seconds(self) -> float | None:
        """Return the seconds that the last batch's warm-up took; None without a warm-up. Called after a batch."""


@runtime_checkable
class CountsReads(Protocol):
    """A device that counts the bytes that it reads from the checkpoint's files."""

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, over all batches."""


@runtime_checkable
class ReportsHome(Protocol):
    """A device that has several ways to keep weights in the host's memory, and reports the one it chose."""

    @property
    def weights_home(self) -> WeightsHome | None:
        """The way in which the last batch kept weights; None if the host kept no weights for a GPU."""


@runtime_checkable
class HasOwnBytes(Protocol):
    """A device that uses memory beyond the plan's reservations."""

    @property
    def own_bytes(self) -> int:
        """Bytes that the device uses beyond the plan's reservations, for the report."""


@runtime_checkable
class ReplaysGraphs(Protocol):
    """A device that may replay graphs of kernels.

    If `replays` is True, plans reserve bytes in the device's memory for the results of replayed kernels.
    """

    replays: bool
    """True if this device replays graphs; constant."""


@runtime_checkable
class StandsBy(Protocol):
    """A device that can keep the operating system from paging out its weights while they are idle."""

    def stand_by(self) -> object:
        """Touch the weights; the result is ignored. Called several times a second while a node waits for work."""


@runtime_checkable
class GivesScores(Protocol):
    """A device whose routers give scores if a plan requests them and `gives_scores` is True.

    Plans that request scores are refused on all other devices.
    """

    gives_scores: bool


@runtime_checkable
class KeepsRowsApart(Protocol):
    """A device that says whether rows are computed apart from each other.

    If they are, sequences that have ended are left out of their micro-batch. The operands of `embed` are the requests
    that the micro-batch has in this step; a request that was left out never comes back.
    """

    def rows_apart(self, rows: int) -> bool:
        """Test whether no row's bits depend on another row, in decode steps of micro-batches of up to `rows` rows.

        The answer stays the same once `begin` was called.
        """


@runtime_checkable
class ObservesRouting(Protocol):
    """A device that reports which experts the routers choose."""

    def observe_routing(self, observer: RoutingObserver) -> None:
        """Report the experts that routers choose to `observer`, from the next batch on."""


@runtime_checkable
class ObservesActivations(Protocol):
    """A device that reports the experts' activations."""

    def observe_activations(self, observer: ActivationObserver) -> None:
        """Report the experts' activations to `observer`, from the next batch on."""


@runtime_checkable
class KeepsTime(Protocol):
    """A device that imitates another machine, and provides the clock of all times."""

    def clock(self) -> int:
        """Return the monotonic nanoseconds on the imitated machine's clock. Called from any thread."""


class Dilations(msgspec.Struct, frozen=True):
    """Real seconds that pass for each second of an emulated machine, in prefill and in decode."""

    prefill: float
    decode: float


class EmulatedLane(msgspec.Struct, frozen=True):
    """Quality of the emulation of one lane.

    Attributes:
        real_share: seconds of real work over the tasks' dilated time, which is their modelled time multiplied by the
            dilation of the emulation; below a third in a good emulation.
        overruns: number of tasks whose real work took more than a third of their dilated time.
        late: number of tasks whose real work took longer than their dilated time, so that they ended late.
        excess_seconds: total time that tasks took longer than modelled, in the emulated machine's time.
    """

    real_share: float
    overruns: int
    late: int
    excess_seconds: float


class Emulation(msgspec.Struct, frozen=True):
    """Quality of an emulation: how closely this machine kept to the emulated one's times, which the report states.

    Attributes:
        dilation: real seconds for each second of the emulated machine.
        core_load: share of this machine's cores that the run kept busy, from 0 to 1.
        lanes: quality of the emulation of each lane, by the lane's name.
    """

    dilation: Dilations
    core_load: float
    lanes: dict[str, EmulatedLane]


@runtime_checkable
class Emulates(Protocol):
    """A device that slows itself down to another machine's speed."""

    def emulation(self) -> Emulation:
        """Compare real work with the emulated machine's time since `begin`. Called after a batch."""


@runtime_checkable
class NamesKernels(Protocol):
    """A device that has several kernels for an operation."""

    @property
    def kernels(self) -> Mapping[str, Sequence[str]]:
        """The names of the kernels that ran so far, by operation."""


class KernelRow(NamedTuple):
    """A row of a device's table of kernels.

    Attributes:
        takes: the cases that the kernel computes, in words; a case has a number of rows, storage formats, a dtype
            and a device.
        problem: the reason why the kernel computes no case on this machine; None if it computes some.
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
        """Return the rows of all operations. A case is computed by the first kernel of its operation that takes it."""


class Kernel(Protocol):
    """A third-party kernel, for one operation; see `moesched.devices.kernels.seam`."""

    def refusal(self, case: Any) -> str:
        """Return the reason why the kernel does not take a `Case` of its operation; empty if the kernel takes it."""

    def bind(self, case: Any, weights: Any, memory: Any) -> Callable[..., Any]:
        """Make the function that computes a `Case`, with these weights and with results in `memory`, a `Workspace`.

        Called only for cases that the kernel takes. The function may be called often.
        """
