"""The compiled engine and the one in Python: after the same calls, the same tasks are in the same states."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from sys import getrefcount
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.engine import Engine, PlainEngine
from moesched.errors import TaskFailed
from moesched.tasks import (
    CLASS_SHIFT,
    ISSUED,
    RUNNING,
    Block,
    Collective,
    Discipline,
    HostKernel,
    Kernel,
    Lane,
    PageTransfer,
    Task,
)
from moesched.work import Work

COMPILED = Engine.submit is not PlainEngine.submit
WORK = Work("test", "gpu")
KINDS = (Kernel, HostKernel, PageTransfer)
DISCIPLINES: tuple[Discipline, ...] = ("in_order", "ready_first")
LANES, BLOCKS, CALLS = 5, 6, 120


class Play:
    """Random calls of an engine; the same ones for every engine that answers them in the same way."""

    def __init__(self, make: type[PlainEngine], seed: int) -> None:
        self.choose = choose = Random(seed)
        streams = choose.random() < 0.3
        self.lanes = [
            Lane(
                f"lane {n}",
                choose.choice(DISCIPLINES),
                domain="device" if streams and n < 2 else None,
                depth_in_order=choose.randrange(5),
            )
            for n in range(LANES)
        ]
        self.engine = make(self.lanes)
        self.blocks = [Block(f"block {n}") for n in range(BLOCKS)]
        self.tasks: list[Task] = []
        self.calls = [self.submit] * 6 + [self.finish] * 4
        self.halts_after = choose.randrange(CALLS) if choose.random() < 0.2 else CALLS
        if choose.random() < 0.6:
            self.calls += [self.fail, self.cancel, self.promote, self.join, self.collective, self.finish]

    def run(self) -> list[object]:
        """Make the calls, end all tasks, and return what was there after each call."""
        seen: list[object] = []
        for number in range(CALLS):
            if number == self.halts_after:
                self.engine.halt(RuntimeError("the run was interrupted"))
            self.choose.choice(self.calls)()
            seen.append(self.seen())
        while self.running():
            self.finish()
            seen.append(self.seen())
        counts = (*self.tasks, *self.lanes, *self.blocks)
        return [*seen, [getrefcount(each) for each in counts]]

    def submit(self) -> None:
        lane, kind = self.choose.choice(self.lanes), self.choose.choice(KINDS)
        task = kind(lane, WORK, f"task {len(self.tasks)}", operands=object())
        arguments: list[Any] = [task, self.some(self.blocks), self.some(self.blocks)]
        if self.choose.random() < 0.5:
            after = tuple(self.some(self.tasks)) if self.choose.random() < 0.2 else ()
            arguments += [after, self.choose.randrange(-1, 3)]
        self.enter(task, arguments[: self.choose.choice((1, 2, 3, 5, 5, 5))])

    def collective(self) -> None:
        task = Collective(self.choose.choice(self.lanes), WORK, "sum")
        try:
            self.tasks.append(self.engine.collective(task, self.some(self.blocks), self.some(self.blocks)))
        except TaskFailed:
            return

    def join(self) -> None:
        try:
            self.tasks.append(self.engine.join(self.some(self.blocks), self.some(self.blocks)))
        except TaskFailed:
            return

    def enter(self, task: Task, arguments: Sequence[Any]) -> None:
        try:
            self.tasks.append(self.engine.submit(*arguments))
        except TaskFailed:
            return
        if self.choose.random() < 0.2:
            task.waiter = self

    def finish(self) -> None:
        while self.engine.arrived:
            arrived = self.engine.arrived.pop(0)
            if arrived.state < RUNNING:
                self.engine.admit(arrived)
        if running := self.running():
            task = self.choose.choice(running)
            if task.state == RUNNING and task.lane.domain is not None and self.choose.random() < 0.5:
                self.engine.issued(task)
            elif self.choose.random() < 0.7:
                self.engine.finish(task)
            else:
                self.engine.finish(task, [task.id])

    def fail(self) -> None:
        if running := self.running():
            self.engine.fail(self.choose.choice(running), ValueError("broken"))

    def cancel(self) -> None:
        for task in self.some(self.tasks):
            self.engine.cancel(task)

    def promote(self) -> None:
        for task in self.some(self.tasks):
            self.engine.promote(task, self.choose.randrange(2))

    def some(self, things: Sequence[Any]) -> Sequence[Any]:
        """Up to three things, as a list or a tuple."""
        chosen = self.choose.sample(things, min(len(things), self.choose.randrange(4)))
        return self.choose.choice((tuple, list))(chosen)

    def running(self) -> list[Task]:
        return [task for task in self.tasks if task.state in (RUNNING, ISSUED)]

    def seen(self) -> object:
        """All that an engine may have changed, tasks by their ids."""
        engine = self.engine
        return (
            [ids(each) for each in (engine.started, engine.awaited, engine.arrived)],
            [engine.submitted, engine.settled, engine.joins, str(engine.failure)],
            [seen_of(task) for task in self.tasks],
            [
                (ids(lane.queue), [(key, t.id) for key, t in lane.heap], one(lane.running))
                + (lane.in_flight, ids(lane.unstarted))
                for lane in self.lanes
            ],
            [(one(block.writer), ids(block.readers)) for block in self.blocks],
        )


def seen_of(task: Task) -> object:
    return (
        [task.id, task.key, task.state, task.waits, task.deps, task.inputs, task.value, str(task.cause)],
        None if task.followers is None else ids(task.followers),
        task.operands is None,
        task.device_edges and (ids(task.device_edges.before), ids(task.device_edges.followers)),
    )


def ids(tasks: Any) -> list[int]:
    return [task.id for task in tasks]


def one(task: Task | None) -> int | None:
    return None if task is None else task.id


@pytest.mark.skipif(not COMPILED, reason="the engine was not compiled")
@given(st.integers(0, 10**9))
def test_the_compiled_engine_does_what_the_one_in_python_does(seed: int) -> None:
    assert Play(Engine, seed).run() == Play(PlainEngine, seed).run()


@pytest.mark.parametrize("engine", [Engine, PlainEngine])
@pytest.mark.parametrize(
    "arguments",
    [(), (None,), (Block("x"),), ("task", (None,)), ("task", 5), ("task", (), ("x",)), ("task", (), (), (), "urgent")],
)  # fmt: skip
def test_a_call_with_something_else_than_tasks_and_blocks_raises(
    engine: type[PlainEngine], arguments: tuple[Any, ...]
) -> None:
    task = Kernel(Lane("gpu"), WORK, "task")
    values: list[Any] = [task if each == "task" else each for each in arguments]
    with pytest.raises((AttributeError, TypeError)):
        engine([task.lane]).submit(*values)


@pytest.mark.parametrize("engine", [Engine, PlainEngine])
def test_arguments_may_have_their_names(engine: type[PlainEngine]) -> None:
    lane, block = Lane("link"), Block("x")
    graph = engine([lane])
    first = graph.submit(task=Kernel(lane, WORK, "first"), writes=[block])
    second = graph.submit(PageTransfer(lane, WORK, "second"), reads=[block], priority_class=1)
    assert (second.deps, second.key) == ([first.id], 1 << CLASS_SHIFT | second.id)
    graph.finish(task=first, value=[1])
    assert (first.value, graph.started) == ((1,), [first, second])
