"""Draws windows of runs for papers: lanes as rows, tasks as blocks in the colour of their family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moesched.analysis.families import COLOURS, Family
from moesched.analysis.pictures import drawing, require_picture, write_picture
from moesched.analysis.timeline import Block, LaneRow, Timeline, merged
from moesched.analysis.timeline_labels import (
    INK,
    LABEL_POINTS,
    drawable,
    inches,
    ink_on,
    label_inches,
    names_of,
)
from moesched.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import PathPatch

WIDTH = 7.0
"""Default width of a picture in inches: the full width of a two-column page."""

NARROWEST, WIDEST = 2.0, 40.0
ROW_INCHES = 0.2
TITLE_INCHES = 0.13
BETWEEN_RUNS_INCHES = 0.1
LAYERS_INCHES = 0.11
MOST_LAYERS = 12
"""With more layers in a window, their starts are not marked."""

BLOCK_HEIGHT = 0.8  # of a row
OUTER_INCHES = 0.75  # axis and legend
LEGEND_ROW_INCHES = 0.15
LEGEND_SAMPLE_INCHES = 0.45
OUTLINED_INCHES = 0.03
"""Spans of the critical path narrower than this get lines above and below, since an outline would cover them."""

MARGIN_INCHES = 0.12  # beside the names of lanes

TEXT_POINTS = 7.0
BOLD = 1.15
"""Approximate ratio of the width of bold text to the width of plain text."""

BLOCKS_PER_INCH = 200.0
"""Blocks narrower than 1 / BLOCKS_PER_INCH inch are merged."""

EDGED = 6
"""Blocks at least this many times wider than the narrowest unmerged ones have white edges and hatches."""

MOST_ROWS = 500
MOST_BLOCKS = 6000
"""Largest number of blocks in a picture; above it wider blocks are merged too, so that the file stays small."""

HATCHES: dict[Family, str] = {
    "attention": "/////",
    "activations": "-----",
    "exchange": "xxx",
    "choices": "\\\\\\\\\\",
}
"""Hatches of families that share lanes with others, for print in black and white; other families are plain."""

FAMILY_NAMES: dict[Family, str] = {"choices": "routers, sampling"}
UNITS = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0}
GRID = "#D8D8D8"
MARK = "#555555"


class TitledTimeline(NamedTuple):
    """A window of a run, and the title above its rows."""

    title: str
    timeline: Timeline


def require_width(width: float | None) -> float:
    """Return a picture's width in inches after a check of its range; the default width for None.

    Raises:
        BadInput: the width is too small or too large.
    """
    if width is None:
        return WIDTH
    if not NARROWEST <= width <= WIDEST:
        raise BadInput(
            f"--width {width:g} is not from {NARROWEST:g} to {WIDEST:g} inches: give another width"
        )
    return width


def draw_timelines(runs: Sequence[TitledTimeline], path: Path | str, width: float = WIDTH) -> None:
    """Draw windows of runs, one below the other on one scale of time, to a .png or .svg file.

    Args:
        width: width of the picture in inches.

    Raises:
        BadInput: the file has another suffix, matplotlib is not installed, the file cannot be written, or there are too
            many lanes.
    """
    path = Path(path)
    require_picture(path, option="")
    if (rows := sum(len(run.timeline.rows) for run in runs)) > MOST_ROWS:
        raise BadInput(f"{rows:,} lanes do not fit a picture: choose at most {MOST_ROWS} with --lanes")
    with drawing():
        write_picture(_draw(runs, width), path, dpi=300)


def _draw(runs: Sequence[TitledTimeline], width: float) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    longest = max(run.timeline.window.end - run.timeline.window.start for run in runs)
    names = [drawable(row.title) for run in runs for row in run.timeline.rows]
    room = max(1.0, width - max(inches(name, TEXT_POINTS) for name in names) - MARGIN_INCHES)
    per_inch = longest / room
    tops, height = _places(runs)
    families = [family for family in COLOURS if family in _families(runs)]
    cancelled = any(row.cancelled for run in runs for row in run.timeline.rows)
    entries = _legend(families, cancelled)
    widths = [inches(str(entry.get_label()), TEXT_POINTS) + LEGEND_SAMPLE_INCHES for entry in entries]
    columns = len(entries) if sum(widths) <= width else max(1, int(width / max(widths)))
    legend_rows = -(-len(entries) // columns)
    figure = Figure(
        figsize=(width, height + OUTER_INCHES + LEGEND_ROW_INCHES * (legend_rows - 1)),
        layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02),
    )
    axes = figure.subplots()
    _set_axes(axes, runs, tops, longest, height)
    least = _least(runs, per_inch / BLOCKS_PER_INCH)
    for run, top in zip(runs, tops, strict=True):
        _draw_layers(axes, run, top, per_inch)
        above = 0.02 + (LAYERS_INCHES if _marked_layers(run) else 0.0)
        title = _title(run, room)
        axes.text(0, top - above, title, fontsize=TEXT_POINTS, va="bottom", weight="bold", in_layout=False)
        axes.vlines(
            axes.get_xticks(), top, top + ROW_INCHES * len(run.timeline.rows), color=GRID, lw=0.4, zorder=0
        )
        for number, row in enumerate(run.timeline.rows):
            middle = top + (number + 0.5) * ROW_INCHES
            _draw_row(axes, row, middle, least, per_inch)
    figure.legend(
        handles=entries,
        loc="outside lower center",
        ncols=columns,
        fontsize=TEXT_POINTS,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.2,
        borderpad=0.1,
    )
    return figure


def _places(runs: Sequence[TitledTimeline]) -> tuple[list[float], float]:
    """Return the top of each run's first row, as inches below the picture's top, and the picture's height in inches."""
    tops, height = [], 0.0
    for number, run in enumerate(runs):
        height += TITLE_INCHES + (BETWEEN_RUNS_INCHES if number else 0.0)
        height += LAYERS_INCHES if _marked_layers(run) else 0.0
        tops.append(height)
        height += ROW_INCHES * len(run.timeline.rows)
    return tops, height


