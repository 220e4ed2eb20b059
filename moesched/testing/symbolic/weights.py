"""The verbs that move pages of weights into slots."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.steps.memory import Slot
from moesched.tasks import PageTransfer
from moesched.testing.symbolic.data import Access


def load(task: PageTransfer, data: Access) -> None:
    """Read pages from the checkpoint."""
    for page, slot in zip(task.pages, task.slots, strict=True):
        data.write(slot, page.id)


def fetch(task: PageTransfer, data: Access) -> None:
    """Copy pages from other slots, or from where the weights live."""
    sources: Sequence[Slot | None] = task.operands or [None] * len(task.pages)
    for page, slot, source in zip(task.pages, task.slots, sources, strict=True):
        data.write(slot, page.id if source is None else data.read(source))
