"""One rank's random program: what it submits, and what its tasks find and leave in their storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random
from typing import Any, NamedTuple

from moesched.drivers.validation import CheckedEngine
from moesched.errors import NotResident, PolicyError, TaskCancelled, TaskFailed
from moesched.models.layout import Page
from moesched.steps.memory import Memory, Pool, Slot, held_slots
from moesched.steps.pool_counts import FETCHED
from moesched.steps.views import Views
from moesched.tasks import Block, Collective, Decision, Discipline, HostKernel, Kernel, PageTransfer, Task
from moesched.work import Work

TYPES: tuple[type[Task], ...] = (Kernel, HostKernel, PageTransfer, Decision)

OTHER_KINDS = ("thread", "guest", "loop", "awaitable", "stream", "stream")
"""Lanes but the first, which is a worker thread."""

GARBAGE = -1
"""Value in storage that a task is overwriting, and in what a failed task left behind."""


class Trouble(Exception):
    """Raised by a task that is to fail, or by a program that gives up."""


class Record:
    """One task: what it reads and leaves in program order, and what was seen of it."""

    def __init__(self, rank: Rank, reads: Sequence[Block], writes: Sequence[Block]) -> None:
        self.rank = rank
        self.reads = tuple(reads)
        self.writes = tuple(writes)
        self.inputs = [rank.writers[block] for block in reads]
        """Writer of each block that is read, and the number of its result."""
        self.task: Task
        self.fails = False
        self.withdrawn = False
        self.spins = 0
        self.start = -1
        self.end = -1
        self.expected = GARBAGE


class Shape(NamedTuple):
    """Kind of run.

    Attributes:
        real: on worker threads, rather than on the virtual clock.
        troubled: with task failures, cancellations, ranks that give up, interruptions.
    """

    real: bool
    ranks: int
    troubled: bool


class RandomRun:
    """The choices that all ranks of a run share, and what became of it.

    Args:
        choose: makes all choices.
        shape: what kind of run it is.
    """

    def __init__(self, choose: Random, shape: Shape) -> None:
        self.choose = choose
        self.shape = shape
        self.interrupts = shape.troubled and shape.real and choose.random() < 0.15
        self.interrupted = False
        self.interrupt: Callable[[], object] = lambda: None
        self.secrets = [choose.randrange(1000) for _ in range(choose.randint(0, 6))]
        """One number for each collective, the same on all ranks."""
        disciplines: tuple[Discipline, ...] = ("in_order", "ready_first")
        self.ways = [choose.choice(disciplines) for _ in range(choose.randint(1, 5))]
        """The discipline of each lane."""
        self.kinds: dict[str, Any] = {
            f"lane {n}": choose.choice(OTHER_KINDS) if n else "thread" for n in range(len(self.ways))
        }
        self.ranks: list[Rank] = []
        self.records: dict[Task, Record] = {}


class Rank:
    """One rank's program, and the storage that its tasks work on."""

    def __init__(self, run: RandomRun, number: int, engine: CheckedEngine) -> None:
        self.run = run
        self.number = number
        self.engine = engine
        # On threads, ranks go on in an order that no seed decides: each needs choices of its own.
        choose = self.choose = Random(run.choose.randrange(10**9)) if run.shape.real else run.choose
        self.records: list[Record] = []
        self.parts: list[Record] = []
        self.awaited: list[tuple[Record, int]] = []
        self.ended_badly = False
        self.cells: dict[Block, int] = {}
        self.writers: dict[Block, tuple[Record, int]] = {}
        self.live: list[Block] = []
        self.pages = [Page(n, 0, n, 0, (), 10) for n in range(7)]
        home = Memory("memory", 40)
        self.pool = Pool("pool", home, choose.randint(1, 4), 10, choose.choice(("ring", "lru", "none")))
        self.pool.reserve()
        self.views: Views[Any] = Views(home, lambda key: tuple(self.pages[n] for n in key))
        engine.watch([home], [self.pool], [self.views])
        self._secrets = list(run.secrets)
        self._statements: list[Callable[[], None]] = [self.compute] * 8 + [self.make, self.read_pages] * 3
        self._statements += [self.drop, self.move_pages, self.move_pages, self.promote]
        self._statements += [self.cancel] * run.shape.troubled

    async def main(self) -> None:
        """The program."""
        try:
            await self._main()
        except BaseException:
            self.ended_badly = True
            raise

    async def _main(self) -> None:
        choose, run = self.choose, self.run
        length = choose.randint(5, 60)
        meetings = sorted(choose.randrange(length) for _ in run.secrets)
        end = choose.randrange(length) if run.shape.troubled and choose.random() < 0.1 else length
        interrupts = choose.randrange(length) if run.interrupts and not self.number else -1
        for line in range(end):
            if line == interrupts:
                run.interrupt()
            choose.choice(self._statements)()
            for _ in range(meetings.count(line)):
                self.meet()
            if choose.random() < 0.1 and self.records:
                await self.wait_for(choose.choice(self.records[-10:]))
        if end < length and choose.random() < 0.5:
            raise Trouble("the program gives up")

    async def wait_for(self, record: Record) -> None:
        """Await a handle; half of the failures end the program."""
        try:
            self.awaited.append((record, await record.task))
        except (TaskFailed, TaskCancelled):
            if self.choose.random() < 0.5:
                raise

    # -- statements ---------------------------------------------------------------------------------

    def make(self) -> None:
        """A new block."""
        block = Block(f"block {len(self.cells)}")
        self.live.append(block)
        self._submit([], [block])

    def drop(self) -> None:
        """Some block is no longer used."""
        if self.live:
            self.live.remove(self.choose.choice(self.live))

    def compute(self) -> None:
        """A task that reads some blocks and writes others, or changes them in place."""
        self._submit(self._some(self.live, 3), self._some(self.live, 2))

    def move_pages(self) -> None:
        """Pages into slots, over others."""
        pool = self.pool
        slots: list[Slot] = []
        for page in self._some(self.pages, len(pool.slots)):
            if pool.replacement == "none" and not pool.empty_slots:
                self._evict()
            try:
                slots += pool.assign_all([page], self.engine, FETCHED, 0)
            except PolicyError:
                assert page in pool, f"{pool.name} refuses a page that it does not hold"
        if slots:
            self._submit([], dict.fromkeys(slots), kind=PageTransfer)

    def read_pages(self) -> None:
        """A task that reads pages through a view and changes a block."""
        held = self._some(self.pool.pages(), len(self.pool.slots))
        if not held:
            return
        key = tuple(sorted(page.id for page in held))
        try:
            view = self.views.open.get(key) or self.views.show(key, self.engine, 0)
        except NotResident:
            return
        view.use(0, 1)
        self._submit(view.slots, self._some(self.live, 1), through=view.reads)

    def meet(self) -> None:
        """The next collective; now and then a rank says something else than the others."""
        secret = self._secrets.pop(0)
        if not self.live:
            self.make()
        lanes = [lane for lane in self.engine.lanes if self.run.kinds[lane.name] == "thread"]
        task = Collective(lanes[secret % len(lanes)], self._work(), "all_reduce")
        differs = self.run.shape.troubled and self.choose.random() < 0.05
        task.signature = f"all_reduce {secret}{' of something else' if differs else ''}"
        record = self._record(task, self._some(self.live, 2), [self.choose.choice(self.live)])
        record.fails = self.run.shape.troubled and secret % 10 == 0
        self.parts.append(record)
        try:
            self.engine.collective(task, record.reads, record.writes)
        except TaskFailed:
            self.parts.pop()
            raise
        self.records.append(record)

    def promote(self) -> None:
        """A transfer becomes urgent."""
        transfers = [record.task for record in self.records[-8:] if isinstance(record.task, PageTransfer)]
        if transfers:
            self.engine.promote(self.choose.choice(transfers), 0)

    def cancel(self) -> None:
        """A task is no longer wanted."""
        if self.records:
            record = self.choose.choice(self.records[-8:])
            record.withdrawn |= self.engine.cancel(record.task)

    # -- helpers ------------------------------------------------------------------------------------

    def _submit(
        self,
        reads: Sequence[Block],
        writes: Sequence[Block] | dict[Any, None],
        *,
        kind: type[Task] | None = None,
        through: Sequence[Block] | None = None,
    ) -> None:
        choose = self.choose
        task = (kind or choose.choice(TYPES))(choose.choice(self.engine.lanes), self._work(), "compute")
        record = self._record(task, reads, tuple(writes))
        record.fails = self.run.shape.troubled and choose.random() < 0.03
        record.spins = choose.choice((0, 0, 0, 1, 10))
        after = [each.task for each in self._some(self.records[-20:], 2)] if choose.random() < 0.2 else []
        urgency = choose.choice((0, 1, 2) if isinstance(task, PageTransfer) else (-1, 0, 0, 2))
        self.engine.submit(task, reads if through is None else through, record.writes, after, urgency)
        self.records.append(record)

    def _record(self, task: Task, reads: Sequence[Block], writes: Sequence[Block]) -> Record:
        """Note a task before it is submitted, since it may start at once."""
        record = Record(self, reads, writes)
        record.task = task
        self.run.records[task] = record
        for number, block in enumerate(writes):
            self.cells.setdefault(block, GARBAGE)
            self.writers[block] = (record, number)
        return record

    def _evict(self) -> None:
        page = self.choose.choice(self.pool.pages())
        [slot] = held_slots("evict", [page], self.pool)
        self.pool.vacate(slot, self.engine)

    def _work(self) -> Work:
        return Work(f"kind {self.choose.randrange(5)}", "anything")

    def _some(self, items: Sequence[Any], most: int) -> list[Any]:
        return self.choose.sample(list(items), min(len(items), self.choose.randint(0, most)))


def digest(*values: int) -> int:
    """A number made of others, in their order."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=7).digest())
