"""Decoding with weights on the disk, and without: steps against what the disk allows, and against Hugging Face.

A random mixtral-0.8b is written to the cache folder once. About five minutes, in three parts:

disk        16 sequences, 40 % of the weights' bytes as memory, the files read past the page cache. Each run of a policy
            lies between two measurements of the disk: the same pages read into the same sort of memory, with nothing
            else to do, by one thread and by two; the better counts. A step is held against
            (needed bytes / disk bandwidth). Needed are the weights that the step touched, as its routing says, but for
            the pages that the plan keeps. Read is what the schedule fetched in the step, in whole blocks of the disk,
            checked against the reader's own count over the run.
page_cache  The same budget and prompts with the files in the page cache, against Accelerate's disk offload with the
            budget as its `max_memory` for weights alone: activations, cache and buffers come on top of it, where ours
            lie within. Neither copies what streams: Accelerate opens safetensors as mapped memory, and so do we here.
            Both sides' files are dropped from the page cache and read into it once. How fast all cores together read
            the mapped files bounds every implementation: no step is faster than the weights that it touches are read.
            `most_any_could_reach` is Accelerate's step over that bound.
resident    All weights in memory, batches of 1 and 16, against Hugging Face with both of its expert settings.

Ours and theirs run in turn in one process, on the same weights and prompts, decoding greedily. Figures are medians.
`cores_of_others` says how many cores other processes kept busy meanwhile (Linux): with more than a few hundredths, the
figures are those of a fight for the cores.
Without transformers and accelerate the comparisons are left out, and the result says so.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _decoding import COUNTED, PROMPT_TOKENS, STEPS, Decoded, Model, decode
from _hugging_face import EXPERT_SETTINGS, HuggingFace, decode_from_disk, missing_peers
from _offload_tables import summary, tables
from _options import EXECUTION, Benchmark, progress
from _reading import disk_bandwidth, memory_bandwidth, warm
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moesched.calibration.other_load import OtherLoad
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.random_model import write_random_model
from moesched.system.cache import cache_folder

MODEL = "mixtral-0.8b"
PARTS = ("disk", "page_cache", "resident")
BATCH = 16
POLICIES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("layer_streaming", 16, {}),
    ("cgopipe", 16, {}),
    ("cgopipe", 8, {}),
    ("expert_streaming", 16, {}),
)
"""Name, sequences of a micro-batch, settings."""


def part_disk(model: Model, rounds: int, advance: Callable[[str], None]) -> dict[str, Any]:
    """Each policy between two measurements of the disk, several times."""
    runs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    disk: list[dict[str, float]] = []
    advance("the disk")
    before = best_of(disk, disk_bandwidth(model))
    for _ in range(rounds):
        for index, (policy, micro_batch, settings) in enumerate(POLICIES):
            advance(f"{policy}, micro-batches of {micro_batch}")
            decoded = decode(model, policy, BATCH, micro_batch, settings, budget=model.budget)
            after = best_of(disk, disk_bandwidth(model))
            runs[index].append(disk_figures(decoded, (before + after) / 2))
            before = after
    policies = []
    for index, (policy, micro_batch, settings) in enumerate(POLICIES):
        name = {"policy": policy, "micro_batch_size": micro_batch, "settings": settings}
        policies.append({**name, **medians(runs[index]), "runs": runs[index]})
    return {"disk_bytes_per_second": disk, "policies": policies}


def best_of(disk: list[dict[str, float]], rates: dict[str, float]) -> float:
    """Note the rates and return the highest."""
    disk.append(rates)
    return max(rates.values())


def disk_figures(decoded: Decoded, bandwidth: float) -> dict[str, Any]:
    """One run against the disk that was measured around it."""
    plan, report = decoded.plan, decoded.report
    needed, seconds = median(decoded.needed), median(decoded.steps)
    return {
        "step_seconds": seconds,
        "disk_bytes_per_second": bandwidth,
        "needed_bytes": needed,
        "read_bytes": median(decoded.read),
        "step_over_disk": median(
            step * bandwidth / warmed for step, warmed in zip(decoded.steps, decoded.needed, strict=True)
        ),
        "read_over_needed": sum(decoded.read) / sum(decoded.needed),
        "disk_lane_utilization": decoded.utilization["disk->host"],
        "accelerator_lane_utilization": decoded.utilization["accelerator"],
        "load_seconds": report.load_seconds,
        "prefill_seconds": report.prefill_seconds,
        "kept_bytes": sum(page.nbytes for fixed in plan.weights.resident for page in fixed.pages()),
        "buffer_bytes": sum(len(pool.slots) * pool.slot_bytes for pool in plan.weights.pools),
        "peak_bytes": report.peak_bytes["host"],
        "steps": decoded.steps,
    }


def part_page_cache(model: Model, rounds: int, advance: Callable[[str], None]) -> dict[str, Any]:
    """Ours and Accelerate's disk offload, both reading what the page cache holds."""
    warm(model.directory)
    peers = missing_peers()
    ours: dict[str, list[dict[str, float]]] = defaultdict(list)
    theirs: dict[str, list[dict[str, float]]] = defaultdict(list)
    bandwidths, warmed = [], []
    for _ in range(rounds):
        bandwidths.append(memory_bandwidth(model))
        for policy, micro_batch, settings in POLICIES:
            name = f"{policy}, micro-batches of {micro_batch}"
            advance(f"{name}, page cache")
            decoded = decode(model, policy, BATCH, micro_batch, settings, budget=model.budget, direct=False)
            share = {"transfer_share": decoded.utilization["disk->host"]}
            ours[name].append(timed(decoded.report.step_seconds, COUNTED) | share)
            warmed += decoded.warmed
        for experts in EXPERT_SETTINGS if peers is None else ():
            advance(f"Accelerate, {experts}, page cache")
            prefill, steps = decode_from_disk(model, experts, model.prompts(BATCH), STEPS)
            theirs[experts].append(timed([prefill, *steps], COUNTED))
    figures = compared(ours, theirs, peers)
    figures |= {"memory_bytes_per_second": max(bandwidths), "touched_bytes": median(warmed)}
    figures["fastest_step_seconds"] = figures["touched_bytes"] / figures["memory_bytes_per_second"]
    if theirs:
        fastest_theirs = min(runs["step_seconds"] for runs in figures["hugging_face"].values())
        figures["most_any_could_reach"] = fastest_theirs / figures["fastest_step_seconds"]
    return figures


