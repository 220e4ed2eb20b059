"""The claims of docs/results.md on GPUs: the bars of gpu_hour.py, as far as their rows were measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from benchmarks.record.claims import Claim, Result, all_of, at_least, at_most

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
ORDERED = "ten policies in order"
TIE = 0.05
"""Measured totals that are closer than this are in no order: one run of each is no more certain."""
TOTAL, LANE = 0.15, 0.20
LEAST_LANE = 0.05
"""Share of a run's time from which a lane counts: what is shorter says nothing about the run."""
OTHERS = ("llama.cpp", "Hugging Face")
DECODE, PREFILL = "decode_tokens_per_second", "prefill_tokens_per_second"
DECODE_BARS = {"1": 0.9, "16": 1.5, "64": 2.0}


def claims(result: Result) -> Iterator[Claim]:
    """All of them; tiny models on a CPU have none."""
    if result["small"]:
        return
    rows = result["rows"]
    yield from _streaming(rows)
    yield from _large(rows)
    yield from _host_attention(rows)
    yield from _predictions(rows)
    yield from _families(rows)
    yield from _order(rows.get(ORDERED, {}).get("cases", []))
    yield from _beside(rows)
    yield from _share_of_bytes(result)


def _families(rows: dict[str, Any]) -> Iterator[Claim]:
    equal = [row["tokens_of_the_cpu"] for row in rows.values() if "tokens_of_the_cpu" in row]
    if equal:
        yield all_of(
            "models of other families on a GPU with the CPU's greedy tokens in float32",
            sum(equal),
            len(equal),
        )


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
    if limit := rows.get("limits", {}).get("to_gpu"):
        yield at_least(
            f"{LARGE}: the link's rate over its limit", row["link_bytes_per_second"] / limit, 0.85, "{:.2f}"
        )


def _host_attention(rows: dict[str, Any]) -> Iterator[Claim]:
    rates = [row.get("host_attention_bytes_per_second") for row in rows.values()]
    if measured := [rate for rate in rates if rate]:
        yield at_least("runs on a GPU: attention on the host, least", min(measured) / 1e9, 40, "{:.0f} GB/s")


def _predictions(rows: dict[str, Any]) -> Iterator[Claim]:
    runs = [rows[name] for name in PREDICTED if name in rows]
    if not runs:
        return
    told = [run["expected"] for run in runs if run["expected"]]
    right = [
        each for each in told if abs(each["over_measured"] - 1) <= 0.2 and each["inside_band"] is not False
    ]
    yield all_of("runs on a GPU whose total is predicted within 20 % and in its band", len(right), len(runs))
    worst = max(run["first_over_median"] for run in runs)
    yield at_most("runs on a GPU: the first step over the median one, worst", worst, 1.3, "{:.1f}x")


def _order(cases: Sequence[dict[str, Any]]) -> Iterator[Claim]:
    """Predictions of policies on the same requests: their order, their totals, and their lanes."""
    told = [case for case in cases if case["expected"]]
    if not told:
        return
    right = [pair for pair in _apart(told) if _predicted(pair[0]) < _predicted(pair[1])]
    words = f"{M4}, 8 GB: ten policies"
    yield all_of(f"{words}, pairs that are in the predicted order", len(right), len(_apart(told)))
    near = [case for case in told if abs(case["expected"]["over_measured"] - 1) <= TOTAL]
    yield all_of(f"{words}, totals predicted within 15 %", len(near), len(cases))
    ratios = [
        case["expected"]["lanes"].get(name, 0.0) / seconds
        for case in told
        for name, seconds in case["lanes"].items()
        if seconds > LEAST_LANE * case["total_seconds"]
    ]
    close = [ratio for ratio in ratios if abs(ratio - 1) <= LANE]
    yield all_of(f"{words}, busy lanes predicted within 20 %", len(close), len(ratios))


def _apart(cases: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of which one was clearly faster, that one first."""
    by_speed = sorted(cases, key=lambda case: case["total_seconds"])
    return [
        (faster, slower)
        for faster, slower in combinations(by_speed, 2)
        if slower["total_seconds"] > (1 + TIE) * faster["total_seconds"]
    ]


def _predicted(case: dict[str, Any]) -> float:
    seconds: float = case["expected"]["total_seconds"]
    return seconds


def _beside(rows: dict[str, Any]) -> Iterator[Claim]:
    mine = {batch: rates for row in _named(rows, "prompts of 512") for batch, rates in row["batches"].items()}
    for batch, bar in DECODE_BARS.items():
        rivals = OTHERS[:1] if batch == "1" else OTHERS
        yield from _over(f"decode at batch {batch}", rows, mine, rivals, batch, DECODE, bar)
    largest = max(mine, key=int, default="")
    yield from _over(f"prompts of 512 at batch {largest}", rows, mine, OTHERS, largest, PREFILL, 1.0)
    halves = [1 / row["decode_step_seconds"]["median"] for row in _named(rows, "half, ") if "policy" in row]
    if halves and "half, llama.cpp" in rows:
        ratio = max(halves) / rows["half, llama.cpp"]["batches"]["1"][DECODE]
        yield at_least(f"{M4}, half of the experts on the host, over llama.cpp", ratio, 1.2, "{:.2f}x")


def _share_of_bytes(result: Result) -> Iterator[Claim]:
    row, limits = (result["rows"].get(name) for name in ("prompts of 512, batch 1", "limits"))
    if row and limits:
        limit = result["models"]["model"]["bytes_of_a_step"]["1"] / limits["gpu_memory"]
        share = 100 * limit / row["decode_step_seconds"]["median"]
        yield at_least(f"{M4}, resident: decode at batch 1, share of the bytes' limit", share, 65, "{:.0f} %")


def _over(
    words: str,
    rows: dict[str, Any],
    mine: dict[str, Any],
    rivals: Sequence[str],
    batch: str,
    rate: str,
    bar: float,
) -> Iterator[Claim]:
    """Our rate over that of the best of the others, as far as both were measured."""
    theirs = {name: rows.get(name, {}).get("batches", {}).get(batch, {}).get(rate) for name in rivals}
    measured = {name: value for name, value in theirs.items() if value}
    if measured and (own := mine.get(batch, {}).get(rate)):
        best = max(measured, key=lambda name: measured[name])
        yield at_least(f"{M4}, resident: {words}, over {best}", own / measured[best], bar, "{:.2f}x")


def _named(rows: dict[str, Any], begin: str) -> list[Any]:
    return [row for name, row in rows.items() if name.startswith(begin)]
