"""Draws a reproduction's sections as pictures by matplotlib, which is an extra: pip install 'moesched[plots]'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesched.analysis.pictures import FORMATS, drawing, require_matplotlib, write_picture
from moesched.errors import BadInput
from moesched.reproduce import PRINTED
from moesched.reproduce.printed import Picture
from moesched.reproduce.report import Reproduction, Section
from moesched.system.input_file import is_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER, OURS, FITTED = "#9aa5b1", "#1f5fa8", "#7fb069"
COLORS = ("#1f5fa8", "#c0392b", "#2e8b57", "#e08a00", "#7b4ea3", "#8c6d46", "#333333", "#d16ba5")


def require_folder(folder: Path) -> None:
    """Check that pictures can be drawn into a folder.

    Raises:
        BadInput: `folder` is not a folder, or matplotlib is not installed.
    """
    if not is_folder(folder):
        raise BadInput(f"cannot draw into {folder}: it is not a folder: create it first")
    require_matplotlib()


def picture_files(paper: str, folder: Path) -> list[Path]:
    """Return the files of all pictures of a paper's sections; an empty list if the paper is unknown."""
    if paper not in PRINTED:
        return []
    drawn = [name for name, words in PRINTED[paper].sections.items() if words.picture is not None]
    return [_picture_file(paper, section, folder, ending) for section in drawn for ending in FORMATS]


def draw_reproduction(report: Reproduction, folder: Path) -> list[Path]:
    """Draw each section that has a picture as PAPER-SECTION.png and .svg, and return the files.

    Raises:
        BadInput: `folder` is not a folder, matplotlib is not installed, or a file cannot be written.
    """
    require_folder(folder)
    written = []
    for section in report.sections:
        picture = PRINTED[report.paper].sections[section.name].picture
        if picture is None:
            continue
        with drawing():
            figure = DRAWN[picture.kind](section, picture)
            for ending in FORMATS:
                path = _picture_file(report.paper, section.name, folder, ending)
                write_picture(figure, path)
                written.append(path)
    return written


def _picture_file(paper: str, section: str, folder: Path, ending: str) -> Path:
    return folder / f"{paper}-{section}{ending}"


def _lines(section: Section, lines: Picture) -> Figure:
    panels = list(dict.fromkeys(row[lines.panels] for row in section.rows)) if lines.panels else [""]
    figure, all_axes = _figure(len(panels), section.title, lines.panel_inches)
    for axes, panel in zip(all_axes, panels, strict=True):
        rows = [row for row in section.rows if not lines.panels or row[lines.panels] == panel]
        places = list(dict.fromkeys(lines.x.format(**row) for row in rows)) if "{" in lines.x else []
        for line in lines.lines:
            points: dict[str, list[tuple[Any, Any]]] = {}
            for row in rows:
                x = places.index(lines.x.format(**row)) if places else row[lines.x]
                points.setdefault(line.name.format(**row), []).append((x, row[line.y]))
            first = 0 if line.style != "-" else len(axes.get_lines())
            for color, (label, each) in zip(COLORS[first:], points.items(), strict=False):
                axes.plot(*zip(*each, strict=True), line.style, marker="o", ms=3, color=color, label=label)
        _scale(axes, lines, [row.get(lines.x) for row in rows])
        if places:
            axes.set_xticks(range(len(places)), places, fontsize=7, rotation=45 if "," in places[0] else 0)
        axes.set_xlabel(lines.x_label)
        if lines.panels:
            axes.set_title(lines.panel_title.format(panel), fontsize=10)
        axes.grid(linewidth=0.4, alpha=0.6)
        _legend_below(axes)
    all_axes[0].set_ylabel(lines.y)
    return figure


def _scale(axes: Axes, lines: Picture, xs: list[Any]) -> None:
    if "x" in lines.log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [str(x) for x in xs])
    if "symlog" in lines.log:
        axes.set_xscale("symlog", base=2, linthresh=1)
    if "y" in lines.log:
        axes.set_yscale("log")


