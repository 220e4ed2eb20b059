"""Makes the HTML of notebook cells that show a plan, a trace or a comparison: figures, the bottleneck, a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import singledispatch

from moesched.analysis.comparison import Comparison
from moesched.analysis.explanation import Explanation, explain
from moesched.analysis.explanation_tables import bottleneck_in_words
from moesched.analysis.families import COLOURS, MEANINGS, Family
from moesched.analysis.timeline import LaneRow, Timeline, choose_window, merged, timeline_of
from moesched.report.markup import element, paragraphs, table, text
from moesched.report.run_figures import run_figures
from moesched.steps.plan import Plan
from moesched.trace.chrome_reader import Trace
from moesched.trace.recording import Recording
from moesched.units import format_bytes

WIDTH, ROW, BAR, NAMES = 900, 20, 14, 130
"""Sizes in pixels: the drawing, a row and its bar, and the lanes' names."""
LEAST = 2
"""Pixels of a bar that is not merged with its neighbours."""


def cell(title: str, *content: str) -> str:
    """Return a notebook cell as HTML: a title in bold, and the content, HTML too, below it."""
    return element("div", element("strong", text(title)), *content)


def figures_table(heading: str, figures: Mapping[str, str]) -> str:
    """Return the HTML of a table of figures, each in a row with its name; empty if there are none."""
    return table("", ["", heading], list(figures.items()), 1) if figures else ""


def memory_table(name: str, used: Mapping[str, int], most: Mapping[str, int] | None = None) -> str:
    """Return the HTML of a table with the bytes of each memory.

    Args:
        name: title of the column of bytes.
        used: bytes by memory.
        most: budget in bytes by memory, for a second column; None for no such column.
    """
    rows = [
        [memory, format_bytes(nbytes), *([] if most is None else [format_bytes(most[memory])])]
        for memory, nbytes in used.items()
    ]
    columns = ["memory", name, *([] if most is None else ["budget"])]
    return table("", columns, rows, len(columns) - 1)


def bottleneck_and_timeline(recording: Recording, explanation: Explanation) -> str:
    """Return the HTML of a run's bottleneck, in words, and of the timeline of a typical step.

    `recording` needs at least one task.
    """
    said = []
    if explanation.bottleneck is not None:
        said = [f"Bottleneck: {bottleneck_in_words(explanation, explanation.bottleneck)}"]
    window = choose_window(recording)
    lines = paragraphs([*said, f"Timeline of {window.described}:"])
    return lines + timeline_drawing(timeline_of(recording, window))


@singledispatch
def drawn(value: object) -> str:
    """Return the HTML of the notebook cell that shows a `Trace`, a `Plan` or a `Comparison`.

    Raises:
        TypeError: the value is of another type.
    """
    raise TypeError(f"no cell shows a {type(value).__name__}")


@drawn.register
def _(trace: Trace) -> str:
    recording, about = trace
    title = f"{about.policy or 'run'} on {about.model or 'a graph'}, {about.figures} on {about.machine}"
    if not recording.slices:
        return cell(title, paragraphs(["No task ran."]))
    explanation = explain(recording, about)
    return cell(
        title,
        figures_table(about.figures, run_figures(recording, explanation, {})),
        bottleneck_and_timeline(recording, explanation),
    )


@drawn.register
def _(plan: Plan) -> str:
    used = {name: memory.used for name, memory in plan.memories.items()}
    most = {name: memory.capacity for name, memory in plan.memories.items()}
    pools = [
        [pool.name, pool.memory.name, f"{len(pool.slots):,}", format_bytes(pool.nbytes)]
        for pool in plan.weights.pools
    ]
    return cell(
        repr(plan).strip("<>"),
        memory_table("planned", used, most),
        table("", ["pool", "in", "slots", "bytes"], pools, 2) if pools else "",
    )


@drawn.register
def _(comparison: Comparison) -> str:
    header = comparison.header()
    return cell(
        " and ".join(run.title for run in comparison.runs),
        paragraphs(comparison.reasons()),
        table("", header, comparison.table(), len(header) - 2),
    )


def timeline_drawing(timeline: Timeline) -> str:
    """Return the SVG of the lanes in a part of a run, with a colour for each kind of work, and the HTML of a legend."""
    nanoseconds = max(1, timeline.window.end - timeline.window.start)
    scale = (WIDTH - NAMES) / nanoseconds
    drawing = element(
        "svg",
        *(part for number, row in enumerate(timeline.rows) for part in _row(row, number * ROW, scale)),
        viewBox=f"0 0 {WIDTH} {len(timeline.rows) * ROW}",
        width=str(WIDTH),
        style="max-width: 100%; height: auto; font: 11px sans-serif; fill: currentColor",
        role="img",
        aria_label=f"Timeline of {timeline.window.described}",
    )
    return drawing + _legend(timeline)


def _row(row: LaneRow, top: int, scale: float) -> Iterator[str]:
    yield _words(row.title, 0, top + BAR - 3)
    bars: dict[Family, list[str]] = {}
    for block in merged(row.blocks, LEAST / scale):
        width = max(0.5, (block.end - block.start) * scale)
        bars.setdefault(block.family, []).append(
            f"M{NAMES + block.start * scale:.1f} {top}h{width:.1f}v{BAR}h-{width:.1f}z"
        )
    for family, parts in bars.items():
        yield element(
            "path", element("title", text(MEANINGS[family])), d="".join(parts), fill=COLOURS[family]
        )


def _legend(timeline: Timeline) -> str:
    shown = {block.family for row in timeline.rows for block in row.blocks}
    names = (
        element(
            "span", element("span", "■", style=f"color: {COLOURS[family]}"), f" {text(MEANINGS[family])} "
        )
        for family in COLOURS
        if family in shown
    )
    return element("p", *names)


def _words(words: str, x: int, y: int) -> str:
    return element("text", text(words), x=str(x), y=str(y))
