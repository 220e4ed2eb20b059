"""Reads traces back: the events as they stand in the file, and the recording that they show."""

from __future__ import annotations

import gzip
import re
import zlib
from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moesched.errors import BadInput
from moesched.trace.chrome_writer import CRITICAL_PID, FIRST_RANK_PID, FORMAT, SIDE_BY_SIDE
from moesched.trace.recording import About, Clock, LaneName, MemorySample, Recording, Slice

_GZIP_MAGIC = b"\x1f\x8b"
_THREE_DECIMALS = re.compile(rb"\d+\.\d{3}")
_NOTHING = msgspec.Raw(b"")


class Event(msgspec.Struct, gc=False):
    """One event as it stands in the file; `ts`, `dur` and `args` are kept as text."""

    ph: str
    name: str = ""
    pid: int = -1
    tid: int = -1
    ts: msgspec.Raw = _NOTHING
    dur: msgspec.Raw = _NOTHING
    id: int = -1
    bp: str = ""
    cat: str = ""
    args: msgspec.Raw = _NOTHING


class SliceArgs(msgspec.Struct, gc=False, rename={"nbytes": "bytes"}):
    """The args of a task's slice."""

    task: int
    step: int = -1
    layer: int = -1
    micro_batch: int = -1
    expert: int = -1
    type: str = ""
    kind: str = ""
    resource: str = ""
    pages: int = 0
    nbytes: float = 0.0
    flops: float = 0.0
    state: str = "done"
    ticket: int = -1
    line: str = ""
    link_class: int = 0
    awaited_at: int = -1
    dispatch: int = 0
    thought: int = -1


class OtherData(msgspec.Struct):
    """What a trace says of itself."""

    format: str
    tasks: int
    edges: int
    driver: str = ""
    joins: int = 0
    trimmed: bool = False
    policy: str = ""
    model: str = ""
    machine: str = ""
    plan: dict[str, Any] = {}
    clocks: dict[str, Clock] = {}


class TraceFile(msgspec.Struct):
    """A trace file, decoded and otherwise unchecked."""

    trace_events: list[Event] = msgspec.field(name="traceEvents")
    other_data: OtherData = msgspec.field(name="otherData")


class _NameArgs(msgspec.Struct):
    name: str
    in_order: bool = False


class _CounterArgs(msgspec.Struct):
    reserved: int
    pages: int


class Trace(NamedTuple):
    """A trace read back."""

    recording: Recording
    about: About


def read_trace(path: Path | str) -> Trace:
    """The recording that a trace shows.

    Raises:
        BadInput: the file cannot be read, or is no trace of ours, or is damaged.
    """
    path = Path(path)
    file = decode_trace(read_bytes(path), path)
    if file.other_data.format == SIDE_BY_SIDE:
        raise BadInput(f"{path} shows several runs side by side: name the trace of one of them")
    try:
        return trace_of(file)
    except (msgspec.DecodeError, LookupError, ValueError) as error:
        raise BadInput(f"{path}: the trace is damaged: {error}: record it again") from error


def read_bytes(path: Path) -> bytes:
    """A file's bytes, unpacked where they are gzipped.

    Raises:
        BadInput: it cannot be read or unpacked.
    """
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"cannot read {path}: {reason}: name a file that --trace or --report wrote") from error


