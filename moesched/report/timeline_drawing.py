"""Draws a window of a run, one row for each lane, for cells of notebooks."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.analysis.families import COLOURS, MEANINGS, Family
from moesched.analysis.timeline import LaneRow, Timeline, merged
from moesched.report.markup import element, text

WIDTH, ROW, BAR, NAMES = 900, 20, 14, 130
"""Sizes in pixels: the drawing, a row and its bar, and the lanes' names."""

LEAST = 2
"""Pixels of a bar that is not merged with its neighbours."""


def timeline_drawing(timeline: Timeline) -> str:
    """Return the SVG of the lanes in a window, each task in the colour of its family, and the HTML of a legend."""
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
