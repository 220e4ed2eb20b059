"""Tables of docs/performance.md on GPUs: the rows of gpu_hour.py, beside their limits and other programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.record.tables import markdown

Result = dict[str, Any]
OTHERS = ("llama.cpp", "Hugging Face")
OWN_PART = "prompts"
PHASES = ("prefill", "decode")


def tables(result: Result) -> dict[str, str]:
    """The tables of docs/performance.md; tiny models on a CPU have none."""
    if result["small"] or "limits" not in result["rows"]:
        return {}
    return {"gpu-runs": runs(result), "gpu-beside": beside(result), "gpu-choices": choices(result)}


def runs(result: Result) -> str:
    """A line for each of our runs."""
    limit = result["rows"]["limits"]["to_gpu"]
    columns = [
        *("run", "decode step, ms", "link, GB/s (share of its limit)", "attention on the host, GB/s"),
        *("first step over the median", "predicted total over measured"),
    ]
    lines = [[name, *_run(row, limit)] for name, row in result["rows"].items() if "policy" in row]
    return markdown(columns, lines)


def _run(row: Result, limit: float) -> Iterator[str]:
    """The cells of a run; empty where nothing was measured."""
    yield f"{1e3 * row['decode_step_seconds']['median']:,.1f}"
    rate = row.get("link_bytes_per_second")
    yield f"{rate / 1e9:.1f} ({rate / limit:.2f})" if rate else ""
    attention = row.get("host_attention_bytes_per_second")
    yield f"{attention / 1e9:.0f}" if attention else ""
    first = row.get("first_over_median")
    yield f"{first:.1f}" if first else ""
    expected = row.get("expected")
    yield f"{expected['over_measured']:.2f}" if expected else ""


def beside(result: Result) -> str:
    """Tokens per second of everybody at each batch, and what the machine's own rates allow."""
    rows = result["rows"]
    ours = {
        batch: rates
        for row in rows.values()
        if row["part"] == OWN_PART
        for batch, rates in row["batches"].items()
    }
    lines = []
    for batch in sorted(ours, key=int):
        for phase in PHASES:
            key = f"{phase}_tokens_per_second"
            cells = [ours[batch], *(rows.get(name, {}).get("batches", {}).get(batch, {}) for name in OTHERS)]
            shown = [f"{each[key]:,.0f}" if key in each else "" for each in cells]
            lines.append([batch, phase, *shown, f"{_most(result, batch, phase):,.0f}"])
    return markdown(["batch", "tokens/s", "moesched", *OTHERS, "at most possible"], lines)


def _most(result: Result, batch: str, phase: str) -> float:
    """Tokens per second at the rate of the GPU's memory in decode, and of its products in prefill."""
    model, limits = result["models"]["model"], result["rows"]["limits"]
    if phase == "decode":
        return float(int(batch) * limits["gpu_memory"] / model["bytes_of_a_step"][batch])
    return float(limits["gpu_flops"]["bfloat16"] / model["flops_of_a_token"])


def choices(result: Result) -> str:
    """The ways that the device could take; the times are milliseconds."""
    row = result["rows"].get("choices of the device", {})
    return markdown(["choice", "way", "ms, or GB/s of reads"], list(_choices(row)))


def _choices(row: Result) -> Iterator[list[Any]]:
    for name, found in row.get("attention", {}).items():
        told = (
            found if isinstance(found, str) else f"{found['typical']} (the first call {found['first']:,.0f})"
        )
        yield ["attention", name, told]
    for choice in ("launches", "alignment", "reads"):
        for name, value in row.get(choice, {}).items():
            if not isinstance(value, bool):
                yield [choice, name, value if isinstance(value, str) else f"{value:.3g}"]
