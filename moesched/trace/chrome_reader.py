"""Reads trace files: their events, and the recording that they contain."""

from __future__ import annotations

import gzip
import re
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moesched.errors import BadInput
from moesched.steps.pool_counts import Counted
from moesched.system.cells import html_of
from moesched.system.decoding import DECODE_ERRORS, decode_json, reason
from moesched.system.input_file import given_path, read_input
from moesched.system.own_loop import interruptible
from moesched.system.plain_text import shown
from moesched.trace.chrome_writer import (
    CANCELLED,
    CRITICAL_PID,
    FIRST_RANK_PID,
    FORMAT,
    REQUEST,
    SIDE_BY_SIDE,
)
from moesched.trace.recording import (
    About,
    Cancelled,
    Clock,
    LaneName,
    MemorySample,
    PoolSample,
    Recording,
    RequestSpan,
    Roof,
    Slice,
    TaskInfo,
    WorkKey,
)
from moesched.work import Demand

MOST_BYTES = 1_000_000_000
"""Largest number of bytes of a decompressed trace; a trace of 500,000 tasks has about half of that."""

MOST_RANKS = 1024

_GZIP_MAGIC = b"\x1f\x8b"
_THREE_DECIMALS = re.compile(rb"\d{1,15}\.\d{3}")
_NOTHING = msgspec.Raw(b"")


class Event(msgspec.Struct, gc=False):
    """An event of a trace file; `ts` (start), `dur` (duration) and `args` are JSON that is not decoded."""

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


class SliceArgs(
    TaskInfo,
    frozen=True,
    gc=False,
    kw_only=True,
    rename={"dispatch": "dispatch_ns", "launching": "launching_ns", "submit_delay": "submit_delay_ns"},
):
    """The arguments of the event that shows a task in a trace file.

    The arguments are fields of `TaskInfo` and of `Slice`, and the numbers of the tasks that the task depends on.
    """

    task: int
    step: int = -1
    depends_on: tuple[int, ...] = ()
    state: str = "done"
    ticket: int = -1
    line: str = ""
    awaited_at: int = -1
    dispatch: int = 0
    launching: int = 0
    submit_delay: int = -1
    experts: dict[int, int] | None = None


_OF_TASK = len(TaskInfo.__struct_fields__)


class CostEntry(NamedTuple):
    """A task's cost as a list in a trace file: the fields of `WorkKey`, followed by the fields of `Demand`."""

    kind: str
    resource: str
    flops: float
    nbytes: float
    seconds: float
    shares: tuple[tuple[str, float], ...]
    work_class: str
    slowed: tuple[tuple[str, float], ...]
    lead: float
    fixed: float


class PredictionEntry(NamedTuple):
    """A task's predicted time as a list in a trace file: the fields of `WorkKey`, followed by the seconds."""

    kind: str
    resource: str
    flops: float
    nbytes: float
    seconds: float


class AboutData(msgspec.Struct, kw_only=True):
    """The metadata of a trace file that make an `About`; a file with several runs has none of them."""

    driver: str = ""
    policy: str = ""
    model: str = ""
    machine: str = ""
    plan: dict[str, Any] = {}
    clocks: dict[str, Clock] = {}
    roofs: dict[str, Roof] = {}
    costs_measured: bool = False
    tokens_per_second: float = 0.0


class OtherData(AboutData, kw_only=True):
    """The metadata of a trace file, its key `otherData`.

    Attributes:
        format: name and version of the file's format.
        tasks, edges, joins, cancelled: numbers of tasks, of dependencies, of joins (graph nodes without work) that
            dependencies replace, and of cancelled tasks.
        trimmed: whether earlier steps are left out.
    """

    format: str
    tasks: int
    edges: int
    joins: int = 0
    cancelled: int = 0
    trimmed: bool = False
    costs: list[CostEntry] = []
    predictions: list[PredictionEntry] = []


class TraceFile(msgspec.Struct):
    """The decoded JSON of a trace file, before any check that its events are consistent."""

    trace_events: list[Event] = msgspec.field(name="traceEvents")
    other_data: OtherData = msgspec.field(name="otherData")


class NameArgs(msgspec.Struct):
    """The arguments of the event that names a process or a lane.

    Attributes:
        in_order: whether the lane runs tasks in order of submission.
    """

    name: str
    in_order: bool = False


class _CounterArgs(msgspec.Struct, rename={"reserved": "reserved_bytes", "pages": "page_bytes"}):
    reserved: int
    pages: int


