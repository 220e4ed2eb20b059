"""Cuts windows of time from recordings, as rows of blocks to draw; tasks too narrow to see are merged."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from moesched.analysis.families import Family, family_of
from moesched.errors import BadInput
from moesched.trace.critical import critical_path
from moesched.trace.recording import LaneName, Recording, Slice, TaskInfo, phase_of
from moesched.trace.summary import StepTime, summarize
from moesched.units import format_seconds, parse_seconds

FIRST_VERB = "pre_attention"
"""The verb that begins a layer."""

MOST_SECONDS = 1e9

AHEAD = ("PageTransfer", "Preview")
"""Types of tasks that may run during an earlier layer than their own."""

TYPICAL = 0.1
"""A typical step's duration differs from the median of decode steps by at most this share of the median."""


class Window(NamedTuple):
    """A part of a run, from `start` to `end` in nanoseconds.

    `name` describes the window's steps or layers; the name is empty for a window that was given by times.
    """

    start: int
    end: int
    name: str = ""

    @property
    def described(self) -> str:
        """The window's name, length and start, in words."""
        span = f"{format_seconds((self.end - self.start) / 1e9)} from {format_seconds(self.start / 1e9)}"
        return f"{self.name}, {span}" if self.name else span


class Block(msgspec.Struct):
    """A task, or several narrow tasks of one lane, with times in nanoseconds since the window's start.

    Attributes:
        family: kind of work, which sets the block's colour.
        critical: whether the block is on the critical path.
        task: the task; None if the block is several tasks.
    """

    start: int
    end: int
    family: Family
    critical: bool
    task: TaskInfo | None


class LaneRow(NamedTuple):
    """The blocks of one lane in a window, in order of time.

    Attributes:
        cancelled: times of cancelled transfers, nanoseconds since the window's start.
    """

    title: str
    blocks: list[Block]
    cancelled: list[int]


class Timeline(NamedTuple):
    """The tasks of a window of a run, as one row of blocks per lane.

    Attributes:
        layers: (layer, nanoseconds since the window's start) of each layer that begins in the window.
    """

    window: Window
    rows: list[LaneRow]
    layers: list[tuple[int, int]]


def choose_window(recording: Recording, *, steps: str = "", layers: str = "", window: str = "") -> Window:
    """Choose a part of a run by its steps, by layers within a step, or by times.

    Args:
        steps: the number of a step, such as "3", or a range such as "2:4" with both ends included. 0 is the prefill, -1
            the loading. By default the first typical decode step.
        layers: number or range of layers in the first of the steps. The window is then from the first to the last
            kernel of these layers in that step.
        window: times since the start of the run, such as "1.2s:1.5s", instead of steps and layers.

    Raises:
        BadInput: an option cannot be read, names a part without tasks, or is given with an option that excludes it.
    """
    if window and (steps or layers):
        raise BadInput(f"--window and {'--steps' if steps else '--layers'} are both given: give one of them")
    if not recording.slices:
        raise BadInput("the trace has no tasks: record a run that runs some")
    if window:
        return _times(recording, window)
    times = {each.step: each for each in summarize(recording).steps}
    low, high = _bounds("--steps", steps, times) if steps else [_typical(times, recording.trimmed)] * 2
    chosen = _of_steps(times[low], times[low if layers else high])
    if layers:
        chosen = _layers(recording, low, chosen, layers)
    if chosen.start == chosen.end:
        raise BadInput(f"{chosen.name} takes no time: choose another part of the run, or record it again")
    return chosen


def _times(recording: Recording, text: str) -> Window:
    first, colon, last = text.partition(":")
    if not colon:
        raise BadInput(f"--window {text!r}: write START:END, such as 1.2s:1.5s")
    start, end = (round(min(parse_seconds(each), MOST_SECONDS) * 1e9) for each in (first, last))
    if start >= end:
        raise BadInput(f"--window {text!r} ends before it starts: write the earlier time first")
    if not any(each.start < end and each.end > start for each in recording.slices):
        until = f"{format_seconds(recording.start / 1e9)} to {format_seconds(recording.end / 1e9)}"
        raise BadInput(f"--window {text!r}: nothing runs then; the run lasts from {until}")
    return Window(start, end)


def _bounds(option: str, text: str, known: Collection[int]) -> tuple[int, int]:
    """Parse the text of an option, "3" or "2:4", into its first and last number; both must be in `known`."""
    what = option.removeprefix("--")
    first, colon, last = text.partition(":")
    try:
        low, high = int(first), int(last if colon else first)
    except ValueError:
        raise BadInput(f"{option} {text!r}: write a number such as 3, or FIRST:LAST such as 2:4") from None
    if low > high:
        raise BadInput(f"{option} {text!r} ends before it starts: write the smaller number first")
    for number in (low, high):
        if number not in known:
            there = f"{min(known)} to {max(known)}" if known else "none"
            raise BadInput(f"{option} {text!r}: there is no {number}; the trace has {what} {there}")
    return low, high


