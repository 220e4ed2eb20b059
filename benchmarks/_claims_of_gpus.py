"""The claims of docs/results.md on GPUs: the bars of gpu_hour.py, as far as their rows were measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _claim import Claim, Result, all_of, at_least, at_most

M4 = "a GPU, Mixtral 8x7B with 4 layers"
LARGE = "a GPU with 24 GB, 16 layers, 2,048 requests, `cgopipe`"
PREDICTED = (
    "resident, batch 64",
    "resident, batch 1",
    "layer_streaming",
    "flexgen",
    "cgopipe",
    "cgopipe, traced",
)
"""The runs that are predicted."""
LINK_BARS = {"": 0.90, ", staged": 0.70}
DECODE_BARS = {"1": 0.9, "16": 1.5, "64": 2.0}


def gpu_hour(result: Result) -> Iterator[Claim]:
    """All of them; tiny models on a CPU have none."""
    if result["small"]:
        return
    rows = result["rows"]
    yield from _streaming(rows)
    yield from _large(rows)
    yield from _predictions(rows)
    yield from _beside(rows)
    yield from _share_of_bytes(result)


def _streaming(rows: dict[str, Any]) -> Iterator[Claim]:
    limit = rows.get("limits", {}).get("to_gpu")
    for how, bar in LINK_BARS.items():
        for policy in ("layer_streaming", "flexgen", "cgopipe"):
            if limit and (row := rows.get(policy + how)):
                words = f"{M4}, 8 GB, `{policy}`{how}: the link's rate over its limit"
                yield at_least(words, row["link_bytes_per_second"] / limit, bar, "{:.2f}")
    loads = [each["load_seconds"] for name, each in rows.items() if name in PREDICTED]
    if loads:
        yield at_most(f"{M4}: loading it from the page cache", max(loads), 1.5, "{:.2f} s")
    if row := rows.get("resident, batch 64"):
        step = 1e3 * row["decode_step_seconds"]["median"]
        yield at_most(f"{M4}, resident: a decode step of 64 requests", step, 12.0, "{:.1f} ms")


def _large(rows: dict[str, Any]) -> Iterator[Claim]:
    row, other = rows.get("large, cgopipe"), rows.get("large, Accelerate")
    if row is None:
        return
    if other is not None:
        ratio = row["throughput_tokens_per_second"] / other["throughput_tokens_per_second"]
        yield at_least(f"{LARGE}: throughput over Accelerate at its best batch", ratio, 20, "{:.1f}x")
    if row["host_attention_bytes_per_second"]:
        rate = row["host_attention_bytes_per_second"] / 1e9
        yield at_least(f"{LARGE}: attention on the host", rate, 40, "{:.0f} GB/s")
    if limit := rows.get("limits", {}).get("to_gpu"):
        yield at_least(
            f"{LARGE}: the link's rate over its limit", row["link_bytes_per_second"] / limit, 0.85, "{:.2f}"
        )


def _predictions(rows: dict[str, Any]) -> Iterator[Claim]:
    runs = [rows[name] for name in PREDICTED if name in rows]
    if not runs:
        return
    told = [run["expected"] for run in runs if run["expected"]]
    right = [each for each in told if abs(each["over_measured"] - 1) <= 0.2 and each["inside_band"] is not False]
    yield all_of("runs on a GPU whose total is predicted within 20 % and in its band", len(right), len(runs))
    worst = max(run["first_over_median"] for run in runs)
    yield at_most("runs on a GPU: the first step over the median one, worst", worst, 1.3, "{:.1f}x")


def _beside(rows: dict[str, Any]) -> Iterator[Claim]:
    mine = {batch: rate for row in _named(rows, "beside, batch") for batch, rate in row["batches"].items()}
    others = {
        name: rows[f"beside, {name}"]["batches"]
        for name in ("llama.cpp", "Hugging Face")
        if f"beside, {name}" in rows
    }
    for batch, bar in DECODE_BARS.items():
        who = [name for name in others if batch in others[name] and (batch != "1" or name == "llama.cpp")]
        if batch in mine and who:
            yield _over(f"decode at batch {batch}", "decode", mine[batch], batch, others, who, bar)
    largest = max(mine, key=int, default="")
    who = [name for name in others if largest in others[name]]
    if largest and who:
        yield _over(f"prompts of 512 at batch {largest}", "prefill", mine[largest], largest, others, who, 1.0)
    halves = [1 / row["decode_step_seconds"]["median"] for row in _named(rows, "half, ") if "policy" in row]
    if halves and "half, llama.cpp" in rows:
        ratio = max(halves) / rows["half, llama.cpp"]["batches"]["1"]["decode_tokens_per_second"]
        yield at_least(f"{M4}, half of the experts on the host, over llama.cpp", ratio, 1.2, "{:.2f}x")


def _share_of_bytes(result: Result) -> Iterator[Claim]:
    row, limits = (result["rows"].get(name) for name in ("beside, batch 1", "limits"))
    if row and limits:
        limit = result["models"]["model"]["bytes_of_a_step"]["1"] / limits["gpu_memory"]
        share = 100 * limit / row["decode_step_seconds"]["median"]
        yield at_least(f"{M4}, resident: decode at batch 1, share of the bytes' limit", share, 65, "{:.0f} %")


def _over(
    words: str, phase: str, mine: Any, batch: str, others: dict[str, Any], who: list[str], bar: float
) -> Claim:
    """Our rate over the best of the others."""
    name = f"{phase}_tokens_per_second"
    best = max(who, key=lambda each: others[each][batch][name])
    ratio = mine[name] / others[best][batch][name]
    return at_least(f"{M4}, resident: {words}, over {best}", ratio, bar, "{:.2f}x")


def _named(rows: dict[str, Any], begin: str) -> list[Any]:
    return [row for name, row in rows.items() if name.startswith(begin)]
