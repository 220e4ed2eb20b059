"""Pictures of a sweep: curves or points by policy with a panel for each machine, or Pareto fronts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moesched.analysis.families import COLOURS
from moesched.analysis.pictures import drawing, write_picture
from moesched.errors import BadInput
from moesched.sweeps.axes import Axes
from moesched.sweeps.figures import AXIS_TITLES, METRICS, MachineFacts, pareto_front, title_of, varying
from moesched.sweeps.line import Line
from moesched.sweeps.points import axis_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Panel
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

PANELS_IN_A_ROW = 3
MOST_PANELS = 12
MOST_TICKS = 12
MOST_NAMED = 20
MUCH = 7
"""An axis has a logarithmic scale if its largest value is more than this many times the smallest one."""

MARKERS = "osD^v"
SERIES_COLOURS = [*(colour for family, colour in COLOURS.items() if family != "other"), "#000000"]
STYLES = list(
    islice(zip(cycle(MARKERS), cycle(SERIES_COLOURS), strict=False), len(MARKERS) * len(SERIES_COLOURS))
)
"""Marker and colour of each series; their numbers have no common factor, so that all pairs differ."""

SPREAD = 0.7
"""Share of a category's width over which the points of its series are spread."""

OTHERS = (".", "#bbbbbb")
"""Marker and colour of series that have no point on a Pareto front."""


Place = tuple[Any, Any]
"""The values of a point on both axes of a picture; None for an axis on which the point has none."""


class Picture(NamedTuple):
    """The axes of a picture.

    Attributes:
        x, y: names of metrics; `x` may also be the name of an axis of the sweep.
        pareto: whether to show all points and their Pareto front instead of curves.
    """

    x: str
    y: str
    pareto: bool = False


def default_x(axes: Axes) -> str:
    """Return the name of the sweep's axis that is the x of a picture by default.

    This is the batch size if it has several values; otherwise the first axis that has several values, all numbers;
    otherwise the first axis that has several values. If no axis has several, it is the batch size.
    """
    several = [name for name in ("batch_size", *varying(axes)) if len(axes.get(name, [])) > 1]
    numbers = [name for name in several if all(map(_is_number, axes[name]))]
    return (numbers or several or ["batch_size"])[0]


def draw_sweep(
    path: Path, picture: Picture, lines: Sequence[Line], axes: Axes, figures: MachineFacts
) -> None:
    """Draw the results of a sweep to a .png or .svg file.

    Args:
        picture: the figures for x and y, and whether to draw Pareto fronts.
        lines: results of the simulations; those without one of the figures are left out.
        axes: the axes of the sweep.
        figures: facts about machines, from which metrics are computed.

    Raises:
        BadInput: no simulation has both figures of the picture, or the file cannot be written.
    """
    shown = [line for line in lines if None not in _position(line, picture, figures)]
    if not shown:
        price = "; dollars need --price MACHINE=DOLLARS" if "dollars" in picture[:2] else ""
        raise BadInput(f"cannot draw {path}: no point has figures for {picture.x} and {picture.y}{price}")
    with drawing():
        write_picture(_draw(picture, shown, axes, figures), path)