def _tables(section: Section, _: Picture) -> Figure:
    """Draw a table's throughputs as bars, the paper's beside ours, with a panel for each column."""
    columns = list(dict.fromkeys((row["workload"], row["setting"]) for row in section.rows))
    figure, all_axes = _figure(len(columns), section.title, each=4.2)
    for axes, (workload, setting) in zip(all_axes, columns, strict=True):
        rows = [row for row in section.rows if (row["workload"], row["setting"]) == (workload, setting)]
        places = range(len(rows))
        axes.bar([x - 0.2 for x in places], [row["paper"] for row in rows], 0.4, color=PAPER, label="paper")
        colors = [FITTED if row["fitted"] else OURS for row in rows]
        axes.bar([x + 0.2 for x in places], [row["ours"] for row in rows], 0.4, color=colors)
        axes.set_xticks(list(places), [str(row["system"]).replace(", ", ",\n") for row in rows], fontsize=7)
        axes.set_title(f"{workload}, {setting}", fontsize=10)
        axes.set_ylabel("tokens/s")
    all_axes[0].bar([0], [0], color=OURS, label="ours, predicted")
    all_axes[0].bar([0], [0], color=FITTED, label="ours, fitted")
    _legend_below(all_axes[0])
    return figure


def _map(section: Section, _: Picture) -> Figure:
    """Draw a map of the share of weights that is offloaded, with red points where attention is on the CPU."""
    figure, (axes,) = _figure(1, section.title, each=7)
    xs = [row["link_gb_per_second"] for row in section.rows]
    ys = [row["cpu_ratio"] for row in section.rows]
    shares = axes.scatter(
        xs, ys, c=[row["weights_on_cpu"] for row in section.rows], s=420, marker="s", cmap="Blues", vmin=0
    )
    attending = [
        (x, y) for x, y, row in zip(xs, ys, section.rows, strict=True) if row["attention_on"] == "cpu"
    ]
    axes.plot([x for x, _ in attending], [y for _, y in attending], "o", color="#c0392b")
    axes.set_yscale("log")
    axes.set_xlabel("link, GB/s (red: attention on the CPU)")
    axes.set_ylabel("times the base CPU")
    figure.colorbar(shares, ax=axes, label="share of the weights offloaded")
    return figure


def _breakdowns(section: Section, _: Picture) -> Figure:
    """Draw the parts of a token's time as stacked bars: the paper's and ours for each row of the table."""
    figure, (axes,) = _figure(1, section.title, each=8)
    names = list(dict.fromkeys((row["method"], row["nodes"]) for row in section.rows))
    for at, (who, hatch) in enumerate((("paper", ""), ("ours", "//"))):
        bottoms = [0.0] * len(names)
        for number, part in enumerate(("moe", "comm", "misc")):
            values = [
                float(row[who] or 0)
                for name in names
                for row in section.rows
                if (row["method"], row["nodes"], row["part"]) == (*name, part)
            ]
            axes.bar(
                [x + 0.4 * at - 0.2 for x in range(len(names))],
                values,
                0.36,
                bottom=bottoms,
                color=COLORS[number],
                alpha=1.0 if at else 0.5,
                hatch=hatch,
                label=f"{part}, {who}",
            )
            bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    axes.set_xticks(range(len(names)), [f"{method}, {nodes} nodes" for method, nodes in names])
    axes.set_ylabel("seconds of a token")
    _legend_below(axes)
    return figure


DRAWN: dict[str, Callable[[Section, Picture], Figure]] = {
    "lines": _lines,
    "bars": _tables,
    "map": _map,
    "parts": _breakdowns,
}


def _figure(count: int, title: str, each: float) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, each * count), 4.6), layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _legend_below(axes: Axes) -> None:
    """Draw the legend below the axes, so that it covers no data."""
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2, frameon=False)