def _title(run: TitledTimeline, room: float) -> str:
    """Return a run's title with the description of its window; the text is shortened to fit `room` inches."""
    window = run.timeline.window
    title = drawable(run.title)
    titles = [f"{title}: {window.described}", f"{title}: {window.name}" if window.name else title]
    return next((each for each in titles if BOLD * inches(each, TEXT_POINTS) <= room), title)


def _families(runs: Iterable[TitledTimeline]) -> set[Family]:
    return {block.family for run in runs for row in run.timeline.rows for block in row.blocks}


def _least(runs: Sequence[TitledTimeline], least: float) -> float:
    """Return the nanoseconds below which blocks are merged.

    The result is `least`, doubled until all runs together have at most `MOST_BLOCKS` blocks.
    """
    while sum(len(merged(row.blocks, least)) for run in runs for row in run.timeline.rows) > MOST_BLOCKS:
        least *= 2
    return least


def _set_axes(
    axes: Axes, runs: Sequence[TitledTimeline], tops: Sequence[float], longest: int, height: float
) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    unit = next((name for name, scale in UNITS.items() if longest >= scale), "ns")
    axes.set_xlim(0, longest)
    axes.set_ylim(height, 0)
    scale = UNITS[unit]
    locator = MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10])
    axes.set_xticks(
        [tick * scale for tick in locator.tick_values(0, longest / scale) if tick * scale <= longest]
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time / scale:g}"))
    axes.set_xlabel(f"time ({unit})", fontsize=TEXT_POINTS, labelpad=1)
    rows = [
        (top + (number + 0.5) * ROW_INCHES, drawable(row.title))
        for run, top in zip(runs, tops, strict=True)
        for number, row in enumerate(run.timeline.rows)
    ]
    axes.set_yticks([place for place, _ in rows], [title for _, title in rows])
    axes.tick_params(axis="both", labelsize=TEXT_POINTS, length=2, pad=2)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_linewidth(0.5)


def _marked_layers(run: TitledTimeline) -> list[tuple[int, int]]:
    """Return the layers whose starts are marked, as (layer, nanoseconds since the window's start).

    No layer is marked if there are more than `MOST_LAYERS`.
    """
    layers = run.timeline.layers
    return layers if len(layers) <= MOST_LAYERS else []


def _draw_layers(axes: Axes, run: TitledTimeline, top: float, per_inch: float) -> None:
    """Mark the starts of a window's layers, and write the names of those layers that have room for a name.

    Args:
        top: top of the run's first row, in inches from the picture's top.
        per_inch: nanoseconds per inch.
    """
    free = 0.0
    for layer, start in _marked_layers(run):
        bottom = top + ROW_INCHES * len(run.timeline.rows)
        axes.vlines(start, top - LAYERS_INCHES + 0.02, bottom, color=MARK, lw=0.6, ls=":", zorder=0)
        name = f"layer {layer}"
        window = run.timeline.window.end - run.timeline.window.start
        width = (label_inches(name) + 0.06) * per_inch
        if free <= start <= window - width:
            free = start + width
            place = start + 0.03 * per_inch
            axes.text(
                place, top - 0.02, name, fontsize=LABEL_POINTS, color=MARK, va="bottom", in_layout=False
            )


