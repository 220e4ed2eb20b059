"""Checks that a trace file is complete and that viewers will show all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec

from moesched.errors import BadInput
from moesched.trace.chrome_reader import (
    Event,
    SliceArgs,
    TraceFile,
    Track,
    decode_trace,
    nanoseconds,
    read_bytes,
    tracks_of,
)
from moesched.trace.chrome_writer import CRITICAL_PID, microseconds

SHOWN_PER_RULE = 5

_TIMED = frozenset("XsfCi")


def check_trace(path: Path | str) -> list[str]:
    """Return the problems of a trace in words; an empty list for a valid one.

    The first few violations of each rule are listed and the others counted.
    """
    path = Path(path)
    try:
        file = decode_trace(read_bytes(path), path)
    except BadInput as error:
        return [str(error)]
    broken = _shortened(_times(file.trace_events))
    return broken or _problems(file)


def _problems(file: TraceFile) -> list[str]:
    """Apply all rules except those of times, which the others rely on."""
    events = file.trace_events
    slices = [event for event in events if event.ph == "X"]
    tasks = [event for event in slices if event.pid != CRITICAL_PID]
    path = [event for event in slices if event.pid == CRITICAL_PID]
    tracks = tracks_of(slices)
    rules: list[Iterable[str]] = [
        _names(events, slices),
        _overlaps(slices, tracks),
        _flows(events, slices, tracks),
        _counts(file, tasks),
        _joins(events, tasks),
        _args(tasks),
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
    """Every track has a name and a sort index, and tids are in the order of sort indices."""
    metadata = {(event.name, event.pid, event.tid) for event in events if event.ph == "M"}
    for pid in sorted({event.pid for event in slices}):
        if ("process_name", pid, -1) not in metadata:
            yield f"process {pid} has no process_name"
    for pid, tid in sorted({(event.pid, event.tid) for event in slices}):
        for name in ("thread_name", "thread_sort_index"):
            if (name, pid, tid) not in metadata:
                yield f"track {tid} of process {pid} has no {name}"
    order = [
        (_decoded(event).get("sort_index", -1), event.tid)
        for event in events
        if event.ph == "M" and event.name == "thread_sort_index"
    ]
    if [tid for _, tid in sorted(order)] != sorted(tid for _, tid in order):
        yield "tids are not in the order in which their tracks are shown"


def _overlaps(slices: list[Event], tracks: dict[int, Track]) -> Iterator[str]:
    for tid, track in sorted(tracks.items()):
        for (_, end, first), (start, _, second) in pairwise(track.spans):
            if start < end:
                one, other = slices[first].name, slices[second].name
                yield f"track {tid}: {other} starts at {microseconds(start)}, before {one} ends at {microseconds(end)}"


def _flows(events: list[Event], slices: list[Event], tracks: dict[int, Track]) -> Iterator[str]:
    """Every flow has a start and an end, both within slices, and does not end before it starts."""
    starts = Counter(event.id for event in events if event.ph == "s")
    ends = Counter(event.id for event in events if event.ph == "f")
    for number in sorted(starts.keys() | ends.keys()):
        if starts[number] != 1 or ends[number] != 1:
            yield f"flow {number} has {starts[number]} starts and {ends[number]} ends, not one of each"
    started = {event.id: event for event in events if event.ph == "s"}
    for event in events:
        if event.ph in "sf":
            track = tracks.get(event.tid)
            time = nanoseconds(event.ts)
            index = -1 if track is None else track.at(time)
            if index < 0 or slices[index].pid != event.pid:
                end = "start" if event.ph == "s" else "end"
                yield f"flow {event.id}: its {end} at {bytes(event.ts).decode()} on track {event.tid} is in no slice"
            if event.ph == "f":
                if event.bp != "e":
                    yield f'flow {event.id}: its end lacks "bp":"e", so that viewers draw no arrow'
                source = started.get(event.id)
                if source is not None and nanoseconds(source.ts) > time:
                    yield f"flow {event.id} ends before it starts"


def _counts(file: TraceFile, tasks: list[Event]) -> Iterator[str]:
    other = file.other_data
    flows = sum(1 for event in file.trace_events if event.ph == "s")
    if len(tasks) != other.tasks:
        yield f"{len(tasks)} slices stand for {other.tasks} tasks"
    if flows != other.edges:
        yield f"{flows} flows stand for {other.edges} edges"
    cancelled = sum(1 for event in file.trace_events if event.ph == "i")
    if cancelled != other.cancelled:
        yield f"{cancelled} instants stand for {other.cancelled} cancelled tasks"


def _joins(events: list[Event], tasks: list[Event]) -> Iterator[str]:
    """Joins take no time, so they are expanded into edges between real tasks."""
    for event in tasks:
        if _decoded(event).get("type") == "Join":
            yield f"{event.name} at {bytes(event.ts).decode()} is a join that was not expanded"
    pairs: Counter[tuple[int, bytes, int, bytes]] = Counter()
    started = {event.id: event for event in events if event.ph == "s"}
    for event in events:
        if event.ph == "f" and event.id in started:
            source = started[event.id]
            pairs[source.tid, bytes(source.ts), event.tid, bytes(event.ts)] += 1
    for (from_tid, begin, to_tid, end), count in pairs.items():
        if count > 1:
            where = f"from {begin.decode()} on track {from_tid} to {end.decode()} on track {to_tid}"
            yield f"{count} flows for one edge {where}"


def _args(tasks: list[Event]) -> Iterator[str]:
    decode = msgspec.json.Decoder(SliceArgs).decode
    seen: set[tuple[int, int]] = set()
    for event in tasks:
        try:
            task = decode(event.args).task
        except msgspec.DecodeError as error:
            yield f"{event.name} at {bytes(event.ts).decode()}: args: {error}"
            continue
        if (event.pid, task) in seen:
            yield f"task {task} of process {event.pid} has several slices"
        seen.add((event.pid, task))


def _critical(path: list[Event], tasks: list[Event]) -> Iterator[str]:
    """The critical path consists of tasks' slices, each whole or without its overlap with the previous one."""
    spans = Counter((event.name, bytes(event.ts), bytes(event.dur)) for event in tasks)
    for event in path:
        whole = spans[event.name, bytes(event.ts), bytes(event.dur)]
        if not whole and not any(_ends_alike(event, task) for task in tasks if task.name == event.name):
            yield f"critical path: {event.name} at {bytes(event.ts).decode()} is not the slice of a task"
    if tasks and not path:
        yield "the critical path is missing"


def _ends_alike(event: Event, task: Event) -> bool:
    """Whether an event is the last part of a task's slice, or all of it."""
    start, since = nanoseconds(event.ts), nanoseconds(task.ts)
    return since <= start and start + nanoseconds(event.dur) == since + nanoseconds(task.dur)


def _counters(events: list[Event]) -> Iterator[str]:
    for event in events:
        if event.ph == "C":
            for name, value in _decoded(event).items():
                if not isinstance(value, int) or value < 0:
                    yield f"{event.name} at {bytes(event.ts).decode()}: {name} is {value!r}, not a number of 0 or more"


def _decoded(event: Event) -> dict[str, Any]:
    """Decode the args of an event; empty if they are missing or not an object."""
    try:
        args = msgspec.json.decode(event.args)
    except msgspec.DecodeError:
        return {}
    return args if isinstance(args, dict) else {}