def decode_trace(data: bytes, path: Path) -> TraceFile:
    """The events of a trace file.

    Raises:
        BadInput: the bytes are no JSON, or neither a trace that moesched wrote nor several of them side by side.
    """
    try:
        file = msgspec.json.decode(data, type=TraceFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is no trace of moesched: {error}: write one with --trace") from error
    if file.other_data.format not in (FORMAT, SIDE_BY_SIDE):
        raise BadInput(f"{path}: its format is {file.other_data.format!r}, not {FORMAT!r}: record it again")
    return file


def nanoseconds(text: msgspec.Raw) -> int:
    """A time of the file in nanoseconds, exactly.

    Raises:
        ValueError: it is no number with three decimals.
    """
    digits = bytes(text)
    if not _THREE_DECIMALS.fullmatch(digits):
        raise ValueError(
            f"time {digits.decode(errors='replace') or 'missing'} has not exactly three decimals"
        )
    return int(digits.replace(b".", b""))


class Track:
    """The slices of one track in order of their starts, to find the one that lies at a time."""

    def __init__(self, spans: list[tuple[int, int, int]]) -> None:
        self.spans = sorted(spans)
        self._starts = [start for start, _, _ in self.spans]

    def at(self, time: int) -> int:
        """The index of the slice at a time, -1 where there is none; a slice holds its start but not its end."""
        place = bisect_right(self._starts, time) - 1
        if place < 0 or time >= self.spans[place][1]:
            return -1
        return self.spans[place][2]


def tracks_of(slices: list[Event]) -> dict[int, Track]:
    """Tracks by their tids; a slice's index is its place in `slices`."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for index, event in enumerate(slices):
        start = nanoseconds(event.ts)
        spans.setdefault(event.tid, []).append((start, start + nanoseconds(event.dur), index))
    return {tid: Track(each) for tid, each in spans.items()}


def trace_of(file: TraceFile) -> Trace:
    """The recording that a decoded file shows; raises LookupError or ValueError where it is damaged."""
    events = file.trace_events
    named = [
        (event, msgspec.json.decode(event.args, type=_NameArgs))
        for event in events
        if event.ph == "M" and event.name == "thread_name" and event.pid != CRITICAL_PID
    ]
    lanes = {event.tid: LaneName(event.pid - FIRST_RANK_PID, args.name) for event, args in named}
    tasks = [event for event in events if event.ph == "X" and event.pid != CRITICAL_PID]
    other = file.other_data
    recording = Recording(
        [lanes[tid] for tid in sorted(lanes)],
        _slices(tasks, lanes),
        _producers(tasks, events),
        _memory(events),
        other.trimmed,
        other.joins,
        frozenset(lanes[event.tid] for event, args in named if args.in_order),
    )
    about = msgspec.convert(other, About, from_attributes=True)
    return Trace(recording, about)


def _slices(tasks: list[Event], lanes: dict[int, LaneName]) -> list[Slice]:
    decode = msgspec.json.Decoder(SliceArgs).decode
    slices = []
    for event in tasks:
        start = nanoseconds(event.ts)
        args = decode(event.args)
        slices.append(
            Slice(
                args.task,
                lanes[event.tid],
                event.name,
                event.cat,
                args.type,
                args.kind,
                args.resource,
                args.step,
                args.layer,
                args.micro_batch,
                args.expert,
                start,
                start + nanoseconds(event.dur),
                args.flops,
                args.nbytes,
                args.pages,
                args.ticket,
                args.state,
                args.line,
                args.link_class,
                args.awaited_at,
                args.dispatch,
                args.thought,
            )
        )
    return slices


def _producers(tasks: list[Event], events: list[Event]) -> list[tuple[int, ...]]:
    tracks = tracks_of(tasks)
    sources = {event.id: event for event in events if event.ph == "s"}
    producers: list[list[int]] = [[] for _ in tasks]
    for event in events:
        if event.ph == "f":
            source = sources[event.id]
            consumer = tracks[event.tid].at(nanoseconds(event.ts))
            producer = tracks[source.tid].at(nanoseconds(source.ts))
            if consumer < 0 or producer < 0:
                raise ValueError(f"flow {event.id} has an end outside all slices")
            producers[consumer].append(producer)
    return [tuple(each) for each in producers]


def _memory(events: list[Event]) -> list[MemorySample]:
    samples = []
    for event in events:
        if event.ph == "C":
            args = msgspec.json.decode(event.args, type=_CounterArgs)
            name = event.name.removeprefix("memory ")
            samples.append(
                MemorySample(
                    event.pid - FIRST_RANK_PID, name, nanoseconds(event.ts), args.reserved, args.pages
                )
            )
    return samples
