"""Writes a recording as Chrome Trace Event JSON, which ui.perfetto.dev and vizviewer show.

One track per lane, one process per rank, edges as arrows, memories as counters, and the critical path as a track of
its own, since arrows show for selected slices only. Times are microseconds with exactly three decimals: anything else
makes viewers drop slices that touch.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from moesched.trace.critical import critical_path
from moesched.trace.recording import About, LaneName, Recording, Slice
from moesched.trace.whole_file import whole_file

FORMAT = "moesched trace 1"
CRITICAL_PATH = "critical path"
CRITICAL_PID = CRITICAL_TID = 1
FIRST_RANK_PID = 2
FIRST_LANE_TID = 2

_EVENTS_PER_WRITE = 10_000


def write_trace(path: Path | str, recording: Recording, about: About) -> None:
    """Write a trace; gzipped only when the name ends in .gz.

    Raises:
        BadInput: the file cannot be written; nothing is left of it.
    """
    path = Path(path)
    with whole_file(path, "trace") as file:
        if path.name.endswith(".gz"):
            with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
                _write(packed, recording, about)
        else:
            _write(file, recording, about)


def microseconds(nanoseconds: int) -> str:
    """Nanoseconds as microseconds with exactly three decimals, such as "12.034"."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _write(file: BinaryIO | gzip.GzipFile, recording: Recording, about: About) -> None:
    other: dict[str, Any] = {"format": FORMAT, "figures": about.figures, **msgspec.to_builtins(about)}
    other |= {"tasks": len(recording.slices), "edges": recording.edges}
    other |= {"joins": recording.joins, "trimmed": recording.trimmed}
    file.write(b'{"displayTimeUnit":"ns","otherData":%b,"traceEvents":[\n' % msgspec.json.encode(other))
    events = _events(recording, about)
    separator = ""
    while batch := list(islice(events, _EVENTS_PER_WRITE)):
        file.write((separator + ",\n".join(batch)).encode())
        separator = ",\n"
    file.write(b"\n]}\n")


def _events(recording: Recording, about: About) -> Iterator[str]:
    tracks = {
        lane: f'"pid":{FIRST_RANK_PID + lane.rank},"tid":{FIRST_LANE_TID + index}'
        for index, lane in enumerate(recording.lanes)
    }
    yield from _names(recording, about)
    yield from _slices(recording, tracks)
    yield from _flows(recording, tracks)
    yield from _critical(recording)
    yield from _counters(recording)


def _names(recording: Recording, about: About) -> Iterator[str]:
    what = " on ".join(filter(None, (about.policy, about.machine)))
    yield from _process(CRITICAL_PID, f"{CRITICAL_PATH}, {about.figures}")
    yield from _thread(CRITICAL_PID, CRITICAL_TID, CRITICAL_PATH)
    for rank in sorted({lane.rank for lane in recording.lanes}):
        title = f"rank {rank}: {what}" if what else f"rank {rank}"
        yield from _process(FIRST_RANK_PID + rank, f"{title}, {about.figures}")
    for index, lane in enumerate(recording.lanes):
        yield from _thread(FIRST_RANK_PID + lane.rank, FIRST_LANE_TID + index, lane.name)


def _process(pid: int, name: str) -> Iterator[str]:
    yield _metadata("process_name", pid, 0, "name", name)
    yield _metadata("process_sort_index", pid, 0, "sort_index", pid)


def _thread(pid: int, tid: int, name: str) -> Iterator[str]:
    yield _metadata("thread_name", pid, tid, "name", name)
    yield _metadata("thread_sort_index", pid, tid, "sort_index", tid)


def _metadata(event: str, pid: int, tid: int, key: str, value: str | int) -> str:
    thread = f'"tid":{tid},' if tid else ""
    return f'{{"ph":"M","name":"{event}","pid":{pid},{thread}"args":{{"{key}":{json.dumps(value)}}}}}'


