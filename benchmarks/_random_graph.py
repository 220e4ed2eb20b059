"""Random graphs of tasks, run under either driver, and what must hold of every run of one.

A rank's program allocates and frees blocks in small memories, moves pages through a pool, submits tasks of all types to
lanes of both disciplines, takes part in collectives, awaits, lifts and cancels. Every task computes a digest of what
it finds in its inputs, so that one which ran too early or too late has a wrong value. Afterwards the run is held
against the same programs executed one task after another.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from hashlib import blake2b
from itertools import count
from random import Random
from time import perf_counter_ns
from typing import Any, NamedTuple

from moesched.drivers.lanes import ThreadQueue
from moesched.drivers.realtime import RealtimeDriver
from moesched.drivers.virtual import VirtualDriver
from moesched.errors import NotResident, OverBudget, PolicyError, TaskCancelled, TaskFailed
from moesched.memory import Memory, Pool, Views
from moesched.models.layout import Page
from moesched.seams import Demand
from moesched.tasks import (
    CANCELLED,
    DONE,
    FAILED,
    STATE_NAMES,
    Block,
    Collective,
    Decision,
    Discipline,
    HostKernel,
    Kernel,
    Lane,
    PageTransfer,
    Task,
    Work,
)
from moesched.transports.inproc import InprocTransport
from moesched.validation import CheckedEngine, CheckedSharedEngine

TYPES: tuple[type[Task], ...] = (Kernel, HostKernel, PageTransfer, Decision)
KINDS = {
    "value": "a task, a block or an awaited handle had a wrong value",
    "order": "a task ran beside or before one that it had to wait for",
    "end": "a task ended otherwise than it should, such as running although its input had failed",
    "budget": "more bytes were in use than a memory has",
    "rule": "the engine broke one of its rules, the ledger contradicted itself, or something was left unsettled",
    "error": "the run raised what is no part of the game",
    "stuck": "the run did not end",
}
GARBAGE = -1
"""What lies in storage that a task is overwriting, and in what a failed task left behind."""


class Shape(NamedTuple):
    """What kind of run it is.

    Attributes:
        real: on worker threads, rather than on the virtual clock.
        troubled: with task failures, cancellations, ranks that give up, interruptions.
    """

    real: bool
    ranks: int
    troubled: bool


class Problem(NamedTuple):
    """Something that was wrong with a run; `kind` is one of KINDS."""

    kind: str
    what: str


class Verdict(NamedTuple):
    """What became of a run: its tasks by how they ended, and all that was wrong."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    problems: Sequence[Problem] = ()


class Trouble(Exception):
    """What a task raises that is told to fail, or a program that gives up."""


def run_graph(choose: Random, shape: Shape) -> Verdict:
    """Run one random graph to its end and judge it."""
    graph = Graph(choose, shape)
    graph.run()
    return judge(graph)


class Record:
    """One task: what it reads and leaves in program order, and what was seen of it."""

    def __init__(self, rank: Rank, reads: Sequence[Block], writes: Sequence[Block]) -> None:
        self.rank = rank
        self.reads = tuple(reads)
        self.writes = tuple(writes)
        self.inputs = [rank.writers[block] for block in reads]
        """Who left what each read block holds, and as which of its results."""
        self.task: Task
        self.fails = False
        self.withdrawn = False
        self.spins = 0
        self.start = -1
        self.end = -1
        self.expected = GARBAGE