def _draw(picture: Picture, lines: Sequence[Line], axes: Axes, figures: MachineFacts) -> Figure:
    from matplotlib.figure import Figure as NewFigure

    apart, within = _divided(axes, picture)
    panels = _grouped(lines, apart)
    if len(panels) > MOST_PANELS:
        raise BadInput(
            f"a picture of {len(panels)} machines and models is too large: draw at most {MOST_PANELS}"
        )
    columns = min(PANELS_IN_A_ROW, len(panels))
    rows = -(-len(panels) // columns)
    figure = NewFigure(figsize=(4.4 * columns + 2.2, 3.6 * rows + 0.3), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    styles = dict(zip(_ranked(lines, within, picture, figures), cycle(STYLES), strict=False))
    categories = _categories(lines, picture, figures)
    for panel, (title, found) in zip(grid, panels.items(), strict=False):
        front = pareto_front(found, picture.x, picture.y, figures) if picture.pareto else []
        for name, members in _grouped(found, within).items():
            style = styles[name] if not picture.pareto or any(line in front for line in members) else OTHERS
            places = [_position(line, picture, figures) for line in members]
            if categories:
                beside = _beside(list(styles).index(name), len(styles))
                places = [(categories.index(str(x)) + beside, y) for x, y in places]
            _draw_series(panel, name, places, style, curve=not (picture.pareto or categories))
        if picture.pareto:
            _draw_front(panel, [_position(line, picture, figures) for line in front])
        _label(panel, title, picture)
        _scale(panel, [_position(line, picture, figures) for line in lines], picture, categories)
    for panel in grid[len(panels) :]:
        panel.set_visible(False)
    figure.suptitle(_common(lines), fontsize=11)
    _add_legend(figure, list(styles))
    return figure


def _common(lines: Sequence[Line]) -> str:
    """Return a title of model, machine and workload, without those in which the lines of results differ."""
    shared = {name: {line.inputs.get(name) for line in lines} for name in ("model", "machine", "workload")}
    said = {name: _told(name, values.pop()) for name, values in shared.items() if len(values) == 1}
    where = " on ".join(said[name] for name in ("model", "machine") if said.get(name))
    return ", ".join(filter(None, (where, said.get("workload"))))


def _categories(lines: Sequence[Line], picture: Picture, figures: MachineFacts) -> list[str]:
    """Return the values on the horizontal axis in order, if they are names; empty if they are numbers."""
    values = list(dict.fromkeys(_position(line, picture, figures)[0] for line in lines))
    return [] if all(map(_is_number, values)) else [str(each) for each in values]


def _beside(number: int, count: int) -> float:
    """Return the horizontal offset of a series' points from the middle of their category, which is 1 wide.

    Args:
        number: number of the series, from 0.
        count: number of series, which lie side by side.
    """
    return SPREAD * ((number + 0.5) / count - 0.5)


def _divided(axes: Axes, picture: Picture) -> tuple[list[str], list[str]]:
    """Return the axes whose values get a panel each, and the axes whose values get a series each within a panel.

    Both are names of axes with several values. In a Pareto picture only models have panels, and machines, policies and
    settings are series; values of other axes are points of a series.
    """
    several = [name for name in varying(axes) if name not in picture]
    tables = {name: name.partition(".")[0] for name in several}
    if picture.pareto:
        return [name for name in several if name == "model"], [
            name
            for name, table in tables.items()
            if table in ("machine", "machine_set", "policy", "settings")
        ]
    apart = [name for name, table in tables.items() if table in ("model", "machine", "machine_set")]
    return apart, [name for name in several if name not in apart]


def _draw_series(
    panel: Panel, name: str, places: Sequence[Place], style: tuple[str, str], *, curve: bool
) -> None:
    """Draw the points of the series `name` in a panel and, if `curve`, a line that joins them from left to right.

    Args:
        places: x and y of each point.
        style: marker and colour.
    """
    marker, colour = style
    line = "-" if curve else "none"
    xs, ys = zip(*sorted(places), strict=True)
    label = "others" if style == OTHERS else name
    panel.plot(xs, ys, marker=marker, markersize=4, linewidth=1.2, linestyle=line, color=colour, label=label)


def _draw_front(panel: Panel, front: Sequence[Place]) -> None:
    xs, ys = zip(*front, strict=True)
    panel.plot(xs, ys, color="black", linewidth=0.9, zorder=0, label="Pareto front")


def _label(panel: Panel, title: str, picture: Picture) -> None:
    panel.set_title(title, fontsize=10)
    panel.set_xlabel(AXIS_TITLES.get(picture.x) or title_of(picture.x))
    panel.set_ylabel(title_of(picture.y))
    panel.grid(alpha=0.3)


def _scale(panel: Panel, places: Sequence[Place], picture: Picture, categories: Sequence[str]) -> None:
    """Set the scales of a panel: logarithmic where values differ much.

    If x is an axis of the sweep and has few values, the ticks are at these values.

    Args:
        places: x and y of all points of the picture.
        categories: names on the horizontal axis; empty if it has numbers.
    """
    xs, ys = zip(*places, strict=True)
    if categories:
        panel.set_xlim(-0.5, len(categories) - 0.5)
        panel.set_xticks(range(len(categories)), categories)
        panel.grid(visible=False, axis="x")
        for edge in range(1, len(categories)):
            panel.axvline(edge - 0.5, color="#b0b0b0", linewidth=0.6, alpha=0.5)
    elif _differ_much(xs):
        panel.set_xscale("log")
        _number_logarithms(panel.xaxis)
    if _differ_much(ys):
        panel.set_yscale("log")
        _number_logarithms(panel.yaxis)
    ticks = sorted(set(xs)) if picture.x not in METRICS and all(map(_is_number, xs)) else []
    if 0 < len(ticks) <= MOST_TICKS:
        panel.set_xticks(ticks, [f"{each:g}" for each in ticks])


def _number_logarithms(axis: XAxis | YAxis) -> None:
    """Label a logarithmic axis with plain numbers at 1, 2 and 5 times each power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=MOST_TICKS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _add_legend(figure: Figure, names: Sequence[str]) -> None:
    """Add one legend beside all panels, with the series in the order of `names`, at most the first `MOST_NAMED`."""
    handles: dict[str, Any] = {}
    for panel in figure.axes:
        handles |= {name: handle for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    ordered = [name for name in names if name in handles]
    shown = [*ordered[:MOST_NAMED], *(name for name in ("others", "Pareto front") if name in handles)]
    title = f"the best {MOST_NAMED} of {len(ordered)}" if len(ordered) > MOST_NAMED else None
    if len(shown) > 1:
        figure.legend(
            [handles[name] for name in shown],
            shown,
            loc="outside right upper",
            fontsize=8,
            title=title,
            title_fontsize=8,
        )


def _ranked(
    lines: Sequence[Line], names: Sequence[str], picture: Picture, figures: MachineFacts
) -> list[str]:
    """Return the names of all series, ordered by the best y that each one reaches, the best series first."""
    sign = 1.0 if METRICS[picture.y].best is min else -1.0
    tops = {
        name: min(sign * figures.value(line, picture.y) for line in members)
        for name, members in _grouped(lines, names).items()
    }
    return sorted(tops, key=tops.__getitem__)


def _grouped(lines: Iterable[Line], names: Sequence[str]) -> dict[str, list[Line]]:
    """Group lines that have equal values of some axes; returns the groups by a title with these values."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        told = (_told(name, axis_value(line.inputs, name)) for name in names)
        groups.setdefault(", ".join(filter(None, told)), []).append(line)
    return groups


def _told(name: str, value: Any) -> str:
    """Return an axis's value as text for a title, such as "mixtral-8x7b"; empty for None.

    The name of the axis comes before a value that is not text. The key comes before any value of an axis with a key,
    such as "ahead 2" for "settings.ahead".
    """
    if value is None:
        return ""
    table, _, key = name.partition(".")
    if not key and isinstance(value, str):
        return value
    return f"{key or title_of(table)} {value}"


def _position(line: Line, picture: Picture, figures: MachineFacts) -> Place:
    x = figures.value(line, picture.x)
    if picture.x == "batch_size" and x is None and line.plan is not None:
        x = line.plan.batch_size  # the planner chose it
    return (x if x is None or _is_number(x) else str(x)), figures.value(line, picture.y)


def _differ_much(values: Sequence[Any]) -> bool:
    return all(_is_number(each) and each > 0 for each in values) and max(values) > MUCH * min(values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