def _slices(recording: Recording, tracks: dict[LaneName, str]) -> Iterator[str]:
    known: dict[tuple[object, ...], tuple[str, str]] = {}
    lines: dict[str, str] = {"": ""}
    for each in recording.slices:
        start, end, nbytes, flops, line = each.start, each.end, each.nbytes, each.flops, each.line
        same = (
            each.lane,
            each.label,
            each.type,
            each.kind,
            each.resource,
            each.layer,
            each.micro_batch,
            each.expert,
            nbytes,
            flops,
            each.pages,
        )
        parts = known.get(same)
        if parts is None:
            parts = known[same] = (_head(each, tracks[each.lane]), _what(each))
        at = lines.get(line)
        if at is None:
            at = lines[line] = f',"line":{json.dumps(line)}'
        took = end - start
        rates = f',"GB/s":{nbytes / took:.4g}' if nbytes else ""
        if flops:
            rates += f',"GFLOP/s":{flops / took:.4g}'
        if each.state != "done" or each.ticket >= 0:
            rates += f',"state":"{each.state}","ticket":{each.ticket}'
        yield (
            f'{parts[0]}"ts":{start // 1000}.{start % 1000:03d},"dur":{took // 1000}.{took % 1000:03d},'
            f'"args":{{"task":{each.id},"step":{each.step}{parts[1]}{rates}{at}}}}}'
        )


def _head(each: Slice, track: str) -> str:
    return f'{{"ph":"X",{track},"name":{json.dumps(each.label)},"cat":{json.dumps(each.verb)},'


def _what(each: Slice) -> str:
    numbers = {"layer": each.layer, "micro_batch": each.micro_batch, "expert": each.expert}
    args: dict[str, object] = {name: number for name, number in numbers.items() if number >= 0}
    args |= {"type": each.type, "kind": each.kind, "resource": each.resource}
    if each.pages:
        args["pages"] = each.pages
    if each.nbytes:
        args["bytes"] = _plain(each.nbytes)
    if each.flops:
        args["flops"] = _plain(each.flops)
    return "," + json.dumps(args, separators=(",", ":"))[1:-1]


def _plain(number: float) -> float:
    """An integer where it is one: readers should not see 4096.0 bytes."""
    return int(number) if number == int(number) else number


def _flows(recording: Recording, tracks: dict[LaneName, str]) -> Iterator[str]:
    """An arrow starts in the last nanosecond of the producing slice: at its end, it would hang on the next one."""
    begins = []
    lasts = []
    for each in recording.slices:
        track, start, last = tracks[each.lane], each.start, each.end - 1
        begins.append(f'{track},"ts":{start // 1000}.{start % 1000:03d}')
        lasts.append(f'{track},"ts":{last // 1000}.{last % 1000:03d}')
    number = 0
    for begin, producers in zip(begins, recording.producers, strict=True):
        for producer in producers:
            number += 1
            yield f'{{"ph":"s","id":{number},{lasts[producer]},"name":"edge"}}'
            yield f'{{"ph":"f","bp":"e","id":{number},{begin},"name":"edge"}}'


def _critical(recording: Recording) -> Iterator[str]:
    free = 0
    for each, why, gap in critical_path(recording):
        # Parts of a collective on two ranks overlap where one came late.
        start = max(each.start, free)
        if start >= each.end:
            continue
        free = each.end
        args = {
            "task": each.id,
            "rank": each.lane.rank,
            "lane": each.lane.name,
            "why": why,
            "gap_us": gap / 1000,
        }
        yield (
            f'{{"ph":"X","pid":{CRITICAL_PID},"tid":{CRITICAL_TID},"name":{json.dumps(each.label)},'
            f'"cat":{json.dumps(each.verb)},"ts":{microseconds(start)},"dur":{microseconds(free - start)},'
            f'"args":{json.dumps(args)}}}'
        )


def _counters(recording: Recording) -> Iterable[str]:
    for sample in recording.memory:
        name = json.dumps(f"memory {sample.memory}")
        yield (
            f'{{"ph":"C","pid":{FIRST_RANK_PID + sample.rank},"name":{name},"ts":{microseconds(sample.time)},'
            f'"args":{{"reserved":{sample.reserved},"pages":{sample.pages}}}}}'
        )
