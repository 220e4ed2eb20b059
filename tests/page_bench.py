"""A pool of page slots on a scripted engine, for tests of pools and eviction rules."""

from __future__ import annotations

from engine_script import WORK, Script
from moesched.models.layout import Page
from moesched.seams import Eviction
from moesched.steps.ledger import ledger_problems, view_problems
from moesched.steps.memory import Memory, Pool, Replacement, Slot, held_slot
from moesched.steps.pool_counts import FETCHED
from moesched.steps.ruled_pool import RuledPool
from moesched.steps.views import Views
from moesched.tasks import Kernel, PageTransfer, Task

PAGES = [Page(number, 0, number, 0, (), 10) for number in range(6)]


class Bench:
    """A memory with a pool of page slots, a link that fills them and a GPU that reads them."""

    def __init__(
        self, slots: int = 2, replacement: Replacement | Eviction = "ring", capacity: int = 100
    ) -> None:
        self.script = Script(gpu="ready_first", link="ready_first", cpu="ready_first")
        self.engine = self.script.engine
        self.memory = Memory("gpu", capacity)
        self.pool: Pool
        if isinstance(replacement, str):
            self.pool = Pool("weights", self.memory, slots, 10, replacement)
        else:
            self.pool = RuledPool("weights", self.memory, slots, 10, replacement)
        self.views: Views[tuple[int, ...]] = Views(self.memory, lambda key: tuple(PAGES[n] for n in key))
        self.pool.reserve()
        self.engine.watch([self.memory], [self.pool])

    def fetch(self, *numbers: int, arrival: int = FETCHED, step: int = 0) -> Task:
        """Move pages in, in one transfer."""
        slots = self.pool.assign_all([PAGES[number] for number in numbers], self.engine, arrival, step)
        task = PageTransfer(self.script.lanes["link"], WORK, f"fetch {numbers}", slots=slots)
        task.pages = tuple(PAGES[number] for number in numbers)
        self.script.tasks[task.verb] = task
        return self.engine.submit(task, (), slots)

    def fetch_in_vain(self, number: int) -> None:
        """Move a page in that never comes, as its transfer is cancelled behind another one."""
        self.script.submit("busy", "link")
        self.fetch(number)
        self.script.cancel(f"fetch ({number},)")

    def read(self, *numbers: int, name: str = "", lane: str = "gpu", step: int = 0) -> Task:
        """A kernel that reads pages through a view."""
        view = self.views.open.get(numbers) or self.views.show(numbers, self.engine, step)
        view.use(step, 1)
        task = Kernel(self.script.lanes[lane], WORK, name or f"read {numbers}", step=step)
        self.script.tasks[task.verb] = task
        return self.engine.submit(task, view.reads)

    def evict(self, number: int) -> None:
        """Give a page up."""
        self.pool.vacate(self.slot(number), self.engine)

    def slot(self, number: int) -> Slot:
        """The slot that holds a page."""
        slot = held_slot(PAGES[number], self.pool)
        assert slot is not None
        return slot

    def held(self) -> list[int]:
        """The pages in the pool, the next to be replaced first."""
        return [page.id for page in self.pool.pages()]

    def check(self) -> None:
        """The books agree."""
        assert ledger_problems(self.memory, [self.pool]) == []
        assert view_problems(self.views) == []
