"""Finds differences in work between two runs: bytes moved and experts computed on each lane, and hits in page pools."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

import msgspec

from moesched.analysis.families import family_of
from moesched.steps.pool_counts import Counted
from moesched.trace.recording import Recording
from moesched.units import format_bytes, format_seconds

MUCH = 0.01
"""The smallest difference to report: relative for bytes, absolute for shares."""

LEAST = 0.005
"""The smallest difference in time to report, as a share of the longer run's time."""


class WorkDifference(msgspec.Struct, frozen=True, kw_only=True):
    """An amount of work that differs between two runs; the initial loading of weights does not count.

    Attributes:
        what: "bytes" for bytes that a lane moved; "experts" for the share of the experts' FLOPs that a lane computed;
            "hits" for the share of uses of pages that found the page in its pool.
        lane: the lane's title; empty for hits.
        amounts: bytes or share in the first and the second run.
        seconds: seconds of this work on the lane in the second run minus the seconds in the first; 0 for hits.
    """

    what: Literal["bytes", "experts", "hits"]
    lane: str
    amounts: tuple[float, float]
    seconds: float

    def sentence(self, first: str, second: str) -> str:
        """Return the difference as a sentence, in which the runs have the titles `first` and `second`."""
        one, other = self.amounts
        more = f"{format_seconds(abs(self.seconds))} {'more' if self.seconds > 0 else 'less'} of its time"
        if self.what == "bytes":
            moved = f"{format_bytes(one)} in {first} and {format_bytes(other)} in {second}"
            return f"{self.lane} moved {moved}: {more}."
        shares = f"{one:.0%} in {first} and {other:.0%} in {second}"
        if self.what == "experts":
            return f"{self.lane} computed {shares} of the experts' work: {more}."
        return f"Pages that were there already when they were needed: {shares}."


def work_differences(first: Recording, second: Recording) -> list[WorkDifference]:
    """Find differences in work between two runs, without their loading of weights.

    The largest difference in time is first; hit rates of page pools are last.
    """
    longest = max(run.end - run.start for run in (first, second)) / 1e9
    found = [
        each
        for each in _differences(_Work(first), _Work(second))
        if each.what == "hits" or abs(each.seconds) >= LEAST * longest
    ]
    return sorted(found, key=lambda each: -abs(each.seconds))


class _Work:
    """Sums of a run by lane: bytes and seconds of page transfers, FLOPs and seconds of experts; also hit rates."""

    def __init__(self, run: Recording) -> None:
        self.moved: defaultdict[str, float] = defaultdict(float)
        self.moving: defaultdict[str, float] = defaultdict(float)
        self.experts: defaultdict[str, float] = defaultdict(float)
        self.computing: defaultdict[str, float] = defaultdict(float)
        titles = run.titles
        for each in run.slices:
            lane, seconds = titles[each.lane], (each.end - each.start) / 1e9
            if each.task.type == "PageTransfer":
                self.moved[lane] += each.task.nbytes
                self.moving[lane] += seconds
            elif family_of(each.task) == "experts":
                self.experts[lane] += each.task.flops
                self.computing[lane] += seconds
        last: dict[tuple[int, str], Counted] = {(each.rank, each.pool): each.counted for each in run.pools}
        hits = sum(counted.hits for counted in last.values())
        uses = hits + sum(counted.misses for counted in last.values())
        self.hit_rate = hits / uses if uses else 0.0
        all_flops = sum(self.experts.values())
        self.shares = {lane: flops / all_flops for lane, flops in self.experts.items()} if all_flops else {}


def _differences(one: _Work, other: _Work) -> Iterator[WorkDifference]:
    for lane in sorted(one.moved.keys() | other.moved.keys()):
        amounts = one.moved.get(lane, 0.0), other.moved.get(lane, 0.0)
        if abs(amounts[1] - amounts[0]) > MUCH * max(amounts):
            seconds = other.moving.get(lane, 0.0) - one.moving.get(lane, 0.0)
            yield WorkDifference(what="bytes", lane=lane, amounts=amounts, seconds=seconds)
    for lane in sorted(one.shares.keys() | other.shares.keys()):
        amounts = one.shares.get(lane, 0.0), other.shares.get(lane, 0.0)
        if abs(amounts[1] - amounts[0]) > MUCH:
            seconds = other.computing.get(lane, 0.0) - one.computing.get(lane, 0.0)
            yield WorkDifference(what="experts", lane=lane, amounts=amounts, seconds=seconds)
    if abs(other.hit_rate - one.hit_rate) > MUCH:
        yield WorkDifference(what="hits", lane="", amounts=(one.hit_rate, other.hit_rate), seconds=0.0)
