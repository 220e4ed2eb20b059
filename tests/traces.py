"""Traces for tests: graphs by hand on the virtual clock, and what a file or a recording says."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moesched.drivers.virtual import VirtualDriver
from moesched.engine import Engine
from moesched.errors import TaskFailed
from moesched.models.layout import Page
from moesched.seams import Demand
from moesched.tasks import Block, Collective, Kernel, Lane, PageTransfer
from moesched.trace import (
    About,
    LaneName,
    LastSteps,
    Recorder,
    Recording,
    Slice,
    TaskInfo,
    check_trace,
    read_trace,
    write_trace,
)
from moesched.work import Work

Event = dict[str, Any]

PREDICTED = About(driver="virtual", policy="P", machine="t4", model="m")
MEASURED = About(driver="realtime", policy="P", machine="t4", model="m")


class Free:
    """Costs nothing but the nanoseconds that a task brings with it."""

    def work(self, work: Work) -> Demand:
        return Demand(1e-9, ())


def task(lane: Lane, verb: str, nanoseconds: int = 1, step: int = -1) -> Kernel:
    """A task of known length; its times stand as if it had run alone."""
    work = Work(verb, lane.name, nanoseconds=nanoseconds)
    return Kernel(lane, work, verb, step=step, generated=step, start=0, end=nanoseconds)


def by_hand(graph: str) -> Callable[[Engine], None]:
    """A graph such as `link: fetch 30 writes w; gpu: kernel 20 reads w`, whose blocks have names of one letter.

    A fetch moves a page of weights.
    """

    def submit(engine: Engine) -> None:
        lanes = {lane.name: lane for lane in engine.lanes}
        blocks: dict[str, Block] = {}
        for lane, verb, nanoseconds, *more in (each.split() for each in graph.split(";")):
            given = dict(zip(more[::2], more[1::2], strict=True))
            reads, writes = (
                [blocks.setdefault(name, Block(name)) for name in given.get(how, "")]
                for how in ("reads", "writes")
            )
            make = fetch if verb == "fetch" else task
            engine.submit(make(lanes[lane[:-1]], verb, int(nanoseconds)), reads, writes)

    return submit


def fetch(link: Lane, verb: str, nanoseconds: int) -> PageTransfer:
    """A transfer of a page of weights."""
    work = Work("transfer", link.name, nanoseconds=nanoseconds)
    return PageTransfer(link, work, verb, pages=(Page(0, 0, -1, 0, (), 64),))


def run_graph(
    graph: Callable[[Engine], object], lanes: list[str], discipline: Any = "ready_first", perform: Any = None
) -> Recording:
    """Run what `graph` submits on the virtual clock; it may be asynchronous, and await."""
    engine = Engine([Lane(name, discipline) for name in lanes])
    recorder = Recorder()
    recorder.watch(engine)

    async def main() -> None:
        running = graph(engine)
        if isinstance(running, Coroutine):
            await running

    run_ranks([engine], recorder, main(), perform=perform)
    return recorder.recording()


def run_ranks(
    engines: list[Engine],
    recorder: Recorder | LastSteps,
    *mains: Coroutine[Any, Any, None],
    perform: Any = None,
) -> None:
    """Run one coroutine per rank; a failed task is no error here."""
    driver = VirtualDriver(engines, Free(), perform=perform, observers=[recorder])
    with suppress(TaskFailed):
        driver.run(*mains)


def ranks_that_meet(*nanoseconds: int, exchange: int = 7) -> Recording:
    """Ranks that compute for these times, meet in an all-reduce, and go on."""
    recorder = Recorder()
    engines = [Engine([Lane("gpu"), Lane("network")]) for _ in nanoseconds]

    async def rank(engine: Engine, computes: int) -> None:
        gpu, network = engine.lanes
        hidden = Block("hidden")
        engine.submit(task(gpu, "compute", computes), (), (hidden,))
        work = Work("all_reduce", "network", nanoseconds=exchange)
        engine.collective(Collective(network, work, "all_reduce", signature="sum"), (hidden,), (hidden,))
        engine.submit(task(gpu, "after", 3 if computes == min(nanoseconds) else 1), (hidden,))

    for engine in engines:
        recorder.watch(engine)
    run_ranks(engines, recorder, *map(rank, engines, nanoseconds))
    return recorder.recording()


def tasks_of(recording: Recording) -> list[tuple[Any, ...]]:
    """All that a recording says of its tasks but their times."""
    return sorted(
        (
            each.id, each.lane, each.task.label, each.task.type, each.task.kind, each.step, each.task.nbytes,
            each.task.flops, each.line,
        )
        for each in recording.slices
    )  # fmt: skip


def slice_of(number: int, lane: LaneName, verb: str, start: int, end: int, step: int = 1) -> Slice:
    """A slice of a recording by hand."""
    return Slice(number, lane, TaskInfo(verb, verb, "Kernel", verb, ""), step, start, end)


def timetable(recording: Recording) -> list[tuple[int, str, str, int, int, int]]:
    """The lane, start and end of each task."""
    return sorted(
        (each.id, each.task.label, each.lane.name, each.step, each.start, each.end)
        for each in recording.slices
    )


def edges_of(recording: Recording) -> list[tuple[str, str, int, int]]:
    """All edges, by the labels and steps of their ends."""
    slices = recording.slices
    return sorted(
        (slices[producer].task.label, consumer.task.label, slices[producer].step, consumer.step)
        for consumer, producers in zip(slices, recording.producers, strict=True)
        for producer in producers
    )


def edges_by_id(recording: Recording) -> set[tuple[int, int]]:
    """All edges, by the ids of their ends."""
    slices = recording.slices
    return {
        (slices[producer].id, consumer.id)
        for consumer, producers in zip(slices, recording.producers, strict=True)
        for producer in producers
    }


def arrows_of(recording: Recording) -> set[tuple[int, int]]:
    """The edges that viewers draw, by index: from each lane the last task that another one depends on."""
    return {
        (max(each for each in producers if recording.slices[each].lane == lane), consumer)
        for consumer, producers in enumerate(recording.producers)
        for lane in recording.lanes
        if any(recording.slices[each].lane == lane for each in producers)
    }


def kept(recording: Recording, about: About, folder: Path) -> list[Event]:
    """The events of a recording's trace, which is right and is read back as that recording."""
    path = folder / "kept.json"
    write_trace(path, recording, about)
    assert check_trace(path) == []
    assert read_trace(path).recording == recording
    return events_of(path)


def events_of(path: Path) -> list[Event]:
    """All events of a trace, decoded."""
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


def slices_of(events: list[Event]) -> list[Event]:
    """The slices; those of the critical path come last."""
    return [event for event in events if event["ph"] == "X"]


@contextmanager
def rewritten(path: Path) -> Iterator[list[Event]]:
    """The events of a trace, to change; the rest of the file and the form of its numbers stay."""
    content = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    events: list[Event] = [
        {
            name: value if name in ("ts", "dur") else msgspec.json.decode(value)
            for name, value in event.items()
        }
        for event in msgspec.json.decode(content["traceEvents"], type=list[dict[str, msgspec.Raw]])
    ]
    yield events
    content["traceEvents"] = msgspec.Raw(msgspec.json.encode(events))
    path.write_bytes(msgspec.json.encode(content))


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let the system refuse to write more than this many bytes to one file, to this process and its children."""
    before, writes_none = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    # Python would keep a module's bytecode that was cut off.
    sys.dont_write_bytecode = True
    with pytest.MonkeyPatch.context() as of_children:
        of_children.setenv("PYTHONDONTWRITEBYTECODE", "1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            sys.dont_write_bytecode = writes_none
