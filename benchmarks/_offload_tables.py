"""Results of offload_disk.py: the figures that have a bar, and all of them as tables for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

MOST_OVER_DISK = {16: 1.10, 1: 1.20}
"""Bars of the fastest policy's step over (bytes read / disk bandwidth), by batch."""
MOST_OVER_NEEDED = 1.02


def summary(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of the fastest policy that have a bar, with it."""
    rows = {}
    for batch, bar in MOST_OVER_DISK.items():
        cases = (case for case in results["disk"]["policies"] if case["batch_size"] == batch)
        best = min(cases, key=lambda case: case["step_seconds"])
        name = f"batch {batch}, {best['policy']}"
        rows[f"{name}: step over (bytes read / disk bandwidth)"] = at_most(best["step_over_disk"], bar)
        rows[f"{name}: bytes read over needed"] = at_most(best["read_over_needed"], MOST_OVER_NEEDED)
    return rows


def at_most(value: float, bar: float) -> dict[str, Any]:
    """A figure beside its bar."""
    return {"value": value, "bar": f"at most {bar}", "reached": value <= bar}


def tables(results: dict[str, Any]) -> Iterable[Table]:
    """All figures for people."""
    table = Table(
        "batch", "policy", "step", "over disk", "read/needed", "disk lane", "needed", "disk", title="disk"
    )
    for one in results["disk"]["policies"]:
        table.add_row(
            f"{one['batch_size']}",
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
