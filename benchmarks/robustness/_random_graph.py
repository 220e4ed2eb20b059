"""Random graphs of tasks, run under either driver.

A rank's program makes and drops blocks, moves pages through a pool, submits tasks of all types to
lanes of both disciplines, takes part in collectives, awaits, lifts and cancels. Every task computes a digest of what
it finds in its inputs, so that one which ran too early or too late has a wrong value. Afterwards the run is held
against the same programs executed one task after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from random import Random
from typing import Any

import numpy as np

from benchmarks.robustness._random_program import (
    GARBAGE,
    TYPES,
    RandomRun,
    Rank,
    Record,
    Shape,
    Trouble,
    digest,
)
from benchmarks.robustness._random_verdict import Verdict, judge
from moesched.drivers.realtime import RealtimeDriver
from moesched.drivers.validation import CheckedEngine, CheckedSharedEngine
from moesched.drivers.virtual import VirtualDriver
from moesched.errors import PolicyError, TaskCancelled, TaskFailed
from moesched.seams import Demand, Exchange
from moesched.tasks import Collective, Lane, Task
from moesched.transports.inproc import InprocTransport
from moesched.work import Work
from streams import FakeStreams


def run_graph(choose: Random, shape: Shape) -> Verdict:
    """Run one random graph to its end and judge it."""
    run = RandomRun(choose, shape)
    Graph(run).run()
    return judge(run)


class Graph:
    """One program for each rank, and the machine that they run on.

    Args:
        run: the choices that the ranks share; gets their programs and tasks.
    """

    def __init__(self, run: RandomRun) -> None:
        self.shared = run
        choose, shape = run.choose, run.shape
        self.transport = InprocTransport(shape.ranks, timeout_seconds=30)
        self.ticks = count()
        self.now: Callable[[], int] = lambda: next(self.ticks)
        make = CheckedSharedEngine if shape.real else CheckedEngine
        for number in range(shape.ranks):
            lanes = []
            for (name, kind), way in zip(run.kinds.items(), run.ways, strict=True):
                domain = f"device {number}" if kind == "stream" else None
                lanes.append(Lane(name, way, domain=domain, depth=choose.randint(1, 3)))
            run.ranks.append(Rank(run, number, make(lanes)))
        self._reduced: dict[int, int] = {}

    def run(self) -> None:
        """Run all programs to their ends.

        Raises:
            what is no part of the game.
        """
        mains = [rank.main() for rank in self.shared.ranks]
        try:
            if self.shared.shape.real:
                asyncio.run(self._run_real(mains))
            else:
                self._run_virtual(mains)
        except (Trouble, PolicyError, TaskFailed, TaskCancelled):
            if not self.shared.shape.troubled:
                raise

    def _run_virtual(self, mains: list[Coroutine[Task, Any, None]]) -> None:
        driver = VirtualDriver(
            [rank.engine for rank in self.shared.ranks],
            RandomCost(self.shared.choose.randrange(1000)),
            sharing=self.shared.choose.random() < 0.5,
            perform=dict.fromkeys((*TYPES, Collective), self.execute),
        )
        self.now = lambda: driver.now
        driver.run(*mains)

    async def _run_real(self, mains: list[Coroutine[Task, Any, None]]) -> None:
        engines = [rank.engine for rank in self.shared.ranks if isinstance(rank.engine, CheckedSharedEngine)]
        streams = FakeStreams(self.execute)
        driver = RealtimeDriver(engines, self.execute, kinds=self.shared.kinds, streams=streams)
        running = asyncio.current_task()
        assert running is not None
        self.shared.interrupt = running.cancel
        try:
            await driver.run(*mains)
        except asyncio.CancelledError:
            self.shared.interrupted = True
        finally:
            streams.close()

    # -- what tasks do ------------------------------------------------------------------------------

    def execute(self, task: Task) -> Any:
        """Run a task of any rank on what lies in its storage now."""
        record = self.shared.records[task]
        record.start = task.start if task.end >= 0 else next(self.ticks)
        if self.shared.shape.real and self.shared.kinds[task.lane.name] == "awaitable":
            return self._perform_later(record)
        return self._perform(record)

    async def _perform_later(self, record: Record) -> int:
        await asyncio.sleep(0)
        return self._perform(record)

    def _perform(self, record: Record) -> int:
        task, cells = record.task, record.rank.cells
        found = [cells[block] for block in record.reads]
        if isinstance(task, Collective) and not self.shared.shape.real and task.ticket not in self._reduced:
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
        if isinstance(task, Collective) and self.shared.shape.real:
            exchange = Exchange(task.ticket, task.signature)
            self.transport.abandon(self.shared.records[task].rank.number, exchange, "it was told to fail")
        raise Trouble(f"{task.label} was told to fail")

    def _compute(self, record: Record, found: list[int]) -> int:
        task, rank = record.task, record.rank
        if not isinstance(task, Collective):
            for _ in range(record.spins):
                digest(0)
            return digest(rank.number, task.id, *found)
        if self.shared.shape.real:
            part = np.zeros(len(self.shared.ranks), np.int64)
            part[rank.number] = digest(*found)
            total = self.transport.all_reduce(rank.number, Exchange(task.ticket, task.signature), part)
            return digest(task.ticket, *total.tolist())
        return self._reduced[task.ticket]

    def _reduce(self, ticket: int) -> int:
        """A collective's value on the virtual clock, where the first rank to end finds the inputs of all in place."""
        parts = [rank.parts[ticket] for rank in self.shared.ranks]
        return digest(ticket, *(digest(*(part.rank.cells[block] for block in part.reads)) for part in parts))


class RandomCost:
    """Durations and shares of two resources, drawn once for each kind of work."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def work(self, work: Work) -> Demand:
        """Resources that a kind of work asks for."""
        choose = Random(f"{self._seed} {work.kind}")
        shares = tuple((name, round(choose.random(), 1)) for name in ("memory", "processor"))
        return Demand(choose.choice((1e-9, 3e-9, 1e-8, 1e-7)), shares)