class Graph:
    """One program for each rank, and the machine that they run on.

    Args:
        choose: makes all choices.
        shape: what kind of run it is.
    """

    def __init__(self, choose: Random, shape: Shape) -> None:
        self.choose = choose
        self.shape = shape
        self.halts = shape.troubled and choose.random() < 0.4
        self.interrupts = shape.troubled and shape.real and choose.random() < 0.15
        self.interrupted = False
        self.interrupt: Callable[[], object] = lambda: None
        self.records: dict[Task, Record] = {}
        self.secrets = [choose.randrange(1000) for _ in range(choose.randint(0, 6))]
        """One number for each collective, the same on all ranks."""
        self.transport = InprocTransport(shape.ranks, timeout_seconds=30)
        self.ticks = count()
        self.now: Callable[[], int] = lambda: next(self.ticks)
        disciplines: tuple[Discipline, ...] = ("in_order", "ready_first")
        ways = [choose.choice(disciplines) for _ in range(choose.randint(1, 5))]
        self.kinds: dict[str, Any] = {
            f"lane {n}": choose.choice(("thread", "loop", "awaitable", "stream", "stream")) if n else "thread"
            for n in range(len(ways))
        }
        make = CheckedSharedEngine if shape.real else CheckedEngine
        self.ranks: list[Rank] = []
        for number in range(shape.ranks):
            lanes = []
            for (name, kind), way in zip(self.kinds.items(), ways, strict=True):
                domain = f"device {number}" if kind == "stream" else None
                lanes.append(Lane(name, way, domain=domain, depth=choose.randint(1, 3)))
            self.ranks.append(Rank(self, number, make(lanes, halt_on_failure=self.halts)))
        self._reduced: dict[int, int] = {}

    def run(self) -> None:
        """Run all programs to their ends.

        Raises:
            what is no part of the game.
        """
        mains = [rank.main() for rank in self.ranks]
        try:
            if self.shape.real:
                asyncio.run(self._run_real(mains))
            else:
                self._run_virtual(mains)
        except (Trouble, TaskFailed, TaskCancelled):
            if not self.shape.troubled:
                raise

    def _run_virtual(self, mains: list[Coroutine[Task, Any, None]]) -> None:
        driver = VirtualDriver(
            [rank.engine for rank in self.ranks],
            RandomCost(self.choose.randrange(1000)),
            sharing=self.choose.random() < 0.5,
            perform=dict.fromkeys((*TYPES, Collective), self.execute),
        )
        self.now = lambda: driver.now
        driver.run(*mains)

    async def _run_real(self, mains: list[Coroutine[Task, Any, None]]) -> None:
        engines = [rank.engine for rank in self.ranks if isinstance(rank.engine, CheckedSharedEngine)]
        streams = ThreadStreams([lane for engine in engines for lane in engine.lanes], self.execute)
        driver = RealtimeDriver(engines, self.execute, kinds=self.kinds, streams=streams)
        running = asyncio.current_task()
        assert running is not None
        self.interrupt = running.cancel
        try:
            await driver.run(*mains)
        except asyncio.CancelledError:
            self.interrupted = True
        finally:
            streams.close()

    # -- what tasks do ------------------------------------------------------------------------------

    def execute(self, task: Task) -> Any:
        """Run a task of any rank on what lies in its storage now."""
        record = self.records[task]
        record.start = task.start if task.end >= 0 else next(self.ticks)
        if self.shape.real and self.kinds[task.lane.name] == "awaitable":
            return self._run_later(record)
        return self._run(record)

    async def _run_later(self, record: Record) -> int:
        await asyncio.sleep(0)
        return self._run(record)

    def _run(self, record: Record) -> int:
        task, cells = record.task, record.rank.cells
        found = [cells[block] for block in record.reads]
        if isinstance(task, Collective) and not self.shape.real and task.ticket not in self._reduced:
            self._reduced[task.ticket] = self._reduce(task.ticket)
        for block in record.writes:
            cells[block] = GARBAGE
        try:
            if record.fails:
                self._fail(task)
            value = self._compute(record, found)
            for block, before in zip(record.reads, found, strict=True):
                if cells[block] != before and block not in record.writes:
                    return GARBAGE
            for number, block in enumerate(record.writes):
                cells[block] = value + number if cells[block] == GARBAGE else GARBAGE
            return value
        finally:
            record.end = task.end if task.end >= 0 else next(self.ticks)

    def _fail(self, task: Task) -> None:
        if isinstance(task, Collective) and self.shape.real:
            self.transport.abandon(self.records[task].rank.number, task.ticket, "it was told to fail")
        raise Trouble(f"{task.label} was told to fail")

    def _compute(self, record: Record, found: list[int]) -> int:
        task, rank = record.task, record.rank
        if not isinstance(task, Collective):
            for _ in range(record.spins):
                digest(0)
            return digest(rank.number, task.id, *found)
        if self.shape.real:
            total: Part = self.transport.all_reduce(rank.number, task.ticket, Part(found))
            return digest(task.ticket, *total.values)
        return self._reduced[task.ticket]

    def _reduce(self, ticket: int) -> int:
        """A collective's value on the virtual clock, where the first rank to end finds the inputs of all in place."""
        parts = [rank.parts[ticket] for rank in self.ranks]
        return digest(ticket, *(part.rank.cells[block] for part in parts for block in part.reads))


