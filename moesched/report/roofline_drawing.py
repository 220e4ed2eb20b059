"""Draws the roofline of a run as SVG, with a table of its points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from moesched.analysis.families import COLOURS, Family, family_of_verb
from moesched.report.markup import element, section, table, text
from moesched.trace.recording import Recording, Roof
from moesched.units import format_bytes, format_flops, format_seconds

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 96, 16, 16, 46
"""Sizes in pixels: the drawing, and its margins."""

LEGEND_ROW = 20
"""Height of a line of the legend, which is below the axis."""
DASHES = ("none", "7 4", "2 3", "9 3 2 3")
"""Lines by which roofs differ."""

SHOWN_POINTS = 12
RADIUS = 9
SPARE = 0.35
"""Decades between the outermost points and the frame."""


class _Scale:
    """A logarithmic axis of a drawing.

    Args:
        values: values above 0, all of which the axis shows, with some space beyond the outermost.
        start, end: pixels of the axis's first and last point.

    Attributes:
        low, high: base-10 logarithms of the axis's ends.
    """

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low = math.log10(min(values)) - SPARE
        self.high = math.log10(max(values)) + SPARE
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        """Return the pixel on the axis at which a value, above 0, is drawn."""
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self._start + share * (self._end - self._start), 1)

    def decades(self) -> Iterator[float]:
        """Return the powers of ten on the axis."""
        return (10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1))


def roofline_section(recording: Recording, roofs: Mapping[str, Roof]) -> str:
    """Return the HTML section with the roofline and the run's kernels on it; empty if no task computes.

    Args:
        roofs: the limits of the processors, by name.
    """
    points = kernel_points(recording, roofs)[:SHOWN_POINTS]
    if not points:
        return ""
    used = {name: roof for name, roof in roofs.items() if any(each.resource == name for each in points)}
    note = "" if used else element("p", "The trace does not tell the limits of the processors.", css="note")
    drawing = element("figure", _drawing(points, used), note)
    return section("Roofline", element("div", drawing, _table(points), css="roofline"))


def _drawing(points: Sequence[KernelPoint], roofs: Mapping[str, Roof]) -> str:
    ridges = [roof.flops / roof.bandwidth for roof in roofs.values()]
    x = _Scale([each.intensity for each in points] + ridges, LEFT, WIDTH - RIGHT)
    rates = [each.rate for each in points] + [roof.flops for roof in roofs.values()]
    y = _Scale(rates, HEIGHT - BOTTOM, TOP)
    parts = [*_grid(x, y), *_roofs(roofs, x, y), *_points(points, x, y)]
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT + LEGEND_ROW * len(roofs)}",
        role="img",
        aria_label="Roofline of this run's kernels; the table has the same figures",
    )


def _grid(x: _Scale, y: _Scale) -> Iterator[str]:
    for value in x.decades():
        at = str(x.at(value))
        yield element("line", x1=at, x2=at, y1=str(TOP), y2=str(HEIGHT - BOTTOM), css="grid")
        yield _word(f"{value:g}", float(at), HEIGHT - BOTTOM + 18, "middle")
    for value in y.decades():
        at = str(y.at(value))
        yield element("line", x1=str(LEFT), x2=str(WIDTH - RIGHT), y1=at, y2=at, css="grid")
        yield _word(format_flops(value), LEFT - 8, float(at) + 4, "end")
    yield _word("operational intensity, FLOP per byte", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "middle")


def _roofs(roofs: Mapping[str, Roof], x: _Scale, y: _Scale) -> Iterator[str]:
    floor = 10.0**y.low
    for number, (name, roof) in enumerate(roofs.items()):
        first = max(10.0**x.low, floor / roof.bandwidth)
        xs = [first, roof.flops / roof.bandwidth, 10.0**x.high]
        line = " ".join(f"{x.at(each)},{y.at(_attainable(roof, each))}" for each in xs)
        dashes = DASHES[number % len(DASHES)]
        yield element("polyline", points=line, css="roof", stroke_dasharray=dashes)
        row = HEIGHT + LEGEND_ROW * number + LEGEND_ROW / 2
        sample = f"{LEFT},{row} {LEFT + 40},{row}"
        yield element("polyline", points=sample, css="roof", stroke_dasharray=dashes)
        words = f"{name}: {format_flops(roof.flops)}, {format_bytes(roof.bandwidth)}/s"
        yield _word(words, LEFT + 48, row + 4, "start")


def _points(points: Sequence[KernelPoint], x: _Scale, y: _Scale) -> Iterator[str]:
    for number, point in reversed(list(enumerate(points, 1))):
        at_x, at_y = x.at(point.intensity), y.at(point.rate)
        family: Family = family_of_verb(point.verb)
        yield element(
            "g",
            element("title", text(f"{_name(point)}: {format_flops(point.rate)}")),
            element("circle", cx=str(at_x), cy=str(at_y), r=str(RADIUS), fill=COLOURS[family]),
            _word(str(number), at_x, at_y + 3.5, "middle", "number"),
        )


def _word(words: str, x: float, y: float, anchor: str, css: str = "word") -> str:
    return element("text", text(words), x=str(round(x, 1)), y=str(round(y, 1)), text_anchor=anchor, css=css)


def _name(point: KernelPoint) -> str:
    return f"{point.verb} on {point.resource}, {point.phase}"


def _table(points: Sequence[KernelPoint]) -> str:
    rows = [
        [
            str(number),
            point.verb,
            point.resource,
            point.phase,
            f"{point.intensity:.3g}",
            format_flops(point.rate),
            "" if point.attainable is None else f"{point.rate / point.attainable:.0%}",
            format_seconds(point.seconds),
        ]
        for number, point in enumerate(points, 1)
    ]
    columns = ["", "kernel", "on", "phase", "FLOP/byte", "rate", "of its roof", "time"]
    return table("", columns, rows, 4)


class KernelPoint(NamedTuple):
    """A point of the roofline: all tasks of one verb (kind of task) on one processor in one phase, prefill or decode.

    Attributes:
        resource: name of the processor.
        tasks: number of tasks.
        seconds: total time of the tasks.
        intensity: FLOPs per byte that the tasks access.
        rate: FLOP/s while the tasks run.
        attainable: FLOP/s that the processor allows at this intensity; None if its limits are not known.
    """

    verb: str
    resource: str
    phase: str
    tasks: int
    seconds: float
    intensity: float
    rate: float
    attainable: float | None


def kernel_points(recording: Recording, roofs: Mapping[str, Roof]) -> list[KernelPoint]:
    """Compute the roofline's points of a run's kernels; the points with the longest total time come first.

    Args:
        roofs: the limits of processors, by name; points of a processor without limits have `attainable` None.
    """
    sums: dict[tuple[str, str, str], list[float]] = {}
    for each in recording.slices:
        task = each.task
        phase = each.phase
        if min(task.flops, task.nbytes) >= 1 and each.end > each.start and phase is not None:
            found = sums.setdefault((task.verb, task.resource, phase), [0, 0.0, 0.0, 0.0])
            for place, amount in enumerate((1, (each.end - each.start) / 1e9, task.flops, task.nbytes)):
                found[place] += amount
    points = [
        KernelPoint(
            verb,
            resource,
            phase,
            int(tasks),
            seconds,
            flops / nbytes,
            flops / seconds,
            _attainable(roofs[resource], flops / nbytes) if resource in roofs else None,
        )
        for (verb, resource, phase), (tasks, seconds, flops, nbytes) in sums.items()
    ]
    return sorted(points, key=lambda point: -point.seconds)


def _attainable(roof: Roof, intensity: float) -> float:
    """Return the FLOP/s that a processor allows at an intensity in FLOPs per byte."""
    return min(roof.flops, roof.bandwidth * intensity)
