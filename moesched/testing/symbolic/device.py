"""The symbolic device: calls the function of each task's verb, and checks the data that the task uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import getmembers, ismethod
from typing import Any

from moesched.models.layout import Page, WeightLayout
from moesched.requests.sampling import Sampling
from moesched.seams import Device, LaneKind, Transport
from moesched.steps.memory import Slot, slots_of
from moesched.steps.plan import Plan
from moesched.tasks import PageTransfer, Task
from moesched.testing.symbolic.attention import Attention
from moesched.testing.symbolic.batch import SymbolicBatch
from moesched.testing.symbolic.data import Access, Data
from moesched.testing.symbolic.exchanges import Board, Exchanges
from moesched.testing.symbolic.experts import Experts
from moesched.testing.symbolic.served import ServedAttention, ServedBatch

Verb = Callable[[Any, Access], Any]


class SymbolicDevice:
    """A device that computes hashes instead of tensors; see the package's description.

    Args:
        fails: takes a task and returns whether it should fail; None if none should.

    Attributes:
        places: the micro-batches whose requests join and leave, with the rows of each step; `serve` sets it.
    """

    def __init__(self, fails: Callable[[Task], bool] | None = None) -> None:
        self._fails = fails or (lambda task: False)
        self.places: ServedBatch
        self._board = Board()
        self._data = Data()
        self._verbs: dict[str, Verb] = {}

    def join(self, rank: int, transport: Transport | None, first: Device) -> None:
        """Make this device a node that exchanges data through the device `first`; other arguments are ignored."""
        assert isinstance(first, SymbolicDevice)
        self._board = first._board

    @property
    def layout(self) -> WeightLayout:
        """The division of the model's weights into pages, from the present plan."""
        return self._plan.layout

    @property
    def streams(self) -> None:
        """None: no lane of this device is a stream; worker threads run all tasks."""

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        """The kinds of lanes (queues of tasks) by name; empty, since all have the default kind, a worker thread."""
        return {}

    def slot_bytes(self, page: Page) -> int:
        """Return the bytes that a page (a part of a layer's weights) needs in a slot, memory for one page."""
        return page.nbytes

    def begin(
        self, plan: Plan, prompts: Sequence[Sequence[int]] = (), sampling: Sampling | None = None
    ) -> None:
        """Forget the previous batch, and prepare a new one by its plan; token ids and sampling have no effect."""
        batch = SymbolicBatch(plan)
        self._open(plan, batch, Attention(batch))

    def serve(self, plan: Plan) -> None:
        """Prepare for a run in which requests join and leave, by its plan; token ids have no effect."""
        self.places = ServedBatch(plan)
        self._open(plan, self.places, ServedAttention(self.places))

    def _open(self, plan: Plan, batch: SymbolicBatch, attention: Attention) -> None:
        self._plan = plan
        self._data = Data()
        self._data.values.update(batch.prompts())
        for slot in slots_of(plan.weights.home) if plan.weights.home else ():
            self._data.values[slot] = slot.page.id if slot.page is not None else 0
        self._verbs = verbs_of(plan, attention, Experts(batch), self._board)

    def execute(self, task: Task) -> Any:
        """Run one task and return its value; the data that the task writes change when the task ends.

        Raises:
            NotImplementedError: the device has no such verb.
            Clash: the task used data that another task was changing.
        """
        if task.verb not in self._verbs:
            raise NotImplementedError(f"{task.label}: the symbolic device has no verb {task.verb}")
        access = self._data.begin(task)
        if self._fails(task):
            raise RuntimeError(f"{task.label} was told to fail")
        value = self._verbs[task.verb](task, access)
        self._data.end(task, access)
        return value

    async def aclose(self) -> None:
        """Do nothing: the device holds no resources."""


def verbs_of(plan: Plan, attention: Attention, experts: Experts, board: Board) -> dict[str, Verb]:
    """Return the functions that compute a run's tasks, by verb: most are methods of `attention` and `experts`.

    board: carries data between nodes that share experts.
    """
    verbs: dict[str, Verb] = {"load": _load, "fetch": _fetch, "copy_to_pinned": _fetch}
    for part in (attention, experts):
        verbs |= {name: verb for name, verb in getmembers(part, ismethod) if not name.startswith("_")}
    if plan.nodes.count > 1:
        verbs |= verbs_of_nodes(plan, experts, board)
    return verbs


def verbs_of_nodes(plan: Plan, experts: Experts, board: Board) -> dict[str, Verb]:
    """Return, by verb, the functions for nodes that share experts: verbs that a single node lacks or runs otherwise.

    board: carries data between the nodes.
    """
    exchanges = Exchanges(plan.nodes, experts, board)
    verbs: dict[str, Verb] = {"partial_sum": exchanges.partial_sum}
    if not plan.nodes.centralised:
        return verbs | {"all_reduce": exchanges.all_reduce}
    verbs |= {"gather": exchanges.gather, "broadcast": exchanges.broadcast}
    if plan.nodes.attends:
        return verbs | {"route": exchanges.route_for_all, "sample": exchanges.sample_for_all}
    return verbs | {"route": experts.chosen, "sample": exchanges.sampled}


def _load(task: PageTransfer, data: Access) -> None:
    """Write the hashes of pages to the pages' slots in `data`, as if the pages were read from the checkpoint."""
    for page, slot in zip(task.pages, task.slots, strict=True):
        data.write(slot, page.id)


def _fetch(task: PageTransfer, data: Access) -> None:
    """Copy the hashes of pages between slots; a page without a source slot comes as if from the checkpoint."""
    sources: Sequence[Slot | None] = task.operands or [None] * len(task.pages)
    for page, slot, source in zip(task.pages, task.slots, sources, strict=True):
        data.write(slot, page.id if source is None else data.read(source))
