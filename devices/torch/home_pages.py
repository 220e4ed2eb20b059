"""The home of streamed weights: pages in the host's memory, from which they are copied to a GPU's own memory."""

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
from .held_pages import CannotHold, HeldPage, HeldPages
from .locked_memory import locked_bytes
from .mapped_home import MappedHome

_log = Log(__name__)


class _Way(Protocol):
    """The interface of a way to hold pages of weights in the host's memory, such as `HeldPages` or mapped files."""

    def hold(self, pages: Sequence[Page], tell: Progress) -> None: ...

    def get(self, page: Page) -> HeldPage | None: ...


class HomePages:
    """Holds pages of weights in the host's memory from batch to batch, in the fastest way that the system allows.

    The ways, from the fastest: files mapped in the page cache, memory registered with CUDA, ordinary memory.

    Args:
        map_files: whether mapping files is tried.

    Attributes:
        chosen: the way in which the current batch's pages are held, and the reasons why no faster way is used; None if
            the plan keeps no page on the host.
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
        """Bytes of all pages that were held in mapped files so far."""
        return self._mapped.bytes_mapped

    @property
    def locked(self) -> bool:
        """True if all pages held here are page-locked, so that a GPU copies them directly."""
        return self.chosen is None or self.chosen.way != "ordinary memory"

    def get(self, page: Page) -> HeldPage | None:
        """Return a page in the host's memory; None if the page is not held.

        If the page is in mapped files, this checks that no other process writes to them; the page has to be read right
        afterwards.

        Raises:
            MoeschedError: another process writes to the page's file.
        """
        return next((held for way in self._ways.values() if (held := way.get(page))), None)

    def begin(self, plan: Plan, tell: Progress) -> None:
        """Hold the pages that a plan keeps in the host's memory, and free all others.

        tell: is called with the progress of reading.

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
        """Free all pages that are held."""
        self._free_all_but(None)

    def _free_all_but(self, kept: _Way | None) -> None:
        for way in self._ways.values():
            if way is not kept:
                way.hold((), ignore_progress)

    def _refusal(self, name: str, way: _Way, pages: Sequence[Page], tell: Progress) -> str:
        """Try to hold pages in one of the ways; returns an empty text, or the reason why the system refuses that way.

        Args:
            name: the way's name, such as "mapped files".
            way: holds the pages.
            tell: is called with the progress.
        """
        self._free_all_but(way)
        try:
            way.hold(pages, tell)
        except CannotHold as refusal:
            self._refused[name] = str(refusal)
            _log.warning(f"weights cannot be at home in {name}: trying a slower way", reason=str(refusal))
        return self._refused.get(name, "")


def _unfit(way: str, plan: Plan) -> str:
    """Return the reason why a plan cannot use a way to hold pages; empty if it can."""
    limit = plan.machine.roles.pinned
    if limit is not None and way != "ordinary memory":
        return f"the machine limits page-locked memory: it has the memory {limit}"
    if way == "mapped files" and plan.declared.experts_on_host:
        return "the host computes with the weights, which takes longer from the page cache"
    return ""


def _at_home(plan: Plan) -> Sequence[Page]:
    """List the pages that a plan keeps in the host's memory.

    The result is the pages of the plan's home of weights, if it declares one; else, if weights are streamed from the
    host, all pages that are not resident on the accelerator; else the pages that are resident on the host.
    """
    fast, host = plan.memory("accelerator"), plan.memory("host")
    if plan.weights.home is not None:
        return plan.weights.home.pages()
    if plan.machine.roles.weights == host.name:
        staying = {page.id for pool in plan.weights.resident if pool.memory is fast for page in pool.pages()}
        return [page for page in plan.nodes.pages(plan.layout) if page.id not in staying]
    return [page for pool in plan.weights.resident if pool.memory is host for page in pool.pages()]