class _PoolArgs(msgspec.Struct):
    """The arguments of an event with a pool's counts, in the order of the fields of `Counted`."""

    fetched: int
    hits: int
    misses: int
    wasted: int
    cancelled: int


class Trace(NamedTuple):
    """A recording that was read from a file, and its metadata."""

    recording: Recording
    about: About

    def __repr__(self) -> str:
        about = self.about
        return (
            f"<Trace: {about.policy or 'run'} on {about.model or 'a graph'}, {about.figures} on {about.machine}, "
            f"{len(self.recording.slices):,} tasks>"
        )

    def _repr_html_(self) -> str:
        return html_of(self)


@interruptible()
def read_trace(path: Path | str) -> Trace:
    """Read a trace file; returns its recording and metadata.

    Raises:
        BadInput: the file cannot be read, was not written by moesched, or is damaged.
    """
    path = given_path(path, "a trace")
    file = decode_trace(read_bytes(path), path)
    if file.other_data.format == SIDE_BY_SIDE:
        raise BadInput(f"{path} shows several runs side by side: name the trace of one of them")
    try:
        return trace_of(file)
    except (LookupError, *DECODE_ERRORS) as error:
        raise BadInput(f"{path}: the trace is damaged: {reason(error)}; record it again") from error


def read_bytes(path: Path, remedy: str = "name a file that --trace wrote") -> bytes:
    """Return the bytes of a trace file, decompressed if the file is gzipped.

    Args:
        remedy: advice for a file that cannot be read.

    Raises:
        BadInput: the file cannot be read or decompressed.
    """
    data = read_input(path, "run", MOST_BYTES, remedy=remedy)
    if not data.startswith(_GZIP_MAGIC):
        return data
    try:
        unpacked = gzip.GzipFile(fileobj=BytesIO(data)).read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"cannot read run {path}: {error}; {remedy}") from error
    if len(unpacked) > MOST_BYTES:
        raise BadInput(f"run {path} unpacks to more than {MOST_BYTES:,} bytes; {remedy}")
    return unpacked


def decode_trace(data: bytes, path: Path) -> TraceFile:
    """Decode the JSON of a trace file, and check its format.

    Args:
        data: the file's bytes.
        path: the file, for messages.

    Raises:
        BadInput: the bytes are not JSON, or not a trace that this version of moesched writes.
    """
    where = f"{path} is not a trace of moesched"
    try:
        file = decode_json(data, TraceFile, where, "write one with --trace", most=MOST_BYTES)
    except BadInput:
        if _is_report(data):
            raise BadInput(
                f"{path} is a report, and not a trace: name the file that --trace wrote of the run"
            ) from None
        raise
    if file.other_data.format not in (FORMAT, SIDE_BY_SIDE):
        raise BadInput(
            f"{path}: its format is {shown(file.other_data.format)}, not {FORMAT!r}: record it again"
        )
    return file


class _Report(msgspec.Struct):
    """The keys that all reports of moesched have, and traces have not."""

    model: str
    machine: str


def _is_report(data: bytes) -> bool:
    try:
        msgspec.json.decode(data, type=_Report)
    except DECODE_ERRORS:
        return False
    return True


def nanoseconds(text: msgspec.Raw) -> int:
    """Convert a time in a trace file, microseconds with three decimals, to nanoseconds.

    Raises:
        ValueError: the text is not a number with exactly three decimals.
    """
    digits = bytes(text)
    if not _THREE_DECIMALS.fullmatch(digits):
        raise ValueError(
            f"time {digits.decode(errors='replace') or 'missing'} has not exactly three decimals"
        )
    return int(digits.replace(b".", b""))


def trace_of(file: TraceFile) -> Trace:
    """Convert a decoded trace file to a recording with its metadata.

    Raises:
        LookupError: the file is damaged.
        ValueError: the file is damaged.
    """
    events = file.trace_events
    named = [
        (event, msgspec.json.decode(event.args, type=NameArgs))
        for event in events
        if event.ph == "M" and event.name == "thread_name" and event.pid != CRITICAL_PID
    ]
    lanes = {event.tid: LaneName(_rank(event), args.name) for event, args in named}
    tasks = [event for event in events if event.ph == "X" and event.pid != CRITICAL_PID]
    other = file.other_data
    slices, depends_on = _slices(tasks, lanes)
    recording = Recording(
        [lanes[tid] for tid in sorted(lanes)],
        slices,
        _producers(slices, depends_on),
        _memory(events),
        other.trimmed,
        other.joins,
        frozenset(lanes[event.tid] for event, args in named if args.in_order),
        pools=_pools(events),
        costs={WorkKey(*each[:4]): Demand(*each[4:]) for each in other.costs},
        predictions={WorkKey(*each[:4]): each.seconds for each in other.predictions},
        cancelled=_cancelled(events, lanes),
        requests=[
            msgspec.json.decode(event.args, type=RequestSpan)
            for event in events
            if event.ph == "b" and event.cat == REQUEST and event.args
        ],
    )
    if slices and recording.end == recording.start:
        raise ValueError("all of its tasks last nothing")
    about = msgspec.convert(other, About, from_attributes=True)
    return Trace(recording, about)