def _draw_row(axes: Axes, row: LaneRow, middle: float, least: float, per_inch: float) -> None:
    """Draw the blocks of a lane as one row.

    Args:
        middle: the row's centre line, in inches from the picture's top.
        least: nanoseconds below which blocks are merged.
        per_inch: nanoseconds per inch.
    """
    blocks = merged(row.blocks, least)
    low, high = middle - BLOCK_HEIGHT * ROW_INCHES / 2, middle + BLOCK_HEIGHT * ROW_INCHES / 2
    for family in COLOURS:
        mine: list[tuple[float, float]] = [
            (each.start, max(each.end, each.start + least)) for each in blocks if each.family == family
        ]
        wide = [span for span in mine if span[1] - span[0] >= EDGED * least]
        narrow = [span for span in mine if span[1] - span[0] < EDGED * least]
        if wide:
            axes.add_patch(
                _patch(wide, low, high, fc=COLOURS[family], ec="white", lw=0.3, hatch=HATCHES.get(family))
            )
        if narrow:
            axes.add_patch(_patch(narrow, low, high, fc=COLOURS[family], lw=0))
    path = _critical(blocks, OUTLINED_INCHES * per_inch)
    if wide := [span for span in path if span[1] - span[0] >= OUTLINED_INCHES * per_inch]:
        axes.add_patch(_patch(wide, low, high, fc="none", ec=INK, lw=0.7))
    if narrow := [span for span in path if span[1] - span[0] < OUTLINED_INCHES * per_inch]:
        starts, ends = [start for start, _ in narrow], [max(end, start + least) for start, end in narrow]
        for place in (low, high):
            axes.hlines([place] * len(narrow), starts, ends, color=INK, lw=0.9)
    for each in blocks:
        if each.task is not None:
            _label(axes, each, middle, per_inch)
    axes.plot(row.cancelled, [middle] * len(row.cancelled), "x", color=INK, markersize=3, mew=0.7)


def _patch(spans: Sequence[tuple[float, float]], low: float, high: float, **style: object) -> PathPatch:
    """Make one shape of many rectangles, which takes less space in a file than one shape each.

    Args:
        spans: left and right edge of each rectangle.
        low, high: bottom and top edge of all rectangles.
        style: colours and lines, as for matplotlib's `PathPatch`.
    """
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Shape

    corners = np.array([[(a, low), (a, high), (b, high), (b, low)] for a, b in spans])
    return PathPatch(Shape.make_compound_path_from_polys(corners), **style)


def _critical(blocks: Sequence[Block], apart: float) -> list[tuple[float, float]]:
    """Return the spans (start, end), in nanoseconds, in which a lane is on the critical path.

    Spans closer than `apart` nanoseconds are joined.
    """
    spans: list[tuple[float, float]] = []
    for each in blocks:
        if each.critical:
            if spans and each.start - spans[-1][1] < apart:
                spans[-1] = (spans[-1][0], max(each.end, spans[-1][1]))
            else:
                spans.append((each.start, each.end))
    return spans


def _label(axes: Axes, block: Block, middle: float, per_inch: float) -> None:
    """Write a label into the block of a task: the longest of the task's names that fits.

    Args:
        middle: the row's centre line, in inches from the picture's top.
        per_inch: nanoseconds per inch.
    """
    assert block.task is not None
    room = (block.end - block.start) / per_inch - 0.03
    colour = COLOURS[block.family]
    box = {"fc": colour, "ec": "none", "pad": 0.3} if block.family in HATCHES else None
    for text in names_of(block.task):
        if label_inches(text) <= room:
            axes.text(
                (block.start + block.end) / 2,
                middle,
                text,
                fontsize=LABEL_POINTS,
                color=ink_on(colour),
                bbox=box,
                ha="center",
                va="center_baseline",
                in_layout=False,
            )
            return


def _legend(families: Sequence[Family], cancelled: bool) -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Artist] = [
        Patch(
            fc=COLOURS[family],
            ec="white",
            lw=0.3,
            hatch=HATCHES.get(family),
            label=FAMILY_NAMES.get(family, family),
        )
        for family in families
    ]
    entries.append(Patch(fc="none", ec=INK, lw=0.7, label="critical path"))
    if cancelled:
        entries.append(
            Line2D([], [], color=INK, marker="x", ls="none", markersize=3, mew=0.7, label="cancelled")
        )
    return entries
