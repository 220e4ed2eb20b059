"""Streams: tasks of one device wait for each other on the device, and for the host only where the host must know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import anyio
import pytest

from moesched.drivers.realtime import RealtimeDriver, SharedEngine
from moesched.errors import TaskCancelled, TaskFailed
from moesched.tasks import DONE, Block, HostKernel, Kernel, Lane, PageTransfer, Task
from moesched.work import Work
from streams import FakeStreams, Operation

WORK = Work("test", "gpu")


class UntimedOperation(Operation):
    """An operation whose times cannot be read."""

    def span(self) -> tuple[int, int]:
        raise OSError("the events are gone")


class Rig:
    """Two streams of one device and a host lane, with a driver over them; records what ran, in order."""

    def __init__(
        self,
        execute: Callable[[Task], Any] = lambda task: None,
        *,
        depth: int = 2,
        operation: type[Operation] = Operation,
    ) -> None:
        self.ran: list[str] = []
        self.gpu = Lane("gpu", domain="device", depth=depth)
        self.copies = Lane("copies", domain="device", depth=depth)
        self.host = Lane("host")
        self.engine = SharedEngine([self.gpu, self.copies, self.host])

        def note(task: Task) -> Any:
            self.ran.append(task.verb)
            return execute(task)

        self.streams = FakeStreams(note, operation)
        self.driver = RealtimeDriver(
            [self.engine], note, kinds={"gpu": "stream", "copies": "stream"}, streams=self.streams
        )

    def kernel(self, name: str, reads: list[Block], writes: list[Block]) -> Task:
        return self.engine.submit(Kernel(self.gpu, WORK, name), reads, writes)

    def copy(self, name: str, reads: list[Block], writes: list[Block]) -> Task:
        return self.engine.submit(PageTransfer(self.copies, WORK, name), reads, writes)

    def on_host(self, name: str, reads: list[Block], writes: list[Block]) -> Task:
        return self.engine.submit(HostKernel(self.host, WORK, name), reads, writes)

    def run(self, main: Any) -> Any:
        return anyio.run(self.driver.run, main)[0]


@pytest.fixture
def rigs() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*arguments: Any, **named: Any) -> Rig:
        made.append(Rig(*arguments, **named))
        return made[-1]

    yield make
    for rig in made:
        rig.streams.close()


def test_a_task_is_issued_behind_one_that_still_runs_on_another_stream(rigs: Callable[..., Rig]) -> None:
    gate = threading.Event()
    rig = rigs(lambda task: gate.wait() if task.verb == "fetch" else None)

    async def main() -> None:
        page = Block("page")
        fetch = rig.copy("fetch", [], [page])
        kernel = rig.kernel("kernel", [page], [])
        rig.on_host("open the gate", [], [])
        while len(rig.streams.issued) < 2:
            await rig.on_host("look", [], [])
        assert fetch.state < DONE
        gate.set()
        await kernel

    rig.run(main())
    assert rig.streams.issued == ["fetch", "kernel"]
    assert [verb for verb in rig.ran if verb in ("fetch", "kernel")] == ["fetch", "kernel"]


def test_a_task_that_runs_while_its_kernels_are_launched_says_until_when(rigs: Callable[..., Rig]) -> None:
    began, launched = threading.Event(), threading.Event()

    def execute(task: Task) -> None:
        if task.verb == "kernel":
            began.set()
            launched.wait()

    rig = rigs(execute)
    rig.streams.after_issue = began.wait

    async def main() -> Task:
        kernel = rig.kernel("kernel", [], [])
        while kernel.launched < 0:
            await rig.on_host("look", [], [])
        launched.set()
        await kernel
        return kernel

    kernel = rig.run(main())
    assert kernel.start < kernel.launched < kernel.end


def test_the_value_of_a_stream_task_can_be_awaited(rigs: Callable[..., Rig]) -> None:
    rig = rigs(lambda task: task.verb.upper())

    async def main() -> list[str]:
        first = rig.kernel("first", [], [])
        second = rig.kernel("second", [], [])
        return [await second, await first]

    assert rig.run(main()) == ["SECOND", "FIRST"]


def test_chains_across_streams_and_host_run_in_program_order(rigs: Callable[..., Rig]) -> None:
    rig = rigs()

    async def main() -> None:
        state = Block("state")
        for step in range(30):
            rig.copy(f"copy {step}", [state], [state])
            rig.kernel(f"kernel {step}", [state], [state])
            rig.on_host(f"host {step}", [state], [state])

    rig.run(main())
    assert rig.ran == [f"{kind} {step}" for step in range(30) for kind in ("copy", "kernel", "host")]


def test_what_was_issued_behind_a_failed_task_counts_as_cancelled(rigs: Callable[..., Rig]) -> None:
    gate = threading.Event()

    def execute(task: Task) -> None:
        if task.verb == "bad":
            gate.wait()
            raise OSError("device lost")

    rig = rigs(execute)
    tasks: list[Task] = []

    async def main() -> None:
        data = Block("data")
        tasks.append(rig.copy("bad", [], [data]))
        tasks.append(rig.kernel("needs it", [data], []))
        tasks.append(rig.kernel("does not", [], []))
        while len(rig.streams.issued) < 3:
            await rig.on_host("look", [], [])
        gate.set()
        await tasks[1]

    with pytest.raises((TaskFailed, TaskCancelled), match=r"device lost|cancelled"):
        rig.run(main())
    assert tasks[1].value is None and tasks[1].cause is not None
    assert tasks[2].cause is None
    assert rig.engine.unsettled == 0


def loses_the_device(task: Task) -> None:
    raise OSError("device lost")


@pytest.mark.parametrize(
    ("execute", "says"), [(lambda task: None, "the events are gone"), (loses_the_device, "device lost")]
)
def test_a_task_whose_times_cannot_be_read_fails_with_that_or_with_its_own_error(
    rigs: Callable[..., Rig], execute: Callable[[Task], None], says: str
) -> None:
    rig = rigs(execute, operation=UntimedOperation)

    async def main() -> None:
        await rig.kernel("kernel", [], [])

    with pytest.raises(TaskFailed, match=says):
        rig.run(main())


def test_ends_that_the_host_does_not_need_are_waited_for_together(rigs: Callable[..., Rig]) -> None:
    submitted = threading.Event()
    waited: list[Operation] = []

    class NotedOperation(Operation):
        def wait(self) -> None:
            waited.append(self)
            super().wait()

    rig = rigs(depth=64, operation=NotedOperation)
    rig.streams.after_issue = submitted.wait

    async def main() -> None:
        state = Block("state")
        kernels = [rig.kernel("kernel", [state], [state]) for _ in range(24)]
        submitted.set()
        await kernels[-1]

    rig.run(main())
    order = [rig.streams.operations.index(each) for each in waited]
    begun = [one for before, one in pairwise([-1, *order]) if one > before]
    assert len(order) == 24 and len(begun) <= 3


def test_the_end_of_a_task_is_noticed_where_the_next_one_cannot_be_issued(rigs: Callable[..., Rig]) -> None:
    submitted = threading.Event()

    def after_issue() -> None:
        submitted.wait()
        if rig.streams.issued[-1] == "bad":
            raise OSError("no memory")

    rig = rigs(depth=64)
    rig.streams.after_issue = after_issue

    async def main() -> None:
        rig.kernel("good", [], [])
        rig.kernel("bad", [], [])
        submitted.set()

    rig.run(main())
    assert "no memory" in str(rig.engine.failure) and rig.engine.unsettled == 0