class ThreadStreams:
    """A device with streams, played by a thread for each: it runs what it was issued in order, behind other streams."""

    def __init__(self, lanes: Sequence[Lane], execute: Callable[[Task], Any]) -> None:
        self._execute = execute
        self._issued: dict[Task, ThreadIssued] = {}
        self._streams = {lane: ThreadQueue(f"stream {lane.name}", self._run) for lane in lanes if lane.domain}
        for stream in self._streams.values():
            stream.open()

    def issue(self, task: Task, after: list[Task]) -> ThreadIssued:
        """Hand a task to its stream, behind the tasks `after` on other streams."""
        issued = self._issued[task] = ThreadIssued(task, [self._issued[other] for other in after])
        self._streams[task.lane].put(issued)
        return issued

    def close(self) -> None:
        """End the streams, which are idle."""
        for stream in self._streams.values():
            stream.close()

    def _run(self, issued: ThreadIssued) -> None:
        for other in issued.after:
            other.ended.wait()
        start = perf_counter_ns()
        try:
            issued.value = self._execute(issued.task)
        except BaseException as error:
            issued.error = error
        issued.times = start, perf_counter_ns()
        issued.ended.set()


class ThreadIssued:
    """A task that a stream has taken in."""

    def __init__(self, task: Task, after: list[ThreadIssued]) -> None:
        self.task = task
        self.after = after
        self.ended = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.times = (0, 0)

    def wait(self) -> None:
        """Block until it ended; raises what it raised."""
        self.ended.wait()
        if self.error is not None:
            raise self.error

    def span(self) -> tuple[int, int]:
        """When it ran."""
        return self.times


