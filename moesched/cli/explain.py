"""`moesched explain`: where the time of a run went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from moesched.cli import options
from moesched.cli.output import say

if TYPE_CHECKING:
    from moesched.analysis.bottleneck import Bottleneck
    from moesched.analysis.explanation import Explanation
    from moesched.analysis.lane_times import LaneTime

HELP = options.paragraphs(
    "Explain where the time of a run went, measured or predicted, from its trace.",
    "First the bottleneck: the part of the critical path whose relief would shorten the run most. That path is the "
    "chain of tasks that determined the end of the run. Then each lane: how long it was busy, and what it waited for "
    "while it was idle. Then the critical path, the longest idle spans, the pools, and the time between tasks.",
    "Causes of idle time: data (a task computed or moved what the next one reads), lane (that task was in the queue "
    "of its own lane), budget (no room: the pages to overwrite were in use), router (the policy awaited the choice of "
    "experts), rank (another rank came later), policy (its own Python ran), host (the driver ran or a thread woke up), "
    "finished (no further task).",
)

EPILOGUE = """Examples:

  moesched simulate --model mixtral-8x7b --machine t4 --policy cgopipe \\
      --workload mtbench --gen 16 --trace out/cgopipe.json

  moesched explain out/cgopipe.json

  moesched explain out/cgopipe.json --what-if "link host->gpu x2" \\
      --what-if "kernel post_attention x0.5, no handovers\""""

SHOWN_PARTS = 8
"""Lines of the critical path and of the handovers that are printed; --json has all."""

SHOWN_SPANS = 5

OF_THE_POLICY = ("policy", "router")
"""Causes that are told with the policy's line."""

RELIEFS = {
    "data": "At twice its rate, this lane",
    "lane": "At twice its rate, this lane",
    "budget": "Pages wait for room, or leave early and come again; more room",
    "router": "The policy awaits the choice of experts; knowing it before",
    "rank": "Other ranks wait; an even load",
    "policy": "It is the time of the policy's own Python; half of it",
    "host": "It is the time of the driver and its threads; half of it",
}
"""What would relieve a bottleneck, by its cause."""

Table = tuple[list[str], list[list[str]]]
"""Columns and rows."""


def add_to(app: App) -> None:
    """Add the command."""
    app.command(explain, name="explain", help=HELP, help_epilogue=EPILOGUE, sort_key=5)


def explain(
    trace: Annotated[Path, Parameter(name="TRACE", help="A trace that --trace wrote.")],
    /,
    *,
    what_if: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="CHANGE",
            negative="",
            show_default=False,
            help='Replay the run with a change: "link host->gpu x2" (twice the rate), "kernel run_expert x0.7" (0.7 of '
            'the time), "pool experts x1.5" (more room), "no handovers" (no time between tasks), or several of them, '
            "with commas; repeatable.",
        ),
    ] = (),
    json: options.Json = False,
) -> None:
    """See HELP."""
    from moesched.analysis.explanation import explain as explained
    from moesched.cli.output import Bar, print_json
    from moesched.trace import read_trace

    with Bar(f"reading {trace}") as bar:
        run = read_trace(trace)
        bar.update(0, what="explaining")
        explanation = explained(run.recording, run.about, what_if, bar.update)
    print_json(explanation) if json else print_explanation(explanation)


def print_explanation(explanation: Explanation) -> None:
    """Print what matters first."""
    from moesched.cli.output import print_table
    from moesched.units import format_seconds

    say(
        f"{explanation.policy or 'run'} on {explanation.model or 'a graph'}, {explanation.figures} on "
        f"{explanation.machine or 'this machine'}: {format_seconds(explanation.seconds)} without loading, "
        f"{explanation.tasks:,} tasks, {explanation.overlap:.2f} lanes busy at a time"
    )
    if explanation.bottleneck is not None:
        say(f"bottleneck: {_told(explanation, explanation.bottleneck)}")
    tables = {
        "": (_lanes(explanation), 2),
        "Critical path": (_path(explanation), 3),
        "Longest idle spans": (_spans(explanation), 2),
        "Pools, in pages": (_pools(explanation), 5),
        "Time between tasks": (_handovers(explanation), 3),
        "What if": (_what_if(explanation), 2),
    }
    for title, ((columns, rows), figures) in tables.items():
        if rows:
            say(f"\n{title}" if title else "")
            print_table(columns, rows, figures=figures)
    if any(each.decisions_unchanged for each in explanation.what_if):
        say(
            "\nThe policy decides as it goes; its decisions were held. `simulate --machine-set` lets it decide anew."
        )


def _told(explanation: Explanation, bottleneck: Bottleneck) -> str:
    """The bottleneck in a sentence, with the policy's line where one is known."""
    from moesched.units import format_seconds

    what = f"{bottleneck.kind} on {bottleneck.lane}"
    if bottleneck.kind == bottleneck.cause:
        what = f"{bottleneck.kind}, before tasks of {bottleneck.lane}"
    busy = explanation.lanes[bottleneck.lane].busy_seconds / explanation.seconds
    took = f"{format_seconds(bottleneck.seconds)} of the critical path ({bottleneck.share:.0%})"
    line = ""
    if bottleneck.line and bottleneck.cause in OF_THE_POLICY:
        line = f" Most of it is before tasks that {bottleneck.line} submits."
    relief = f"{RELIEFS[bottleneck.cause]} would save {bottleneck.saved:.0%} of the time."
    return f"{what}, {took}. {relief} The lane is busy {busy:.0%} of the time.{line}"


def _lanes(explanation: Explanation) -> Table:
    """The use of each lane, and its causes of idle time."""
    from moesched.units import format_seconds

    rows = []
    for name, lane in explanation.lanes.items():
        waits: dict[str, float] = {}
        for each in lane.causes:
            waits[each.cause] = waits.get(each.cause, 0.0) + each.seconds
        ranked = sorted(waits.items(), key=lambda wait: -wait[1])
        shares = [f"{cause} {seconds / lane.idle_seconds:.0%}" for cause, seconds in ranked]
        rows.append(
            [
                name,
                ", ".join(shares),
                _first(lane),
                f"{lane.busy_seconds / explanation.seconds:.1%}",
                format_seconds(lane.idle_seconds),
            ]
        )
    return ["lane", "waits for", "most for", "busy", "idle"], rows


def _first(lane: LaneTime) -> str:
    """The tasks that a lane waited for most."""
    if not lane.causes or not lane.causes[0].kind:
        return ""
    return f"{lane.causes[0].kind} on {lane.causes[0].lane}"


def _path(explanation: Explanation) -> Table:
    from moesched.units import format_seconds

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
    return ["kind", "lane", "the next waits for", "tasks", "time", "share"], rows


def _spans(explanation: Explanation) -> Table:
    from moesched.units import format_seconds

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
    return ["lane", "until", "cause", "which waited for", "at", "idle"], rows


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
    return ["pool", "fetched", "hits", "misses", "wasted prefetches", "hit rate"], rows


def _handovers(explanation: Explanation) -> Table:
    from moesched.units import format_seconds

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
    return ["before", "lane", "tasks", "threads wake up", "policy submits"], rows


def _what_if(explanation: Explanation) -> Table:
    from moesched.units import format_seconds

    rows = [
        [each.change, format_seconds(each.seconds), f"{each.speedup:.2f}x"] for each in explanation.what_if
    ]
    return ["change", "time", "speed-up"], rows
