"""The figures of gpu_hour.py: what is kept of a run's report."""

from __future__ import annotations

from statistics import median
from typing import Any

Result = dict[str, Any]
KEPT = (
    "policy",
    "machine",
    "plan",
    "budget_bytes",
    "peak_bytes",
    "load_seconds",
    "wall_seconds",
    "throughput_tokens_per_second",
)
LINK = "host->gpu"
HOST_ATTENTION = "cpu_attention"
LOADING = "load"
"""The kind of task that loads weights that stay, before the first step."""


def of_run(report: Result) -> Result:
    """The figures of `moesched run --json`: its steps, the link's rate in them, and what was to be expected."""
    steps, length = report["step_seconds"], report["plan"]["new_tokens"]
    prefills = steps[::length]
    decodes = [seconds for number, seconds in enumerate(steps) if number % length]
    typical = median(decodes)
    kinds = {(kind["kind"], kind["lane"]): kind for kind in report["kinds"]}
    moved = sum(kind["bytes"] for (name, lane), kind in kinds.items() if lane == LINK and name != LOADING)
    first = [decodes[0] / typical, *([prefills[0] / median(prefills[1:])] if prefills[1:] else [])]
    return {
        **{name: report[name] for name in KEPT},
        "total_seconds": sum(steps),
        "prefill_seconds": {"first": prefills[0], "last": prefills[-1]},
        "decode_step_seconds": {"first": decodes[0], "median": typical, "least": min(decodes)},
        "first_over_median": max(first),
        "link_bytes_per_second": moved / len(steps) / typical,
        "host_attention_bytes_per_second": _rate([kinds[key] for key in kinds if key[0] == HOST_ATTENTION]),
        "lanes": {name: use["busy_seconds"] for name, use in report["lanes"].items()},
        "kinds": {
            name: {key: kind[key] for key in ("lane", "tasks", "seconds", "gigabytes_per_second")}
            for (name, _), kind in kinds.items()
        },
        "weights_home": report.get("weights_home"),
        "expected": expectation(report),
        "no_expectation": report.get("no_expectation"),
    }


def _rate(kinds: list[Result]) -> float | None:
    """Bytes per second of tasks."""
    seconds = sum(kind["seconds"] for kind in kinds)
    return sum(kind["bytes"] for kind in kinds) / seconds if seconds else None


def expectation(report: Result) -> Result | None:
    """The predicted total, and whether the measured throughput is in the prediction's band, if it has one."""
    expected = report.get("expected")
    if expected is None:
        return None
    total = sum(expected["step_seconds"])
    low, _, high = (expected.get("band") or {}).get("throughput_tokens_per_second", (None,) * 3)
    return {
        "total_seconds": total,
        "over_measured": total / sum(report["step_seconds"]),
        "lanes": {name: use["busy_seconds"] for name, use in expected["lanes"].items()},
        "inside_band": None if low is None else low <= report["throughput_tokens_per_second"] <= high,
    }
