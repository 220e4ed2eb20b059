"""Draws the Hierarchical Roofline Model: MoE-Lightning's Figs. 4 and 5, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesched.analysis.hrm import first_turning_point
from moesched.analysis.pictures import draw_picture
from moesched.analysis.roofline import Computation, RooflineReport
from moesched.errors import BadInput
from moesched.system.plain_text import shown
from moesched.units import format_bytes, format_flops

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UPPER, LOWER, LINK, KERNEL, MARK = "#1f5fa8", "#2e8b57", "#c0392b", "#e08a00", "#333333"
LEFT, BELOW, SPARE = 0.4, 0.3, 3.0
"""Margins of the log-scaled axes, as factors: left, below (for the labels of vertical lines), and elsewhere."""


def draw_roofline(report: RooflineReport, path: Path | str) -> None:
    """Draw attention and FFN, each with the roofs of both memory levels and of the link, to a .png or .svg file.

    Raises:
        BadInput: the file has another suffix, matplotlib is not installed, or the file cannot be written.
    """
    if not isinstance(report, RooflineReport):
        raise BadInput(f"report is {shown(report)}: give what roofline_of returns")
    draw_picture(partial(_draw, report), path)


def _draw(report: RooflineReport) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 6.2))
    figure.subplots_adjust(left=0.055, right=0.99, bottom=0.185, top=0.89, wspace=0.04)
    attention, ffn = figure.subplots(1, 2, sharey=True)
    span = _span(report)
    for axes, computations in ((attention, report.attention), (ffn, report.ffn)):
        _roofs(axes, report, span)
        _computations(axes, report, computations)
        _frame(axes, report, span)
    attention.set_title(f"Attention, context {report.context}, by dtype of the KV cache", fontsize=11)
    attention.set_ylabel("attainable performance (FLOP/s)")
    ffn.set_title(f"MoE FFN, µ = {report.micro_batch_size}, by batch size N", fontsize=11)
    _first_turning_point(attention, report)
    _first_turning_point(ffn, report)
    _kernel(ffn, report, span)
    figure.suptitle(f"{report.model} ({report.dtype}) on {report.machine}: one layer of a decode step")
    handles, labels = ffn.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    return figure


def _span(report: RooflineReport) -> tuple[float, float]:
    """Return the lowest and highest FLOP/byte of both x-axes; the range includes all intensities and turning points."""
    hierarchy = report.hierarchy
    seen = [each.intensity.lower for each in (*report.attention, *report.ffn)]
    seen.append(report.upper_ffn.performance / hierarchy.upper.bandwidth)
    points = [
        first_turning_point(hierarchy),
        report.upper_ffn.performance / hierarchy.link,
        hierarchy.upper.peak / hierarchy.link,
    ]
    return LEFT * min(seen), SPARE * max(seen + points)


def _roofs(axes: Axes, report: RooflineReport, span: tuple[float, float]) -> None:
    upper, lower, link = report.hierarchy.upper, report.hierarchy.lower, report.hierarchy.link
    _roof(
        axes, span, upper.bandwidth, upper.peak, UPPER, f"{upper.name}: {_rates(upper.bandwidth, upper.peak)}"
    )
    if lower.peak:
        label = f"{lower.name}: {_rates(lower.bandwidth, lower.peak)}"
        _roof(axes, span, lower.bandwidth, lower.peak, LOWER, label)
    name = f"link {report.hierarchy.link_name}: {format_bytes(link)}/s"
    _roof(axes, span, link, upper.peak, LINK, name, dashes=(5, 2))


def _roof(
    axes: Axes,
    span: tuple[float, float],
    bandwidth: float,
    peak: float,
    color: str,
    label: str,
    dashes: tuple[int, ...] = (),
) -> None:
    start, end = span
    ridge = min(max(peak / bandwidth, start), end)
    xs = [start, ridge, end]
    ys = [min(peak, bandwidth * x) for x in xs]
    style: Any = (0, dashes) if dashes else "-"
    axes.plot(xs, ys, color=color, linewidth=2, linestyle=style, label=label)


def _computations(axes: Axes, report: RooflineReport, computations: Sequence[Computation]) -> None:
    """Draw a vertical line for each computation, with marks at its FLOP/s on fetched data and on data in place."""
    upper, lower = report.hierarchy.upper, report.hierarchy.lower
    for number, each in enumerate(computations):
        x = each.intensity.lower
        axes.axvline(x, color=MARK, linewidth=0.9, linestyle=":")
        axes.annotate(
            each.variant,
            (x, 0.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-3, 5),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="bottom",
            fontsize=9,
        )
        label = f"fetched to {upper.name} (Eq. 7)" if number == 0 else None
        _mark(axes, x, each.fetched.performance, LINK, "o", label)
        if each.in_place is not None:
            label = f"computed on {lower.name} (Eq. 8)" if number == 0 else None
            _mark(axes, x, each.in_place.performance, LOWER, "s", label)


def _mark(axes: Axes, x: float, y: float, color: str, marker: str, label: str | None) -> None:
    axes.plot(x, y, marker, color=color, markersize=7, zorder=4, label=label)


def _first_turning_point(axes: Axes, report: RooflineReport) -> None:
    point = first_turning_point(report.hierarchy)
    if point:
        label = "P1: above it fetching can pay (Eq. 9)"
        axes.plot(
            point,
            report.hierarchy.lower.peak,
            "D",
            color=MARK,
            markersize=8,
            zorder=5,
            linestyle="none",
            label=label,
        )
        _name(axes, "P1", (point, report.hierarchy.lower.peak), (7, -14))


def _kernel(axes: Axes, report: RooflineReport, span: tuple[float, float]) -> None:
    """Draw a line at the FLOP/s of a micro-batch's FFN on the upper memory level, and a star at the turning point P2.

    P2, the second turning point, is the FLOP per byte of the lower memory level above which the link no longer limits
    the FFN (Eq. 10).

    Args:
        span: lowest and highest FLOP/byte of the x-axis.
    """
    performance = report.upper_ffn.performance
    label = (
        f"FFN of µ = {report.micro_batch_size} on {report.hierarchy.upper.name}: {format_flops(performance)}"
    )
    start = performance / report.hierarchy.upper.bandwidth
    axes.plot((start, span[1]), (performance,) * 2, color=KERNEL, linewidth=1.5, linestyle="-.", label=label)
    axes.plot(start, performance, "o", color=KERNEL, markerfacecolor="white", zorder=4)
    point = performance / report.hierarchy.link
    label = "P2: above it the link no longer binds (Eq. 10)"
    axes.plot(point, performance, "*", color=MARK, markersize=13, zorder=5, linestyle="none", label=label)
    _name(axes, "P2", (point, performance), (-21, 7))


def _name(axes: Axes, name: str, point: tuple[float, float], offset: tuple[float, float]) -> None:
    axes.annotate(name, point, xytext=offset, textcoords="offset points", fontweight="bold")


def _frame(axes: Axes, report: RooflineReport, span: tuple[float, float]) -> None:
    hierarchy = report.hierarchy
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*span)
    axes.set_ylim(BELOW * hierarchy.link * span[0], SPARE * max(hierarchy.upper.peak, hierarchy.lower.peak))
    axes.set_xlabel(f"operational intensity (FLOP per byte; points: per byte of {hierarchy.lower.name})")
    axes.grid(True, which="major", linewidth=0.4, alpha=0.6)


def _rates(bandwidth: float, peak: float) -> str:
    return f"{format_bytes(bandwidth)}/s, {format_flops(peak)}"
