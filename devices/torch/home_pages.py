"""Pages at home in the host's memory: the memory from which a GPU with a memory of its own gets its weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from moesched.machines.weights_home import WeightsHome
from moesched.models.layout import Page
from moesched.seams import Progress, ignore_progress
from moesched.steps.plan import Plan
from moesched.system.logs import Log

from ..shared.arena import aligned_bytes
from ..shared.page_reader import PageReader
from .compute import Compute
from .held_pages import HeldPage, HeldPages, Refused
from .locked_memory import locked_bytes
from .mapped_home import MappedHome

_log = Log(__name__)


class _Way(Protocol):
    """A way to hold pages in the host's memory, as `HeldPages` is."""

    def hold(self, pages: Sequence[Page], tell: Progress) -> None: ...

    def get(self, page: Page) -> HeldPage | None: ...


class HomePages:
    """Holds pages in the host's memory, in the fastest way that the system allows; they stay from batch to batch.

    The ways, from the fastest: files mapped in the page cache, memory registered with CUDA, ordinary memory.

    Args:
        map_files: whether to map files where that is possible.

    Attributes:
        chosen: the way of the last batch, and the reason why no faster one is used; None if no page is at home.
    """

    def __init__(self, reader: PageReader, compute: Compute, *, map_files: bool) -> None:
        device, threads = compute.accelerator, compute.cores
        self.chosen: WeightsHome | None = None
        self._ways: dict[str, _Way] = {}
        self._mapped = MappedHome(reader, threads, device)
        if not compute.on_cpu:
            locked = partial(locked_bytes, device=device)
            self._ways["mapped files"] = self._mapped
            self._ways["registered memory"] = HeldPages(reader, threads, locked, locked=True)
        self._ways["ordinary memory"] = HeldPages(reader, threads, aligned_bytes, locked=False)
        self._refused: dict[str, str] = {}
        if obstacle := MappedHome.obstacle(reader) if map_files else "map_files is false":
            self._refused["mapped files"] = obstacle

    @property
    def bytes_mapped(self) -> int:
        """Bytes of all pages held in mapped files so far."""
        return self._mapped.bytes_mapped

    @property
    def locked(self) -> bool:
        """True if a GPU copies all pages at home directly, as their memory is page-locked."""
        return self.chosen is None or self.chosen.way != "ordinary memory"

    def get(self, page: Page) -> HeldPage | None:
        """The page in the host's memory, to be read now; None if it is not at home.

        Raises:
            MoeschedError: another process writes to its file.
        """
        return next((held for way in self._ways.values() if (held := way.get(page))), None)

    def begin(self, plan: Plan, tell: Progress) -> None:
        """Hold the pages that are at home in this plan, and free all others.

        Raises:
            MoeschedError: a file cannot be read.
        """
        pages, reasons = _at_home(plan), list[str]()
        self.chosen = None
        if not pages:
            self._free_all_but(None)
            return
        for name, way in self._ways.items():
            reason = _unfit(name, plan) or self._refused.get(name) or self._refusal(name, way, pages, tell)
            if not reason:
                self.chosen = WeightsHome(name, "; ".join(dict.fromkeys(reasons)))
                return
            reasons.append(reason)

    def close(self) -> None:
        """Free all pages."""
        self._free_all_but(None)

    def _free_all_but(self, kept: _Way | None) -> None:
        for way in self._ways.values():
            if way is not kept:
                way.hold((), ignore_progress)

    def _refusal(self, name: str, way: _Way, pages: Sequence[Page], tell: Progress) -> str:
        """Try to hold the pages in a way; returns the system's reason to refuse that way, empty if it holds them."""
        self._free_all_but(way)
        try:
            way.hold(pages, tell)
        except Refused as refusal:
            self._refused[name] = str(refusal)
            _log.warning(f"weights cannot be at home in {name}: trying a slower way", reason=str(refusal))
        return self._refused.get(name, "")


def _unfit(way: str, plan: Plan) -> str:
    """The reason why a way to hold pages, by its name, does not suit a plan; empty if it does."""
    limit = plan.machine.roles.pinned
    if limit is not None and way != "ordinary memory":
        return f"the machine limits page-locked memory: it has the memory {limit}"
    if way == "mapped files" and plan.declared.experts_on_host:
        return "the host computes with the weights, which takes longer from the page cache"
    return ""


def _at_home(plan: Plan) -> Sequence[Page]:
    """The pages at home on the host: all that are streamed, if weights come from there, else those kept there."""
    fast, host = plan.memory("accelerator"), plan.memory("host")
    if plan.weights.home is not None:
        return plan.weights.home.pages()
    if plan.machine.roles.weights == host.name:
        staying = {page.id for pool in plan.weights.resident if pool.memory is fast for page in pool.pages()}
        return [page for page in plan.nodes.pages(plan.layout) if page.id not in staying]
    return [page for pool in plan.weights.resident if pool.memory is host for page in pool.pages()]
