"""The symbolic device: calls the function of each task's verb, and checks the data that the task uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moesched.models.layout import Page, WeightLayout
from moesched.requests.sampling import Sampling
from moesched.seams import Device, LaneKind, Transport
from moesched.steps.memory import slots_of
from moesched.steps.plan import Plan
from moesched.tasks import Task
from moesched.testing.symbolic.attention import Attention
from moesched.testing.symbolic.batch import SymbolicBatch
from moesched.testing.symbolic.data import Data
from moesched.testing.symbolic.exchanges import Board
from moesched.testing.symbolic.experts import Experts
from moesched.testing.symbolic.served import ServedAttention, ServedBatch
from moesched.testing.symbolic.verbs import Verb, verbs_of


class SymbolicDevice:
    """A device that computes hashes instead of tensors; see the package's description.

    Args:
        fails: takes a task and returns whether it should fail; None if none should.

    Attributes:
        places: after `serve`, the micro-batches whose requests join and leave, with the rows of each step.
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
        """None: no lane of this device is a stream, so that worker threads run all tasks."""

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        """The kinds of lanes (queues of tasks) by name: empty, so that all have the default kind, a worker thread."""
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
