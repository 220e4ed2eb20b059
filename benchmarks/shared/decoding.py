"""Decoding by a run of ours: its model, and the pages and experts that each of its steps used."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import Page, WeightLayout, weight_layout
from moesched.tasks import PageTransfer, Task


class Model(NamedTuple):
    """A model in a folder."""

    checkpoint: Checkpoint
    layout: WeightLayout

    @classmethod
    def opened(cls, folder: Path) -> Model:
        """The model, in the dtype of its files."""
        checkpoint = open_checkpoint(folder)
        return cls(checkpoint, weight_layout(checkpoint.config))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.layout.globals_bytes + sum(page.nbytes for page in self.layout.pages)

    @property
    def head_bytes(self) -> int:
        """Bytes of the LM head."""
        return self.checkpoint.tensors["lm_head"].nbytes


class Uses:
    """An observer that notes which pages each step fetched, and which experts it used."""

    def __init__(self) -> None:
        self.fetched: dict[int, list[Page]] = defaultdict(list)
        self.experts: dict[int, set[tuple[int, int]]] = defaultdict(set)

    def ended(self, task: Task) -> None:
        """Note a task."""
        if isinstance(task, PageTransfer) and task.verb == "fetch":
            self.fetched[task.step] += task.pages
        elif task.verb in ("post_attention", "route"):
            self.experts[task.step].update((task.layer, expert) for expert in task.value)

    def touched(self, step: int, page: Page) -> bool:
        """Test whether the step used a page: the dense part always, an expert if a token was routed to it."""
        return page.expert < 0 or (page.layer, page.expert) in self.experts[step]