def _rank(event: Event) -> int:
    rank = event.pid - FIRST_RANK_PID
    if not 0 <= rank < MOST_RANKS:
        raise ValueError(f"process {event.pid} is none of a run's, which are {FIRST_RANK_PID} and the next")
    return rank


def _slices(tasks: list[Event], lanes: dict[int, LaneName]) -> tuple[list[Slice], list[tuple[int, ...]]]:
    """Return a slice (a task that ran) for each event, and for each slice the numbers of the tasks that it depends on.

    Args:
        tasks: events of tasks.
        lanes: the lane of each track, by tid.
    """
    decode = msgspec.json.Decoder(SliceArgs).decode
    known: dict[tuple[object, ...], TaskInfo] = {}
    slices, depends_on = [], []
    for event in tasks:
        start = nanoseconds(event.ts)
        args = msgspec.structs.astuple(decode(event.args))
        description = (event.name, event.cat, *args[2:_OF_TASK])
        task = known.get(description)
        if task is None:
            task = known[description] = TaskInfo(*description)
        number, step, numbers, *others = args[_OF_TASK:]
        end = start + nanoseconds(event.dur)
        slices.append(Slice(number, lanes[event.tid], task, step, start, end, *others))
        depends_on.append(numbers)
    return slices, depends_on


def _cancelled(events: list[Event], lanes: dict[int, LaneName]) -> list[Cancelled]:
    cancelled = []
    for event in events:
        if event.ph == "i":
            args = msgspec.json.decode(event.args, type=SliceArgs)
            description = msgspec.structs.astuple(args)[2:_OF_TASK]
            task = TaskInfo(event.name.removeprefix(CANCELLED), event.cat, *description)
            time = nanoseconds(event.ts)
            cancelled.append(Cancelled(args.task, lanes[event.tid], task, args.step, time, args.line))
    return cancelled


def _producers(slices: list[Slice], depends_on: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return, for each slice (a task that ran), the indices in `slices` of the tasks that it depends on.

    Args:
        depends_on: for each slice, the numbers of these tasks; each rank numbers its own tasks.

    Raises:
        ValueError: a number belongs to no task or to several, or is not smaller than the dependent task's number.
    """
    ranks: dict[int, dict[int, int]] = {}
    for index, each in enumerate(slices):
        if ranks.setdefault(each.lane.rank, {}).setdefault(each.id, index) != index:
            raise ValueError(f"task {each.id} of rank {each.lane.rank} has several slices")
    producers = []
    for each, numbers in zip(slices, depends_on, strict=True):
        indices = ranks[each.lane.rank]
        try:
            producers.append(tuple([indices[number] for number in numbers]))
        except KeyError as missing:
            raise ValueError(f"task {each.id} depends on task {missing}, which has no slice") from None
        if numbers and max(numbers) >= each.id:
            raise ValueError(
                f"task {each.id} depends on task {max(numbers)}, which was not submitted before it"
            )
    return producers


def _memory(events: list[Event]) -> list[MemorySample]:
    samples = []
    for event in events:
        if event.ph == "C" and not event.name.startswith("pool "):
            args = msgspec.json.decode(event.args, type=_CounterArgs)
            name = event.name.removeprefix("memory ")
            samples.append(
                MemorySample(
                    event.pid - FIRST_RANK_PID, name, nanoseconds(event.ts), args.reserved, args.pages
                )
            )
    return samples


def _pools(events: list[Event]) -> list[PoolSample]:
    return [
        PoolSample(
            event.pid - FIRST_RANK_PID,
            event.name.removeprefix("pool "),
            nanoseconds(event.ts),
            Counted(*msgspec.structs.astuple(msgspec.json.decode(event.args, type=_PoolArgs))),
        )
        for event in events
        if event.ph == "C" and event.name.startswith("pool ")
    ]
