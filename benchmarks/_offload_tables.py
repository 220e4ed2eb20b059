"""Results of offload_disk.py: the figures that have a bar, and all of them as tables for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

BARS = {
    "step over (needed bytes / disk bandwidth)": ("at most", 1.10),
    "bytes read over needed": ("at most", 1.02),
    "page cache: Accelerate's step over ours": ("at least", 3.0),
    "resident, batch 1: Hugging Face's step over ours": ("at least", 1.2),
    "resident, batch 16: Hugging Face's step over ours": ("at least", 1.2),
}


def summary(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures that have a bar, with it."""
    values: dict[str, float] = {}
    names = iter(BARS)
    if "disk" in results:
        best = min(results["disk"]["policies"], key=lambda policy: policy["step_seconds"])
        values = {next(names): best["step_over_disk"], next(names): best["read_over_needed"]}
    keys = dict(
        zip(
            list(BARS)[2:],
            (("page_cache",), ("resident", "batch 1"), ("resident", "batch 16")),
            strict=True,
        )
    )
    for name, path in keys.items():
        figures: Any = results
        for key in path:
            figures = figures.get(key, {})
        if "step_ratio" in figures:
            values[name] = figures["step_ratio"]
    return {
        name: {"value": value, "bar": f"{BARS[name][0]} {BARS[name][1]}", "reached": reached(name, value)}
        for name, value in values.items()
    }


def reached(name: str, value: float) -> bool:
    """Whether a figure is on the right side of its bar."""
    sense, bar = BARS[name]
    return value <= bar if sense == "at most" else value >= bar


def tables(results: dict[str, Any]) -> Iterable[Table]:
    """All figures for people."""
    if "disk" in results:
        table = Table(
            "policy", "step", "over disk", "read/needed", "disk lane", "needed", "disk", title="disk"
        )
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
    resident = {
        f"resident, {key}": value
        for key, value in results.get("resident", {}).items()
        if key.startswith("batch")
    }
    for title, part in {"page cache": results.get("page_cache"), **resident}.items():
        if part:
            table = Table("", "prefill", "decode step", title=title)
            for side in ("moesched", "hugging_face"):
                for name, one in part[side].items():
                    times = [f"{one[f'{what}_seconds'] * 1e3:.1f} ms" for what in ("prefill", "step")]
                    table.add_row(f"{side}: {name}", *times)
            if "most_any_could_reach" in part:
                table.caption = (
                    f"{part['touched_bytes'] / 1e6:,.0f} MB touched, read at best at "
                    f"{part['memory_bytes_per_second'] / 1e9:.1f} GB/s in {part['fastest_step_seconds'] * 1e3:.1f} ms: "
                    f"the most that any implementation could reach is {part['most_any_could_reach']:.2f}"
                )
            if "left_out" in part:
                table.caption = f"Hugging Face left out: {part['left_out']}"
            yield table
    table = Table("figure", "value", "bar", "", title="summary")
    for name, row in results["summary"].items():
        table.add_row(name, f"{row['value']:.3f}", row["bar"], "reached" if row["reached"] else "missed")
    yield table
