"""The symbolic device's table of verbs (kinds of tasks), and the verbs that move pages of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import getmembers, ismethod
from typing import Any

from moesched.steps.memory import Slot
from moesched.steps.plan import Plan
from moesched.tasks import PageTransfer
from moesched.testing.symbolic.attention import Attention
from moesched.testing.symbolic.data import Access
from moesched.testing.symbolic.exchanges import Board, Exchanges
from moesched.testing.symbolic.experts import Experts

Verb = Callable[[Any, Access], Any]


def verbs_of(plan: Plan, attention: Attention, experts: Experts, board: Board) -> dict[str, Verb]:
    """Return the functions that compute a run's tasks, by verb: most are methods of the other arguments."""
    verbs: dict[str, Verb] = {"load": _load, "fetch": _fetch, "copy_to_pinned": _fetch}
    for part in (attention, experts):
        verbs |= {name: verb for name, verb in getmembers(part, ismethod) if not name.startswith("_")}
    if plan.nodes.count > 1:
        verbs |= verbs_of_nodes(plan, experts, board)
    return verbs


def verbs_of_nodes(plan: Plan, experts: Experts, board: Board) -> dict[str, Verb]:
    """Return the functions of verbs that are new or different where several nodes share the experts, by name."""
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
