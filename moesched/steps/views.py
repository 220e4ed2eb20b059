"""Views of weights: the slots of several pages, which a kernel's task reads as if they were one block."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from moesched.engine import Engine
from moesched.errors import NotResident
from moesched.models.layout import Page
from moesched.steps.memory import Memory, Slot, lost, note_use
from moesched.steps.model_pages import describe
from moesched.steps.pool_counts import LOADED
from moesched.tasks import Block

K = TypeVar("K", bound=Hashable)


class View(Generic[K]):
    """The slots of several pages, as a kernel reads them.

    A view lasts until one of its slots is given another page. The transfer of that page waits for every kernel that
    read through the view.

    In the engine, a view of several pages that may be replaced is a join: a node of the task graph that stands for the
    transfers of all these pages, so that n kernels that read n pages need 2n edges instead of n². Where tasks are
    issued to streams there is no join, as edges between tasks of one device cost the host nothing.

    Attributes:
        owner: the `Views` object that lists this view and all others of the same memory while they are open.
        key: identifies the pages, such as (layer, expert).
        pages, slots: the pages, and the slot that holds each.
        bound: the weights in the form that the device's kernels read, set by the device; None before that.
        noted: the last step in which the pools counted a use of the view; they count no second use in that step. If a
            pool's replacement rule counts every use, this stays `LOADED` (-1), and every use is counted.
        read_before: True if the pages were loaded before the first step, or if an earlier task has read them since they
            arrived; set for views of experts.
        used: the last step in which a kernel read through the view. Before the first read, and always for a view
            without a join, this is the step in which the view was opened.
        moving: those of `slots` whose pages may be replaced; the pages of all other slots stay for the whole run.
        block: the block of data that the join writes; None without a join.
        reads: the blocks that a kernel depends on if it reads through the view.
    """

    __slots__ = (
        *("block", "bound", "key", "moving", "noted", "owner", "pages", "read_before", "reads", "slots"),
        "used",
    )

    def __init__(
        self,
        owner: Views[K],
        key: K,
        pages: tuple[Page, ...],
        slots: tuple[Slot, ...],
        engine: Engine,
        step: int,
    ) -> None:
        self.owner = owner
        self.key = key
        self.pages = pages
        self.slots = slots
        self.bound: Any = None
        self.noted = LOADED
        self.read_before = False
        self.used = step
        self.moving = tuple(slot for slot in slots if not slot.fixed)
        self.block: Block | None = None
        self.reads: tuple[Block, ...] = self.moving
        if len(self.moving) > 1 and not engine.has_streams:
            self.block = Block(f"view {key}")
            engine.join(self.moving, (self.block,), step)
            self.reads = (self.block,)
        for slot in self.moving:
            slot.views.append(self)

    def use(self, step: int, tokens: int) -> None:
        """Note that a kernel of `tokens` rows reads the pages in the step `step`."""
        if self.block is not None and self.used != step:
            self.used = step
            self.block.forget_readers(step - 1)
        if not note_use(self.moving, step, tokens):
            self.noted = step

    def close(self, engine: Engine) -> None:
        """End the view. The next tasks that write to its slots wait for all kernels that read through the view."""
        readers_done = [] if self.block is None else [engine.join((), (self.block,), self.used)]
        del self.owner.open[self.key]
        for slot in self.moving:
            slot.readers += readers_done
            slot.views.remove(self)


class Views(Generic[K]):
    """The open views of pages in one memory.

    Args:
        pages_of: returns the pages that a key stands for, such as those of the key (layer, expert).

    Attributes:
        open: the open views, by key.
    """

    def __init__(self, memory: Memory, pages_of: Callable[[K], tuple[Page, ...]]) -> None:
        self.memory = memory
        self.pages_of = pages_of
        self.open: dict[K, View[K]] = {}

    def show(self, key: K, engine: Engine, step: int) -> View[K]:
        """Open a new view of a key's pages for a kernel of a step, and return it; no view of the key may be open.

        Raises:
            NotResident: a page is not in the memory.
        """
        slots = []
        pages = self.pages_of(key)
        for page in pages:
            slot = self.memory._table.get(page.id)
            failure = None if slot is None else lost(slot)
            if failure is not None:
                engine.raise_failure()
                raise NotResident(
                    f"page {describe(page)} never came to {self.memory.name}: its transfer failed or was cancelled; "
                    "fetch it again before the kernel that reads it"
                ) from failure
            if slot is None:
                raise NotResident(
                    f"page {describe(page)} is not in {self.memory.name}: fetch it before the kernel that reads it, "
                    "and keep its slot until then"
                )
            slots.append(slot)
        view = self.open[key] = View(self, key, pages, tuple(slots), engine, step)
        return view
