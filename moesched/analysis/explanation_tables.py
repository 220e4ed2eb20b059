"""Writes explanations as text for people: first lines and tables."""

from __future__ import annotations

from typing import NamedTuple

from moesched.analysis.bottleneck import OF_A_LANE, Bottleneck
from moesched.analysis.explanation import Explanation
from moesched.analysis.lane_times import LaneTime
from moesched.units import format_seconds

SHOWN_PARTS = 8
"""Largest number of rows in the tables of the critical path and of the time between tasks."""

SHOWN_SPANS = 5

LEAST_SHOWN = 0.005
"""The smallest share of a lane's idle time that is shown with its cause."""

MOSTLY = 0.5
"""Share of a lane's busy time; if the host still launches kernels for longer, fewer launches are recommended."""

OF_THE_POLICY = ("policy", "router")
"""Causes of a bottleneck that are shown with the policy's line."""

RELIEFS = {
    "budget": "Pages wait for room, or come back soon after they left; more room",
    "router": "The policy awaits the choice of experts; knowing it before",
    "rank": "Other ranks wait; an even load",
    "policy": "It is the time of the policy's own Python; half of it",
    "host": "It is the time of the driver and its threads; half of it",
}
"""The beginning of a sentence on how to relieve a bottleneck, by its cause; for slow lanes, see `helps`."""


class Table(NamedTuple):
    """A table as text: titles of columns, and rows of cells.

    Attributes:
        figures: number of columns, counted from the right, that hold numbers.
    """

    columns: list[str]
    rows: list[list[str]]
    figures: int


def first_lines(explanation: Explanation) -> list[str]:
    """Return the first lines of an explanation: the run, and its bottleneck if there is one."""
    lines = [
        f"{explanation.policy or 'run'} on {explanation.model or 'a graph'}, {explanation.figures} on "
        f"{explanation.machine or 'this machine'}: {format_seconds(explanation.seconds)} without loading, "
        f"{explanation.tasks:,} tasks, {explanation.overlap:.2f} lanes busy at a time"
    ]
    if explanation.bottleneck is not None:
        lines.append(f"bottleneck: {bottleneck_in_words(explanation, explanation.bottleneck)}")
    return lines


def tables_of(explanation: Explanation) -> dict[str, Table]:
    """Return the tables that have rows, by title, the most important first."""
    tables = {
        "Lanes": _lanes(explanation),
        "Critical path": _path(explanation),
        "Longest idle spans": _spans(explanation),
        "Pools, in pages": _pools(explanation),
        "Time between tasks": _handovers(explanation),
        "What if": _what_if(explanation),
    }
    return {title: table for title, table in tables.items() if table.rows}


def bottleneck_in_words(explanation: Explanation, bottleneck: Bottleneck) -> str:
    """Describe the bottleneck in a sentence, with the policy's line if it is known."""
    lanes = bottleneck.lane
    if bottleneck.ranks > 1:
        lanes += f" and {bottleneck.ranks - 1} more"
    what, others = f"{bottleneck.kind} on {lanes}", ""
    if bottleneck.kind == bottleneck.cause:
        what = f"{bottleneck.kind}, before tasks of {bottleneck.lane}"
    elif (spent := format_seconds(bottleneck.kind_seconds)) != format_seconds(bottleneck.seconds):
        what = lanes if bottleneck.cause in OF_A_LANE else f"{what} and others"
        others = f", {spent} of it {bottleneck.kind}"
    lane = explanation.lanes[bottleneck.lane]
    busy = lane.busy_seconds / explanation.seconds
    took = f"{format_seconds(bottleneck.seconds)} of the critical path ({bottleneck.share:.0%})"
    line = ""
    if bottleneck.line and bottleneck.cause in OF_THE_POLICY:
        line = f" Most of it is before tasks that {bottleneck.line} submits."
    relief = ""
    if bottleneck.cause in RELIEFS:
        relief = f" {RELIEFS[bottleneck.cause]} would save {bottleneck.saved:.0%} of the time."
    launching = ""
    if bottleneck.cause in OF_A_LANE and lane.launching_seconds > MOSTLY * lane.busy_seconds:
        share = lane.launching_seconds / lane.busy_seconds
        launching = f" In {share:.0%} of that the host still launched kernels: fewer launches would help."
    busiest = "The lane" if bottleneck.ranks == 1 else bottleneck.lane.capitalize()
    return f"{what}, {took}{others}.{relief} {busiest} is busy {busy:.0%} of the time.{launching}{line}"