def _typical(times: dict[int, StepTime], trimmed: bool) -> int:
    """Return the number of the first decode step whose duration is near the median (see `TYPICAL`).

    If no step is near it, return the number of the first whole decode step; if there are none, of the last step.

    Args:
        times: the times of each step, by the step's number.
        trimmed: whether earlier steps were dropped from the recording; the first recorded step may then be incomplete,
            and is not chosen.
    """
    steps = sorted(times)
    whole = steps[1:] if trimmed and len(steps) > 1 else steps
    decode = [times[step] for step in whole if phase_of(step) == "decode"]
    if not decode:
        return steps[-1]
    usual = median(each.seconds for each in decode)
    return next(
        (each.step for each in decode if abs(each.seconds - usual) <= TYPICAL * usual), decode[0].step
    )


def _of_steps(first: StepTime, last: StepTime) -> Window:
    phase = phase_of(first.step)
    one = f"decode step {first.step}" if phase == "decode" else phase or "loading"
    name = one if first is last else f"steps {first.step} to {last.step}"
    return Window(round(first.start * 1e9), round(last.end * 1e9), name)


def _layers(recording: Recording, step: int, of: Window, text: str) -> Window:
    """Return the window of some layers within step `step`, from the first to the last kernel of these layers.

    Args:
        of: the window of the chosen steps. Its name, such as "decode step 3", is made part of the name of the result:
            "layers 2 to 4 of decode step 3".
        text: the layers, such as "2:4".
    """
    kernels = [
        each
        for each in recording.slices
        if each.step == step and each.task.layer >= 0 and each.task.type not in AHEAD
    ]
    low, high = _bounds("--layers", text, {each.task.layer for each in kernels})
    mine = [each for each in kernels if low <= each.task.layer <= high]
    name = f"layer {low}" if low == high else f"layers {low} to {high}"
    return Window(min(each.start for each in mine), max(each.end for each in mine), f"{name} of {of.name}")


def timeline_of(recording: Recording, window: Window, lanes: Collection[str] = ()) -> Timeline:
    """Return the tasks of a window as a row of blocks per lane.

    Args:
        lanes: names of the lanes to show, of all ranks; by default those that run a task in the window.

    Raises:
        BadInput: the run has no such lane.
    """
    names = {lane.name for lane in recording.lanes}
    if unknown := [name for name in lanes if name not in names]:
        raise BadInput(f"--lanes: the trace has no lane {unknown[0]!r}, only {', '.join(sorted(names))}")
    on_path = {id(hop.slice) for hop in critical_path(recording)}
    rows = []
    for lane, title in recording.titles.items():
        blocks = list(_blocks(recording.slices, lane, window, on_path))
        if lane.name in lanes or (blocks and not lanes):
            cancelled = [each.time for each in recording.cancelled if each.lane == lane]
            inside = [time - window.start for time in cancelled if window.start <= time < window.end]
            rows.append(LaneRow(title, blocks, inside))
    return Timeline(window, rows, list(_layer_starts(recording, window)))


def _layer_starts(recording: Recording, window: Window) -> Iterator[tuple[int, int]]:
    """Yield the layers that begin in the window, as (layer, nanoseconds since the window's start).

    A layer begins in each step with its first `pre_attention`.
    """
    starts: dict[tuple[int, int], int] = {}
    for each in recording.slices:
        if each.task.verb == FIRST_VERB:
            key = (each.step, each.task.layer)
            starts[key] = min(starts.get(key, each.start), each.start)
    for (_, layer), start in sorted(starts.items()):
        if window.start <= start < window.end:
            yield layer, start - window.start


def _blocks(
    slices: Sequence[Slice], lane: LaneName, window: Window, on_path: Collection[int]
) -> Iterator[Block]:
    found = [
        each for each in slices if each.lane == lane and each.start < window.end and each.end > window.start
    ]
    for each in sorted(found, key=lambda each: each.start):
        start, end = max(each.start, window.start), min(each.end, window.end)
        yield Block(
            start - window.start, end - window.start, family_of(each.task), id(each) in on_path, each.task
        )


def merged(blocks: Sequence[Block], least: float) -> list[Block]:
    """Merge neighbouring blocks if each block, and each gap between them, is shorter than `least` nanoseconds.

    A merged block lasts less than twice `least`. Its `family` and `critical` are, as a pair, those that cover most
    of its time.
    """
    result: list[Block] = []
    piece: list[Block] = []
    for each in blocks:
        narrow = each.end - each.start < least
        joins = (
            narrow and piece and each.start - piece[-1].end < least and each.end - piece[0].start < 2 * least
        )
        if piece and not joins:
            result.append(_joined(piece))
            piece = []
        if narrow:
            piece.append(each)
        else:
            result.append(each)
    return [*result, *([_joined(piece)] if piece else [])]


def _joined(piece: Sequence[Block]) -> Block:
    if len(piece) == 1:
        return piece[0]
    seconds: dict[tuple[Family, bool], int] = {}
    for each in piece:
        key = (each.family, each.critical)
        seconds[key] = seconds.get(key, 0) + each.end - each.start
    family, critical = max(seconds, key=lambda key: seconds[key])
    return Block(piece[0].start, piece[-1].end, family, critical, None)