class Rank:
    """One rank's program, and the storage that its tasks work on."""

    def __init__(self, graph: Graph, number: int, engine: CheckedEngine) -> None:
        self.graph = graph
        self.number = number
        self.engine = engine
        # On threads, ranks go on in an order that no seed decides: each needs choices of its own.
        choose = self.choose = Random(graph.choose.randrange(10**9)) if graph.shape.real else graph.choose
        self.records: list[Record] = []
        self.parts: list[Record] = []
        self.awaited: list[tuple[Record, int]] = []
        self.ended_badly = False
        self.cells: dict[Block, int] = {}
        self.writers: dict[Block, tuple[Record, int]] = {}
        self.live: list[Block] = []
        self.home: dict[Block, Memory] = {}
        self.released: dict[Block, int] = {}
        self.memories = [Memory(f"memory {n}", choose.randint(60, 400)) for n in range(choose.randint(1, 3))]
        self.pages = [Page(n, 0, n, 0, (), 10) for n in range(7)]
        home = self.memories[0]
        self.pool = Pool("pool", home, choose.randint(1, 4), 10, choose.choice(("ring", "lru", "none")))
        self.views: Views[Any] = Views(home, lambda key: tuple(self.pages[n] for n in key))
        engine.watch(self.memories, [self.pool], [self.views])
        self._secrets = list(graph.secrets)
        self._statements: list[Callable[[], None]] = [self.compute] * 8 + [self.allocate, self.read_pages] * 3
        self._statements += [self.release, self.move_pages, self.move_pages, self.lift]
        self._statements += [self.cancel] * graph.shape.troubled

    async def main(self) -> None:
        """The program."""
        try:
            await self._main()
        except BaseException:
            self.ended_badly = True
            raise

    async def _main(self) -> None:
        choose, graph = self.choose, self.graph
        length = choose.randint(5, 60)
        meetings = sorted(choose.randrange(length) for _ in graph.secrets)
        end = choose.randrange(length) if graph.shape.troubled and choose.random() < 0.1 else length
        interrupts = choose.randrange(length) if graph.interrupts and not self.number else -1
        for line in range(end):
            if line == interrupts:
                graph.interrupt()
            choose.choice(self._statements)()
            for _ in range(meetings.count(line)):
                self.meet()
            if choose.random() < 0.1 and self.records:
                await self.wait_for(choose.choice(self.records[-10:]))
        if end < length and choose.random() < 0.5:
            raise Trouble("the program gives up")

    async def wait_for(self, record: Record) -> None:
        """Await a handle; where the engine halts on failure, half of the failures end the program."""
        try:
            self.awaited.append((record, await record.task))
        except (TaskFailed, TaskCancelled):
            if self.graph.halts and self.choose.random() < 0.5:
                raise

    # -- statements ---------------------------------------------------------------------------------

    def allocate(self) -> None:
        """A block, for which others may have to be freed first."""
        memory = self.choose.choice(self.memories)
        nbytes = self.choose.randint(1, min(60, memory.capacity - len(self.pool.slots) * 10))
        while memory.free_bytes < nbytes:
            if self.choose.random() < 0.2:
                self._expect_refusal(memory, nbytes)
            self._release(self.choose.choice([block for block in self.live if block.memory == memory.name]))
        block = memory.allocate(f"block {len(self.home)}", nbytes)
        self.live.append(block)
        self.home[block] = memory
        self._submit([], [block])

    def release(self) -> None:
        """Some block is no longer needed."""
        if self.live:
            self._release(self.choose.choice(self.live))

    def compute(self) -> None:
        """A task that reads some blocks and writes others, or changes them in place."""
        self._submit(self._some(self.live, 3), self._some(self.live, 2))

    def move_pages(self) -> None:
        """Pages into slots, over others."""
        pool = self.pool
        slots = []
        for page in self._some(self.pages, len(pool.slots)):
            if pool.replacement == "none" and not pool.empty_slots:
                self._evict()
            try:
                slots.append(pool.place(page, self.engine))
            except PolicyError:
                assert page in pool, f"{pool.name} refuses a page that it does not hold"
        if slots:
            self._submit([], dict.fromkeys(slots), sort=PageTransfer)

    def read_pages(self) -> None:
        """A task that reads pages through a view and changes a block."""
        held = self._some(self.pool.pages(), len(self.pool.slots))
        if not held:
            return
        key = tuple(sorted(page.id for page in held))
        try:
            view = self.views.open.get(key) or self.views.show(key, self.engine)
        except NotResident:
            return
        view.touch()
        self._submit(view.slots, self._some(self.live, 1), through=view.reads)

    def meet(self) -> None:
        """The next collective; now and then a rank says something else than the others."""
        secret = self._secrets.pop(0)
        if not self.live:
            self.allocate()
        lanes = [lane for lane in self.engine.lanes if self.graph.kinds[lane.name] == "thread"]
        task = Collective(lanes[secret % len(lanes)], self._work(), "all_reduce")
        differs = self.graph.shape.troubled and self.choose.random() < 0.05
        task.signature = f"all_reduce {secret}{' of something else' if differs else ''}"
        record = self._record(task, self._some(self.live, 2), [self.choose.choice(self.live)])
        record.fails = self.graph.shape.troubled and secret % 10 == 0
        self.parts.append(record)
        try:
            self.engine.collective(task, record.reads, record.writes)
        except TaskFailed:
            self.parts.pop()
            raise
        self.records.append(record)

    def lift(self) -> None:
        """A transfer becomes urgent."""
        transfers = [record.task for record in self.records[-8:] if isinstance(record.task, PageTransfer)]
        if transfers:
            self.engine.lift(self.choose.choice(transfers), 0)

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
        sort: type[Task] | None = None,
        through: Sequence[Block] | None = None,
    ) -> None:
        choose = self.choose
        task = (sort or choose.choice(TYPES))(choose.choice(self.engine.lanes), self._work(), "compute")
        record = self._record(task, reads, tuple(writes))
        record.fails = self.graph.shape.troubled and choose.random() < 0.03
        record.spins = choose.choice((0, 0, 0, 1, 10))
        after = [each.task for each in self._some(self.records[-20:], 2)] if choose.random() < 0.2 else []
        urgency = choose.choice((0, 1, 2)) if isinstance(task, PageTransfer) else 0
        self.engine.submit(task, reads if through is None else through, record.writes, after, urgency)
        self.records.append(record)

    def _record(self, task: Task, reads: Sequence[Block], writes: Sequence[Block]) -> Record:
        """Note a task before it is submitted, since it may start at once."""
        record = Record(self, reads, writes)
        record.task = task
        self.graph.records[task] = record
        for number, block in enumerate(writes):
            self.cells.setdefault(block, GARBAGE)
            self.writers[block] = (record, number)
        return record

    def _release(self, block: Block) -> None:
        self.live.remove(block)
        self.released[block] = self.graph.now()
        self.home[block].release(block)

    def _evict(self) -> None:
        page = self.choose.choice(self.pool.pages())
        self.pool.vacate(self.pool.memory.table[page.id], self.engine)

    def _expect_refusal(self, memory: Memory, nbytes: int) -> None:
        used = memory.used
        try:
            memory.allocate("too much", nbytes)
        except OverBudget:
            assert memory.used == used, "a refusal took bytes"
        else:
            raise AssertionError("a budget was passed")

    def _work(self) -> Work:
        return Work(f"kind {self.choose.randrange(5)}", "anything")

    def _some(self, items: Sequence[Any], most: int) -> list[Any]:
        return self.choose.sample(list(items), min(len(items), self.choose.randint(0, most)))


