"""Checks that a trace file is complete and that viewers will show all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moesched.errors import BadInput
from moesched.system.input_file import given_path
from moesched.system.own_loop import interruptible
from moesched.system.plain_text import shown
from moesched.trace.chrome_reader import (
    Event,
    SliceArgs,
    TraceFile,
    decode_trace,
    nanoseconds,
    read_bytes,
)
from moesched.trace.chrome_writer import CRITICAL_PID, microseconds

SHOWN_PER_RULE = 5

_TIMED = frozenset("XsfCibe")


class _Point(NamedTuple):
    """An end of an arrow in a trace: a track, and a time in nanoseconds."""

    pid: int
    tid: int
    time: int

    def __str__(self) -> str:
        return f"{microseconds(self.time)} on track {self.tid}"


class _Task(NamedTuple):
    """A task of the trace.

    Attributes:
        event: the event that shows the task, which viewers call a slice.
        args: the decoded arguments of this event.
        first, last: the first and the last nanosecond of the task, where arrows end and start.
    """

    event: Event
    args: SliceArgs
    first: _Point
    last: _Point

    def __str__(self) -> str:
        return f"{self.event.name} at {bytes(self.event.ts).decode()}"


@interruptible()
def check_trace(path: Path | str) -> list[str]:
    """Return the problems of the trace file at a path, as sentences; an empty list for a valid trace.

    The first few violations of each rule are listed and the others counted.
    """
    path = given_path(path, "a trace")
    try:
        file = decode_trace(read_bytes(path), path)
    except BadInput as error:
        return [str(error)]
    broken = _shortened(_times(file.trace_events))
    return broken or _problems(file)


def _problems(file: TraceFile) -> list[str]:
    """Return the violations of all rules but the rule for the format of times, as sentences."""
    events = file.trace_events
    slices = [event for event in events if event.ph == "X"]
    tasks = [event for event in slices if event.pid != CRITICAL_PID]
    path = [event for event in slices if event.pid == CRITICAL_PID]
    read, unread = _read(tasks)
    numbered = {(task.event.pid, task.args.task): place for place, task in enumerate(read)}
    rules: list[Iterable[str]] = [
        _names(events, slices),
        _overlaps(slices),
        unread,
        _numbers(read),
        _dependencies(read, numbered),
        _flows(events),
        _arrows(events, read, numbered),
        _counts(file, tasks, read),
        _joins(read),
        _critical(path, tasks),
        _counters(events),
    ]
    return [problem for rule in rules for problem in _shortened(rule)]


def _shortened(problems: Iterable[str]) -> list[str]:
    left = iter(problems)
    shown = list(islice(left, SHOWN_PER_RULE))
    others = sum(1 for _ in left)
    return [*shown, f"... and {others} more like the last"] if others else shown


def _times(events: list[Event]) -> Iterator[str]:
    for number, event in enumerate(events):
        if event.ph in _TIMED:
            for field in ("ts", "dur") if event.ph == "X" else ("ts",):
                try:
                    nanoseconds(getattr(event, field))
                except ValueError as error:
                    yield f"event {number} ({event.ph} {event.name}): {field}: {error}"


def _names(events: list[Event], slices: list[Event]) -> Iterator[str]:
    """Yield sentences on tracks without name or sort index, and on tids that are not in the tracks' order of display.

    Args:
        events: all events of the trace.
        slices: the events of tasks.
    """
    metadata = {(event.name, event.pid, event.tid) for event in events if event.ph == "M"}
    for pid in sorted({event.pid for event in slices}):
        if ("process_name", pid, -1) not in metadata:
            yield f"process {pid} has no process_name"
    for pid, tid in sorted({(event.pid, event.tid) for event in slices}):
        for name in ("thread_name", "thread_sort_index"):
            if (name, pid, tid) not in metadata:
                yield f"track {tid} of process {pid} has no {name}"
    order = []
    for event in events:
        if event.ph == "M" and event.name == "thread_sort_index":
            index = _decoded(event).get("sort_index", -1)
            if isinstance(index, int):
                order.append((index, event.tid))
            else:
                yield f"track {event.tid} of process {event.pid}: sort_index is {shown(index)}, not a whole number"
    if [tid for _, tid in sorted(order)] != sorted(tid for _, tid in order):
        yield "tids are not in the order in which their tracks are shown"


def _overlaps(slices: list[Event]) -> Iterator[str]:
    tracks: dict[int, list[tuple[int, int, str]]] = {}
    for event in slices:
        start = nanoseconds(event.ts)
        tracks.setdefault(event.tid, []).append((start, start + nanoseconds(event.dur), event.name))
    for tid, spans in sorted(tracks.items()):
        for (_, end, one), (start, _, other) in pairwise(sorted(spans)):
            if start < end:
                yield f"track {tid}: {other} starts at {microseconds(start)}, before {one} ends at {microseconds(end)}"


def _read(tasks: list[Event]) -> tuple[list[_Task], list[str]]:
    """Decode the events of tasks; return the tasks, and sentences on events that cannot be decoded."""
    decode = msgspec.json.Decoder(SliceArgs).decode
    read, unread = [], []
    for event in tasks:
        try:
            args = decode(event.args)
        except msgspec.DecodeError as error:
            unread.append(f"{event.name} at {bytes(event.ts).decode()}: args: {error}")
            continue
        first = _point(event)
        last = first._replace(time=first.time + nanoseconds(event.dur) - 1)
        read.append(_Task(event, args, first, last))
    return read, unread


def _numbers(tasks: list[_Task]) -> Iterator[str]:
    for (pid, number), count in Counter((task.event.pid, task.args.task) for task in tasks).items():
        if count > 1:
            yield f"task {number} of process {pid} has several slices"


def _dependencies(tasks: list[_Task], numbered: Mapping[tuple[int, int], int]) -> Iterator[str]:
    """Yield sentences on wrong dependencies.

    A dependency is wrong if it is doubled, if the trace lacks the task that is depended on, or if that task ends after
    the dependent one starts.

    Args:
        numbered: index in `tasks` by (pid, number of the task).
    """
    for task in tasks:
        for number, count in Counter(task.args.depends_on).items():
            place = numbered.get((task.event.pid, number))
            if count > 1:
                yield f"{task} depends {count} times on task {number}"
            if place is None:
                yield f"{task} depends on task {number}, which has no slice"
            elif tasks[place].last.time > task.first.time:
                yield f"{task} depends on {tasks[place]}, which has not ended by then"


def _flows(events: list[Event]) -> Iterator[str]:
    """Yield sentences on flows (arrows) without exactly one start and one end, or that viewers would not draw."""
    starts = Counter(event.id for event in events if event.ph == "s")
    ends = Counter(event.id for event in events if event.ph == "f")
    for number in sorted(starts.keys() | ends.keys()):
        if starts[number] != 1 or ends[number] != 1:
            yield f"flow {number} has {starts[number]} starts and {ends[number]} ends, not one of each"
    for event in events:
        if event.ph == "f" and event.bp != "e":
            yield f'flow {event.id}: its end lacks "bp":"e", so that viewers draw no arrow'


def _arrows(
    events: list[Event], tasks: list[_Task], numbered: Mapping[tuple[int, int], int]
) -> Iterator[str]:
    """Yield sentences on arrows that are missing, doubled, or not expected.

    Of the tasks that a task depends on, the last one on each lane should have one arrow to this task.

    Args:
        numbered: index in `tasks` by (pid, number of the task).
    """
    expected: set[tuple[_Point, _Point]] = set()
    for task in tasks:
        places = [numbered.get((task.event.pid, number)) for number in task.args.depends_on]
        last = {
            tasks[place].event.tid: place for place in sorted(each for each in places if each is not None)
        }
        expected |= {(tasks[place].last, task.first) for place in last.values()}
    started = {event.id: _point(event) for event in events if event.ph == "s"}
    found = Counter(
        (started[event.id], _point(event)) for event in events if event.ph == "f" and event.id in started
    )
    for (begin, end), count in found.items():
        if count > 1:
            yield f"{count} flows go from {begin} to {end}"
        if (begin, end) not in expected:
            yield f"the flow from {begin} to {end} is not from the last task on a lane to one that depends on it"
    for begin, end in sorted(expected - found.keys()):
        yield f"no flow goes from {begin} to {end}, which depends on it"


def _point(event: Event) -> _Point:
    return _Point(event.pid, event.tid, nanoseconds(event.ts))


def _counts(file: TraceFile, tasks: list[Event], read: list[_Task]) -> Iterator[str]:
    other = file.other_data
    if len(tasks) != other.tasks:
        yield f"{len(tasks)} slices stand for {other.tasks} tasks"
    named = sum(len(task.args.depends_on) for task in read)
    if named != other.edges:
        yield f"the slices name {named} dependencies, not {other.edges}"
    cancelled = sum(1 for event in file.trace_events if event.ph == "i")
    if cancelled != other.cancelled:
        yield f"{cancelled} instants stand for {other.cancelled} cancelled tasks"


def _joins(tasks: list[_Task]) -> Iterator[str]:
    """Yield a sentence for each join (a task without work): tasks should depend on the tasks before it instead."""
    for task in tasks:
        if task.args.type == "Join":
            yield f"{task} is a join that was not expanded"


def _critical(path: list[Event], tasks: list[Event]) -> Iterator[str]:
    """Yield sentences on events of the critical path that show neither a whole task nor the last part of one.

    An event of the critical path may lack the part in which the task overlaps the path's previous task.

    Args:
        path: the events of the critical path.
        tasks: the events of all tasks.
    """
    spans = Counter((event.name, bytes(event.ts), bytes(event.dur)) for event in tasks)
    for event in path:
        whole = spans[event.name, bytes(event.ts), bytes(event.dur)]
        if not whole and not any(_ends_alike(event, task) for task in tasks if task.name == event.name):
            yield f"critical path: {event.name} at {bytes(event.ts).decode()} is not the slice of a task"
    if tasks and not path:
        yield "the critical path is missing"


def _ends_alike(event: Event, task: Event) -> bool:
    """Test whether an event ends at the same time as a task's event, and starts no earlier than that one."""
    start, since = nanoseconds(event.ts), nanoseconds(task.ts)
    return since <= start and start + nanoseconds(event.dur) == since + nanoseconds(task.dur)


def _counters(events: list[Event]) -> Iterator[str]:
    for event in events:
        if event.ph == "C":
            for name, value in _decoded(event).items():
                if not isinstance(value, int) or value < 0:
                    yield f"{event.name} at {bytes(event.ts).decode()}: {name} is {value!r}, not a number of 0 or more"


def _decoded(event: Event) -> dict[str, Any]:
    """Decode the arguments of an event; empty if they are missing or not a JSON object."""
    try:
        args = msgspec.json.decode(event.args)
    except msgspec.DecodeError:
        return {}
    return args if isinstance(args, dict) else {}
