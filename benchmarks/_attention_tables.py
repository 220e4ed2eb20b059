"""The table about attention in decode, and what of its bars a machine allows."""

from __future__ import annotations

from typing import Any

from _tables import markdown

Result = dict[str, Any]


def attention(result: Result) -> str:
    """A line for each row: the limit, the kernel's share of it, and how often torch fits into both."""
    lines = [
        [
            name,
            f"{limit(row):.1f}",
            f"{row['kernel_gbs']:.1f} ({row['fraction_of_limit']:.0%})",
            f"{row['times_torch']:.1f}x",
            f"{limit(row) / row['torch_gbs']:.1f}x",
        ]
        for name, row in result.get("rows", {}).items()
    ]
    return markdown(["context", "limit, GB/s", "kernel, GB/s", "over torch", "at most possible"], lines)


def limit(row: Result) -> float:
    """The smaller limit of a row, in GB/s."""
    return float(min(row["read_limit_gbs"], row["compute_limit_gbs"]))
