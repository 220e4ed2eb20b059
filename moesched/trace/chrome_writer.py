"""Writes a recording as Chrome Trace Event JSON, which ui.perfetto.dev and vizviewer show.

Each lane is a track, each rank a process, and memories are counters. A slice is a task that ran; it lists all tasks
that the task depends on, and viewers draw arrows from some of these. The critical path has a track of its own, since
viewers show arrows only for slices that the user selects. Times are microseconds with exactly three decimals: with
anything else, viewers leave out slices that touch each other. A file may hold several runs for comparison; then each
rank of each run is a process of its own.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from moesched.system.whole_file import whole_file
from moesched.trace.critical import critical_path
from moesched.trace.recording import About, LaneName, Recording, TaskInfo
from moesched.trace.summary import summarize

FORMAT = "moesched trace 7"
SIDE_BY_SIDE = "moesched traces side by side 3"
CRITICAL_PATH = "critical path"
REQUEST = "request"
"""The category of a request's spans."""
CANCELLED = "cancelled "
CRITICAL_PID = 1
FIRST_RANK_PID = 2
FIRST_LANE_TID = 2

_EVENTS_PER_WRITE = 10_000


class _Shown(NamedTuple):
    """A run, and the numbers of its tracks in the trace file.

    Attributes:
        title: prefix of the names of the run's tracks; empty for a single run.
        shift: nanoseconds that are added to all times.
        pid: pid of the run's first rank.
        critical_tid: tid of the run's critical path.
        lane_tid: tid of the run's first lane.
        flow: number of arrows of the runs before this one.
    """

    recording: Recording
    about: About
    title: str
    shift: int
    pid: int
    critical_tid: int
    lane_tid: int
    flow: int

    @property
    def tracks(self) -> dict[LaneName, str]:
        """The text `"pid":…,"tid":…` in the JSON of each event of a lane, by lane."""
        return {
            lane: f'"pid":{self.pid + lane.rank},"tid":{self.lane_tid + index}'
            for index, lane in enumerate(self.recording.lanes)
        }


class TitledRun(NamedTuple):
    """A recorded run, with a title that distinguishes it from other runs in one trace file."""

    title: str
    recording: Recording
    about: About


def write_trace(path: Path | str, recording: Recording, about: About) -> None:
    """Write a recording, and its metadata `about`, as a trace file, gzipped if the name ends in .gz.

    Raises:
        BadInput: the file cannot be written; nothing is left of it.
    """
    shown = _Shown(recording, about, "", 0, FIRST_RANK_PID, 1, FIRST_LANE_TID, 0)
    costs = [[*work, *demand] for work, demand in recording.costs.items()]
    other = {
        "format": FORMAT,
        "figures": about.figures,
        **msgspec.to_builtins(about),
        "costs": costs,
        "predictions": [[*work, seconds] for work, seconds in recording.predictions.items()],
    }
    _write_file(Path(path), other, [shown])


def write_side_by_side(path: Path | str, runs: Sequence[TitledRun]) -> None:
    """Write several runs to one trace file, each as processes of its own, with times shifted for comparison.

    The first decode step that all runs have starts at the same time in each; without one, the first step that all have.

    Raises:
        BadInput: the file cannot be written; nothing is left of it.
    """
    shown = []
    pid, lane_tid, flow = FIRST_RANK_PID, 1 + len(runs), 0
    for number, (run, shift) in enumerate(zip(runs, common_shifts(runs), strict=True)):
        recording = run.recording
        shown.append(_Shown(recording, run.about, run.title, shift, pid, 1 + number, lane_tid, flow))
        pid += 1 + max((lane.rank for lane in recording.lanes), default=0)
        lane_tid += len(recording.lanes)
        flow += recording.edges
    other = {"format": SIDE_BY_SIDE, "runs": [run.title for run in runs]}
    _write_file(Path(path), other, shown)


def common_shifts(runs: Sequence[TitledRun]) -> list[int]:
    """Return nanoseconds to add to each run's times, so that a step starts at the same time in all runs.

    The step is the first decode step that all runs have; without one, the first step that all have. If a run's earlier
    steps were dropped from its recording, the first recorded step may be incomplete and is ignored. Without any common
    step, all shifts are 0.
    """
    starts = []
    for run in runs:
        steps = summarize(run.recording).steps
        kept = steps[1:] if run.recording.trimmed else steps
        starts.append({each.step: round(each.start * 1e9) for each in kept})
    common = set.intersection(*(set(each) for each in starts))
    if not common:
        return [0] * len(runs)
    step = min((each for each in common if each > 0), default=min(common))
    latest = max(each[step] for each in starts)
    return [latest - each[step] for each in starts]


def _write_file(path: Path, other: dict[str, Any], runs: Sequence[_Shown]) -> None:
    recordings = [run.recording for run in runs]
    other |= {
        "tasks": sum(len(each.slices) for each in recordings),
        "edges": sum(each.edges for each in recordings),
        "joins": sum(each.joins for each in recordings),
        "cancelled": sum(len(each.cancelled) for each in recordings),
        "trimmed": any(each.trimmed for each in recordings),
    }
    with whole_file(path, "trace") as file:
        if path.name.endswith(".gz"):
            with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
                _write(packed, other, runs)
        else:
            _write(file, other, runs)


