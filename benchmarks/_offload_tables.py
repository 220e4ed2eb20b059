"""Results of offload_disk.py: the figures that have a bar, and all of them as tables for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

BARS = {
    "step over (needed bytes / disk bandwidth)": ("at most", 1.10),
    "bytes read over needed": ("at most", 1.02),
}


def summary(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures that have a bar, with it."""
    best = min(results["disk"]["policies"], key=lambda policy: policy["step_seconds"])
    values = zip(BARS, (best["step_over_disk"], best["read_over_needed"]), strict=True)
    return {
        name: {"value": value, "bar": f"{BARS[name][0]} {BARS[name][1]}", "reached": reached(name, value)}
        for name, value in values
    }


def reached(name: str, value: float) -> bool:
    """Whether a figure is on the right side of its bar."""
    sense, bar = BARS[name]
    return value <= bar if sense == "at most" else value >= bar


def tables(results: dict[str, Any]) -> Iterable[Table]:
    """All figures for people."""
    table = Table("policy", "step", "over disk", "read/needed", "disk lane", "needed", "disk", title="disk")
    for one in results["disk"]["policies"]:
        table.add_row(
            f"{one['policy']}, {one['micro_batch_size']}",
            f"{one['step_seconds'] * 1e3:.0f} ms",
            f"{one['step_over_disk']:.3f}",
            f"{one['read_over_needed']:.3f}",
            f"{one['disk_lane_utilization']:.3f}",
            f"{one['needed_bytes'] / 1e6:,.0f} MB",
            f"{one['disk_bytes_per_second'] / 1e9:.2f} GB/s",
        )
    yield table
    table = Table("figure", "value", "bar", "", title="summary")
    for name, row in results["summary"].items():
        table.add_row(name, f"{row['value']:.3f}", row["bar"], "reached" if row["reached"] else "missed")
    yield table