def _lanes(explanation: Explanation) -> Table:
    """Return the table of lanes: busy time, busy time in which the host launched kernels, and idle time by cause."""
    rows = []
    launched = any(lane.launching_seconds for lane in explanation.lanes.values())
    for name, lane in explanation.lanes.items():
        waits: dict[str, float] = {}
        for each in lane.causes:
            waits[each.cause] = waits.get(each.cause, 0.0) + each.seconds
        ranked = sorted(waits.items(), key=lambda wait: -wait[1])
        shares = [(cause, seconds / lane.idle_seconds) for cause, seconds in ranked]
        rows.append(
            [
                name,
                ", ".join(f"{cause} {share:.0%}" for cause, share in shares if share >= LEAST_SHOWN),
                _first(lane),
                f"{lane.busy_seconds / explanation.seconds:.1%}",
                *([f"{lane.launching_seconds / explanation.seconds:.1%}"] if launched else []),
                format_seconds(lane.idle_seconds),
            ]
        )
    columns = ["lane", "waits for", "most for", "busy", *(["launching"] if launched else []), "idle"]
    return Table(columns, rows, 3 if launched else 2)


def _first(lane: LaneTime) -> str:
    """Return the verb and lane of the tasks that a lane waited for longest, in words; empty if it waited for none."""
    if not lane.causes or not lane.causes[0].kind:
        return ""
    return f"{lane.causes[0].kind} on {lane.causes[0].lane}"


def _path(explanation: Explanation) -> Table:
    rows = [
        [
            part.kind,
            part.lane,
            part.cause,
            f"{part.tasks:,}",
            format_seconds(part.seconds),
            f"{part.share:.1%}",
        ]
        for part in explanation.critical_path[:SHOWN_PARTS]
    ]
    return Table(["kind", "lane", "the next waits for", "tasks", "time", "share"], rows, 3)


def _spans(explanation: Explanation) -> Table:
    spans = [(name, span) for name, lane in explanation.lanes.items() for span in lane.longest]
    spans.sort(key=lambda each: -each[1].seconds)
    rows = [
        [
            name,
            span.before,
            span.cause,
            span.waited_for,
            format_seconds(span.start),
            format_seconds(span.seconds),
        ]
        for name, span in spans[:SHOWN_SPANS]
    ]
    return Table(["lane", "until", "cause", "which waited for", "at", "idle"], rows, 2)


def _pools(explanation: Explanation) -> Table:
    rows = [
        [
            name,
            *(f"{count:,}" for count in (pool.fetched, pool.hits, pool.misses, pool.wasted_prefetches)),
            f"{pool.hits / (pool.hits + pool.misses):.1%}" if pool.hits + pool.misses else "",
        ]
        for name, pool in explanation.pools.items()
        if pool.fetched or pool.hits
    ]
    return Table(["pool", "fetched", "hits", "misses", "wasted prefetches", "hit rate"], rows, 5)


def _handovers(explanation: Explanation) -> Table:
    rows = [
        [
            each.kind,
            each.lane,
            f"{each.tasks:,}",
            format_seconds(each.dispatch_seconds),
            format_seconds(each.submit_seconds),
        ]
        for each in explanation.handovers[:SHOWN_PARTS]
    ]
    return Table(["before", "lane", "tasks", "threads wake up", "policy submits"], rows, 3)


def _what_if(explanation: Explanation) -> Table:
    rows = [
        [each.change, format_seconds(each.seconds), f"{each.speedup:.2f}x"] for each in explanation.what_if
    ]
    return Table(["change", "time", "speed-up"], rows, 2)