def microseconds(nanoseconds: int) -> str:
    """Format nanoseconds as microseconds with exactly three decimals, such as "12.034"."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _write(file: BinaryIO | gzip.GzipFile, other: dict[str, Any], runs: Sequence[_Shown]) -> None:
    file.write(b'{"displayTimeUnit":"ns","otherData":%b,"traceEvents":[\n' % msgspec.json.encode(other))
    events = _events(runs)
    separator = ""
    while batch := list(islice(events, _EVENTS_PER_WRITE)):
        file.write((separator + ",\n".join(batch)).encode())
        separator = ",\n"
    file.write(b"\n]}\n")


def _events(runs: Sequence[_Shown]) -> Iterator[str]:
    figures = dict.fromkeys(run.about.figures for run in runs)
    yield from _process(CRITICAL_PID, f"{CRITICAL_PATH}, {' and '.join(figures)}")
    for run in runs:
        yield from _thread(CRITICAL_PID, run.critical_tid, f"{CRITICAL_PATH} {run.title}".rstrip())
    for run in runs:
        yield from _names(run)
        yield from _slices(run)
        yield from _cancelled(run)
        yield from _flows(run)
        yield from _critical(run)
        yield from _counters(run)
        yield from _requests(run)


def _names(run: _Shown) -> Iterator[str]:
    recording, about = run.recording, run.about
    what = " on ".join(filter(None, (about.policy, about.machine)))
    for rank in sorted({lane.rank for lane in recording.lanes}):
        title = f"rank {rank}: {what}" if what else f"rank {rank}"
        if run.title:
            title = f"{run.title}, {title}"
        yield from _process(run.pid + rank, f"{title}, {about.figures}")
    for index, lane in enumerate(recording.lanes):
        in_order = {"in_order": True} if lane in recording.in_order else {}
        yield from _thread(run.pid + lane.rank, run.lane_tid + index, lane.name, **in_order)


def _process(pid: int, name: str) -> Iterator[str]:
    yield _metadata("process_name", pid, 0, name=name)
    yield _metadata("process_sort_index", pid, 0, sort_index=pid)


def _thread(pid: int, tid: int, name: str, **more: bool) -> Iterator[str]:
    yield _metadata("thread_name", pid, tid, name=name, **more)
    yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _metadata(event: str, pid: int, tid: int, **args: str | int) -> str:
    thread = f'"tid":{tid},' if tid else ""
    return (
        f'{{"ph":"M","name":"{event}","pid":{pid},{thread}"args":{json.dumps(args, separators=(",", ":"))}}}'
    )


def _slices(run: _Shown) -> Iterator[str]:
    tracks, shift, slices = run.tracks, run.shift, run.recording.slices
    known: dict[tuple[int, LaneName], tuple[str, str]] = {}
    lines: dict[str, str] = {"": ""}
    numbers = [str(each.id) for each in slices]
    for each, producers in zip(slices, run.recording.producers, strict=True):
        start, end = each.start + shift, each.end + shift
        task, line = each.task, each.line
        nbytes, flops = task.nbytes, task.flops
        key = (id(task), each.lane)
        parts = known.get(key)
        if parts is None:
            parts = known[key] = (_head(task, tracks[each.lane]), _description(task))
        at = lines.get(line)
        if at is None:
            at = lines[line] = f',"line":{json.dumps(line)}'
        took = end - start
        rates = f',"GB/s":{nbytes / took:.4g}' if nbytes and took else ""
        if flops and took:
            rates += f',"GFLOP/s":{flops / took:.4g}'
        if each.state != "done" or each.ticket >= 0:
            rates += f',"state":"{each.state}","ticket":{each.ticket}'
        if each.awaited_at >= 0:
            rates += f',"awaited_at":{each.awaited_at}'
        if each.dispatch:
            rates += f',"dispatch_ns":{each.dispatch}'
        if each.launching:
            rates += f',"launching_ns":{each.launching}'
        if each.submit_delay >= 0:
            rates += f',"submit_delay_ns":{each.submit_delay}'
        if each.experts is not None:
            rates += f',"experts":{_expert_rows(each.experts)}'
        if producers:
            at += f',"depends_on":[{",".join([numbers[producer] for producer in producers])}]'
        yield (
            f'{parts[0]}"ts":{start // 1000}.{start % 1000:03d},"dur":{took // 1000}.{took % 1000:03d},'
            f'"args":{{"task":{each.id},"step":{each.step}{parts[1]}{rates}{at}}}}}'
        )


def _head(task: TaskInfo, track: str) -> str:
    return f'{{"ph":"X",{track},"name":{json.dumps(task.label)},"cat":{json.dumps(task.verb)},'


def _description(task: TaskInfo) -> str:
    numbers = {"layer": task.layer, "micro_batch": task.micro_batch, "expert": task.expert}
    args: dict[str, object] = {name: number for name, number in numbers.items() if number >= 0}
    args |= {"type": task.type, "kind": task.kind, "resource": task.resource}
    if task.rows:
        args["rows"] = task.rows
    if task.pages:
        args |= {"pages": task.pages, "page_names": task.page_names}
    if task.priority_class:
        args["priority_class"] = task.priority_class
    if task.pool:
        args |= {"pool": task.pool, "pool_slots": task.pool_slots}
    if task.nbytes:
        args["bytes"] = _plain(task.nbytes)
    if task.flops:
        args["FLOP"] = _plain(task.flops)
    return "," + json.dumps(args, separators=(",", ":"))[1:-1]


def _expert_rows(experts: Mapping[int, int]) -> str:
    return "{" + ",".join(f'"{expert}":{rows}' for expert, rows in experts.items()) + "}"


def _plain(number: float) -> float:
    """Convert a float without a fraction to an int, so that trace files say 4096 and not 4096.0."""
    return int(number) if number == int(number) else number


def _cancelled(run: _Shown) -> Iterator[str]:
    """Yield the JSON of an event without duration for each cancelled task, as such a task never ran."""
    tracks = run.tracks
    for each in run.recording.cancelled:
        task = each.task
        line = f',"line":{json.dumps(each.line)}' if each.line else ""
        yield (
            f'{{"ph":"i","s":"t",{tracks[each.lane]},"name":{json.dumps(CANCELLED + task.label)},'
            f'"cat":{json.dumps(task.verb)},"ts":{microseconds(each.time + run.shift)},'
            f'"args":{{"task":{each.id},"step":{each.step}{_description(task)}{line}}}}}'
        )


def _flows(run: _Shown) -> Iterator[str]:
    """Yield the JSON of arrows: to each task, from the last task of each lane among those that it depends on.

    An arrow starts one nanosecond before the end of a task, since viewers count the end as part of the next task.
    """
    recording, tracks, shift = run.recording, run.tracks, run.shift
    begins = []
    lasts = []
    lanes = [each.lane for each in recording.slices]
    for each in recording.slices:
        track, start, last = tracks[each.lane], each.start + shift, each.end + shift - 1
        begins.append(f'{track},"ts":{start // 1000}.{start % 1000:03d}')
        lasts.append(f'{track},"ts":{last // 1000}.{last % 1000:03d}')
    number = run.flow
    for begin, producers in zip(begins, recording.producers, strict=True):
        for producer in {lanes[each]: each for each in sorted(producers)}.values():
            number += 1
            yield f'{{"ph":"s","id":{number},{lasts[producer]},"name":"edge"}}'
            yield f'{{"ph":"f","bp":"e","id":{number},{begin},"name":"edge"}}'


def _critical(run: _Shown) -> Iterator[str]:
    free = 0
    for hop in critical_path(run.recording):
        each = hop.slice
        # Parts of a collective on two ranks overlap if one started late.
        start = max(each.start + run.shift, free)
        if start >= each.end + run.shift:
            continue
        free = each.end + run.shift
        args = {
            "task": each.id,
            "rank": each.lane.rank,
            "lane": each.lane.name,
            "why": hop.wait.why,
            "gap_us": hop.gap / 1000,
        }
        yield (
            f'{{"ph":"X","pid":{CRITICAL_PID},"tid":{run.critical_tid},"name":{json.dumps(each.task.label)},'
            f'"cat":{json.dumps(each.task.verb)},"ts":{microseconds(start)},"dur":{microseconds(free - start)},'
            f'"args":{json.dumps(args)}}}'
        )


def _counters(run: _Shown) -> Iterable[str]:
    for sample in run.recording.memory:
        name = json.dumps(f"memory {sample.memory}")
        yield (
            f'{{"ph":"C","pid":{run.pid + sample.rank},"name":{name},'
            f'"ts":{microseconds(sample.time + run.shift)},'
            f'"args":{{"reserved_bytes":{sample.reserved},"page_bytes":{sample.pages}}}}}'
        )
    for count in run.recording.pools:
        yield (
            f'{{"ph":"C","pid":{run.pid + count.rank},"name":{json.dumps(f"pool {count.pool}")},'
            f'"ts":{microseconds(count.time + run.shift)},'
            f'"args":{json.dumps(count.counted._asdict(), separators=(",", ":"))}}}'
        )


def _requests(run: _Shown) -> Iterator[str]:
    """Yield the JSON of an asynchronous span for each request, and of its parts: wait, prompt and tokens."""
    for each in run.recording.requests:
        track = f'"cat":"{REQUEST}","id":{each.request},"pid":{run.pid},"tid":0'
        args = json.dumps(msgspec.to_builtins(each), separators=(",", ":"))
        name = f"request {each.request}"
        for part, start, end in [(name, each.arrived, each.ended), *each.parts]:
            more = f',"args":{args}' if part == name else ""
            for sign, time in (("b", start), ("e", end)):
                at = microseconds(time + run.shift)
                yield f'{{"ph":"{sign}",{track},"name":"{part}","ts":{at}{more if sign == "b" else ""}}}'
