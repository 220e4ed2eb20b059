"""Draws the latencies of an expert on each processor, as Fig. 7 of Twiddler (the Fiddler paper of ICLR'25)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moesched.analysis.latency_table import LatencyReport
from moesched.analysis.pictures import draw_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "weight copy": "#c0392b",
    "activation copy": "#e08a00",
    "accelerator": "#1f5fa8",
    "host": "#2e8b57",
}


def draw_latencies(report: LatencyReport, path: Path | str) -> None:
    """Draw the latency of each workload as a bar, on a log scale, to a .png or .svg file.

    Raises:
        BadInput: the file has another suffix, matplotlib is not installed, or the file cannot be written.
    """
    draw_picture(partial(_draw, report), path)


def _draw(report: LatencyReport) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots()
    names = [each.name for each in report.rows]
    axes.bar(
        range(len(names)),
        [1e3 * each.seconds for each in report.rows],
        color=[COLOURS[r.what] for r in report.rows],
    )
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set_ylabel("milliseconds")
    axes.grid(axis="y", alpha=0.3)
    axes.set_title(f"One expert of {report.model} ({report.dtype}) on {report.machine}, {report.source}")
    return figure