def part_resident(model: Model, rounds: int, advance: Callable[[str], None]) -> dict[str, Any]:
    """Everything in memory, at two batch sizes."""
    missing = missing_peers()
    peers = {} if missing else {experts: HuggingFace(model.directory, experts) for experts in EXPERT_SETTINGS}
    results = {}
    for batch in (1, BATCH):
        ours: dict[str, list[dict[str, float]]] = defaultdict(list)
        theirs: dict[str, list[dict[str, float]]] = defaultdict(list)
        for _ in range(rounds):
            advance(f"resident, batch {batch}")
            report = decode(model, "resident", batch, batch, {}, steps=13).report
            ours["resident"].append(timed(report.step_seconds, slice(1, None)))
            for experts, peer in peers.items():
                prefill, steps = peer.decode(model.prompts(batch), 13)
                theirs[experts].append(timed([prefill, *steps], slice(1, None)))
        results[f"batch {batch}"] = compared(ours, theirs, missing)
    return results


def timed(seconds: Sequence[float], counted: slice) -> dict[str, float]:
    """A run's prefill and its median decode step, of those that count."""
    return {"prefill_seconds": seconds[0], "step_seconds": median(seconds[1:][counted])}


def compared(
    ours: dict[str, list[dict[str, float]]], theirs: dict[str, list[dict[str, float]]], missing: str | None
) -> dict[str, Any]:
    """Medians over the rounds, and the best of ours against the best of theirs."""
    figures: dict[str, Any] = {
        "moesched": {name: {**medians(runs), "runs": runs} for name, runs in ours.items()},
        "hugging_face": {name: {**medians(runs), "runs": runs} for name, runs in theirs.items()},
    }
    if missing is not None:
        return {**figures, "left_out": missing}
    for what in ("step", "prefill"):
        ours_best, theirs_best = (
            min(runs[f"{what}_seconds"] for runs in figures[side].values())
            for side in ("moesched", "hugging_face")
        )
        figures[f"{what}_ratio"] = theirs_best / ours_best
    return figures


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median of each figure over the runs."""
    return {
        name: median(one[name] for one in runs)
        for name, value in runs[0].items()
        if not isinstance(value, list)
    }


def steps_of(part: str, rounds: int) -> int:
    """The steps of the progress bar that a part has."""
    if part == "disk":
        return 1 + rounds * len(POLICIES)
    if part == "page_cache":
        return rounds * (len(POLICIES) + (len(EXPERT_SETTINGS) if missing_peers() is None else 0))
    return 2 * rounds


def measure(model: Model, parts: Sequence[str], rounds: int) -> dict[str, Any]:
    """Run the parts under a progress bar."""
    functions = {"disk": part_disk, "page_cache": part_page_cache, "resident": part_resident}
    columns = TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    results: dict[str, Any] = {}
    # Refreshed by hand: a thread that draws ten times a second would show in the figures.
    with Progress(*columns, console=progress, auto_refresh=False) as bars:
        bar = bars.add_task("", total=sum(steps_of(part, rounds) for part in parts))
        done = -1

        def advance(what: str) -> None:
            nonlocal done
            done += 1
            bars.update(bar, completed=done, description=what, refresh=True)

        for part in parts:
            others = OtherLoad()
            results[part] = functions[part](model, rounds, advance)
            results[part]["cores_of_others"] = others.cores()
            gc.collect()
        advance("done")
    return results


BENCHMARK = Benchmark(
    __doc__,
    "offload_disk",
    measures=("benchmarks/_decoding.py", "benchmarks/_hugging_face.py", *EXECUTION),
    packages=("torch", *(() if missing_peers() else ("transformers", "accelerate"))),
    parts=PARTS,
    rounds=3,
    rounds_help="runs of each policy; figures are medians",
)
BENCHMARK.parser.add_argument("--model", type=Path, default=cache_folder() / MODEL, metavar="DIR")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write the JSON."""
    options = BENCHMARK.parse(arguments)
    if not options.model.exists():
        progress.print(f"writing a random {MODEL} to {options.model}")
        write_random_model(MODEL, options.model)
    checkpoint = open_checkpoint(options.model)
    model = Model(options.model, checkpoint, weight_layout(checkpoint.config))
    started = time.perf_counter()
    results = measure(model, options.only, options.rounds)
    results["summary"] = summary(results)
    for table in tables(results):
        progress.print(table)
    BENCHMARK.write(
        {
            "model": checkpoint.config.name,
            "weight_bytes": model.weight_bytes,
            "budget_bytes": model.budget,
            "batch_size": BATCH,
            "prompt_tokens": PROMPT_TOKENS,
            "rounds": options.rounds,
            "seconds": time.perf_counter() - started,
            **results,
        }
    )


if __name__ == "__main__":
    main()