class Part:
    """A rank's contribution to a collective; adding two keeps their order."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __add__(self, other: Part) -> Part:
        return Part(self.values + other.values)


class RandomCost:
    """Durations and shares of two resources, drawn once for each kind of work."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def work(self, work: Work) -> Demand:
        """What a kind of work asks for."""
        choose = Random(f"{self._seed} {work.kind}")
        shares = tuple((name, round(choose.random(), 1)) for name in ("memory", "processor"))
        return Demand(choose.choice((1e-9, 3e-9, 1e-8, 1e-7)), shares)


def digest(*values: int) -> int:
    """A number made of others, in their order."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=7).digest())


# -- the verdict -----------------------------------------------------------------------------------


def judge(graph: Graph) -> Verdict:
    """Hold a run that has ended against its programs executed one task after another."""
    problems = []
    for rank in graph.ranks:
        try:
            rank.engine.check_over()
        except AssertionError as error:
            problems.append(Problem("rule", f"rank {rank.number}: {error}"))
    evaluate(graph)
    for rank in graph.ranks:
        for record in rank.records:
            problems += _wrong_end(graph, record)
        problems += [Problem("value", what) for what in _wrong_awaits(rank) + _wrong_cells(rank)]
        problems += [Problem("order", what) for what in _overlaps(rank)]
        problems += [Problem("budget", what) for what in _passed_budgets(rank)]
    states = [record.task.state for rank in graph.ranks for record in rank.records]
    return Verdict(states.count(DONE), states.count(FAILED), states.count(CANCELLED), problems)


def evaluate(graph: Graph) -> None:
    """Execute the programs in their order, as if nothing failed: ranks in turn, from collective to collective."""
    remaining = [list(rank.records) for rank in graph.ranks]
    for ticket in range(max(len(rank.parts) for rank in graph.ranks) + 1):
        for records in remaining:
            while records and not isinstance(records[0].task, Collective):
                record = records.pop(0)
                record.expected = digest(record.rank.number, record.task.id, *_inputs(record))
        parts = [records.pop(0) for records in remaining if records]
        for part in parts:
            part.expected = digest(ticket, *(value for each in parts for value in _inputs(each)))


def _inputs(record: Record) -> list[int]:
    return [writer.expected + number for writer, number in record.inputs]


def _wrong_end(graph: Graph, record: Record) -> list[Problem]:
    """What is wrong with how a task ended."""
    task = record.task
    if task.state == DONE and task.value != record.expected:
        return [Problem("value", f"rank {record.rank.number}: {task!r} has a wrong value")]
    what = _unexpected_end(graph, record)
    return [Problem("end", f"rank {record.rank.number}: {task!r} {what}")] if what else []


def _unexpected_end(graph: Graph, record: Record) -> str:
    task = record.task
    fed = all(writer.task.state == DONE for writer, _ in record.inputs)
    on_stream = task.lane.domain is not None  # where a task is handed over before its inputs are there
    if task.state == DONE:
        return "ended well, but should not have" if not fed or record.fails or record.withdrawn else ""
    if task.state == FAILED:
        return "" if record.fails and (fed or on_stream) else f"failed: {task.cause!r}"
    if task.state != CANCELLED:
        return f"is {STATE_NAMES[task.state]} at the end"
    if record.start >= 0 and not (on_stream and not fed):
        return "ran"
    stopped = graph.interrupted or record.rank.ended_badly
    if fed and not (record.withdrawn or stopped or _broken(graph, task)):
        return f"was cancelled for no reason: {task.cause!r}"
    return ""


def _broken(graph: Graph, task: Task) -> bool:
    """Whether a collective could not take place, for what happened on any rank."""
    if not isinstance(task, Collective):
        return False
    parts = [rank.parts[task.ticket] for rank in graph.ranks if task.ticket < len(rank.parts)]
    if len(parts) < len(graph.ranks) or any(rank.ended_badly for rank in graph.ranks):
        return True
    if any(part.task.state == DONE for part in parts):
        return False
    signatures = {part.task.signature for part in parts if isinstance(part.task, Collective)}
    unfed = any(writer.task.state != DONE for part in parts for writer, _ in part.inputs)
    return len(signatures) > 1 or unfed or any(part.withdrawn for part in parts)


def _wrong_awaits(rank: Rank) -> list[str]:
    return [
        f"rank {rank.number}: awaiting {record.task!r} gave a wrong value"
        for record, value in rank.awaited
        if value != record.expected
    ]


def _wrong_cells(rank: Rank) -> list[str]:
    """Blocks that do not hold at the end what the last task that writes them in program order has left there."""
    return [
        f"rank {rank.number}: {block.name} holds a wrong value at the end"
        for block, (writer, number) in rank.writers.items()
        if writer.task.state == DONE and rank.cells[block] != writer.expected + number
    ]


def _overlaps(rank: Rank) -> list[str]:
    """Tasks that used the same storage at once, or in another order than that of the program."""
    problems = []
    written: dict[Block, Record] = {}
    read: dict[Block, list[Record]] = {}
    for record in rank.records:
        if record.start < 0:
            continue
        for block in record.reads:
            read.setdefault(block, []).append(record)
        earlier = [written[block] for block in (*record.reads, *record.writes) if block in written]
        earlier += [
            reader for block in record.writes for reader in read.get(block, ()) if reader is not record
        ]
        problems += [
            f"rank {rank.number}: {record.task!r} did not wait for {other.task!r}"
            for other in earlier
            if record.start < other.end
        ]
        for block in record.writes:
            written[block] = record
            read[block] = []
    return problems


def _passed_budgets(rank: Rank) -> list[str]:
    """Memories in which more bytes were in use at some moment than they have."""
    problems = []
    uses: dict[Block, list[Record]] = {}
    for record in rank.records:
        if record.start >= 0:
            for block in {*record.reads, *record.writes}:
                uses.setdefault(block, []).append(record)
    for memory in rank.memories:
        events = []
        for block, home in rank.home.items():
            if home is memory and block in uses:
                events.append((min(use.start for use in uses[block]), 1, block.nbytes))
                if block in rank.released:
                    end = max(use.end for use in uses[block])
                    events.append((max(end, rank.released[block]), 0, -block.nbytes))
        in_use = len(rank.pool.slots) * rank.pool.slot_bytes if memory is rank.memories[0] else 0
        for _, _, nbytes in sorted(events):
            in_use += nbytes
            if in_use > memory.capacity:
                problems.append(
                    f"rank {rank.number}: {in_use} bytes in use in {memory.name} of {memory.capacity}"
                )
                break
    return problems
