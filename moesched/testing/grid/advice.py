"""Advice about a policy's waste in a run: pages that nothing read, repeated copies, free memory, and unused lanes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from moesched.steps.memory import Memory, Pool, counts_of
from moesched.steps.model_pages import describe
from moesched.steps.plan import Plan
from moesched.tasks import PageTransfer, Task
from moesched.testing.grid.results import Advice
from moesched.trace import Recording
from moesched.units import format_bytes

LEAST_WASTE = 0.01
"""Share of a pool's fetched pages that may be wasted without advice."""

LEAST_FREE = 0.1
"""Share of a memory that may stay free without advice."""


class Transfers:
    """Observer that keeps the tasks that move pages of weights in a run's steps; tasks of loading are left out."""

    def __init__(self) -> None:
        self.all: list[PageTransfer] = []

    def ended(self, task: Task) -> None:
        """Keep a finished task if it moved pages of weights in a step."""
        if isinstance(task, PageTransfer) and task.pages and task.step >= 0:
            self.all.append(task)


def advice_of(case: str, plan: Plan, transfers: Sequence[PageTransfer]) -> list[Advice]:
    """Return advice on unused slots, free memory and repeated copies in a finished run.

    Args:
        case: name of the case.
        plan: the run's plan, whose pools have counted their use.
        transfers: the tasks that moved pages in steps.
    """
    found = [_of_pool(case, pool) for pool in plan.weights.pools if pool.slots]
    found += [_of_free_memory(case, memory, transfers) for memory in plan.accelerators]
    return [*(each for each in found if each is not None), *_of_repeats(case, transfers)]


def used_lanes(recording: Recording) -> dict[str, bool]:
    """Return, for each lane (queue of tasks) by name, whether any step of the run submitted a task to the lane."""
    used = {each.lane.name for each in recording.slices if each.step >= 0}
    return {lane.name: lane.name in used for lane in recording.lanes}


def advice_of_lanes(cells: Iterable[tuple[str, Mapping[str, bool]]]) -> Iterator[Advice]:
    """Yield advice on each lane that was used in no cell.

    cells: for each cell that the policy ran in, the cell's name, and whether each lane was used, by the lane's name.
    """
    cells = list(cells)
    for lane in dict.fromkeys(lane for _, lanes in cells for lane in lanes):
        having = [(name, lanes[lane]) for name, lanes in cells if lane in lanes]
        if not any(used for _, used in having):
            message = f"lane {lane} was never used"
            yield Advice(line="", kind=f"lane {lane}", message=message, case=having[0][0], cases=len(having))


def _of_pool(case: str, pool: Pool) -> Advice | None:
    counts = counts_of(pool).now()
    where = f"pool {pool.name} in {pool.memory.name}"
    if not (counts.fetched or counts.hits or counts.misses):
        message = f"{where}: none of its {len(pool.slots):,} slots was used ({format_bytes(pool.nbytes)})"
        return Advice(line=pool.line, kind=f"unused {pool.name}", message=message, case=case)
    if counts.wasted >= max(1, LEAST_WASTE * counts.fetched):
        message = (
            f"{where}: {counts.wasted:,} of {counts.fetched:,} fetched pages left before anything read them"
        )
        return Advice(line=pool.line, kind=f"wasted {pool.name}", message=message, case=case)
    return None


def _of_free_memory(case: str, memory: Memory, transfers: Sequence[PageTransfer]) -> Advice | None:
    moved = [
        slot
        for task in transfers
        if task.phase == "decode"
        for slot in task.slots
        if slot.memory == memory.name
    ]
    if not moved or memory.free_bytes < LEAST_FREE * memory.capacity:
        return None
    pool = moved[0].pool
    message = (
        f"{format_bytes(memory.free_bytes)} of {memory.name}'s {format_bytes(memory.capacity)} stay free, "
        f"while steps move pages into pool {pool.name}: keep more of them"
    )
    return Advice(line=pool.line, kind=f"free {memory.name}", message=message, case=case)


def _of_repeats(case: str, transfers: Sequence[PageTransfer]) -> Iterator[Advice]:
    """Yield advice for each line of the policy's code that moves a page to a memory again in the same decode step."""
    seen: set[tuple[int, str, int]] = set()
    repeated: Counter[str] = Counter()
    first: dict[str, str] = {}
    moved = 0
    for task in sorted(transfers, key=attrgetter("id")):
        if task.phase != "decode":  # the chunks of a prompt pass the layers one after another
            continue
        line = task.line
        for page, slot in zip(task.pages, task.slots, strict=True):
            moved += 1
            key = (task.step, slot.memory, page.id)
            if key in seen:
                repeated[line] += 1
                first.setdefault(line, describe(page))
            seen.add(key)
    for line, count in repeated.items():
        message = (
            f"{count:,} of {moved:,} pages moved in decode steps had been moved there earlier in the same step, "
            f"such as {first[line]}: use a page for all micro-batches before it goes"
        )
        yield Advice(line=line, kind="moved twice", message=message, case=case)
