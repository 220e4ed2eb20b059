"""Decoding with weights on the disk: steps against what the disk allows.

16 sequences, and one alone, of a random mixtral-0.8b, which is written to the cache folder once; 40 % of the weights'
bytes as memory, the files read past the page cache. Each run of a policy lies between two measurements of the disk: the
same pages read into the same sort of memory, with nothing else to do, by one thread and by two; the better counts. A
step is held against (bytes that the policy read / disk bandwidth). Read is what the schedule fetched in the step, in
whole blocks of the disk, checked against the reader's own count over the run. Needed are the weights that the step
touched, as its routing says, but for the pages that the plan keeps.

Other programs run the same model in against_peers.py. `cores_of_others` says how many cores other processes kept busy
meanwhile (Linux): with more than a few hundredths, the figures are those of a fight for the cores.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.record.benchmark import Benchmark, progress
from benchmarks.record.claims import Claim, Result
from benchmarks.shared.decoding import PROMPT_TOKENS, Decoded, Model, decode
from benchmarks.shared.reading import disk_bandwidth
from moesched.calibration.other_load import OtherLoad
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.random_model import write_random_model
from moesched.system.cache import cache_folder

MODEL = "mixtral-0.8b"
PARTS = ("disk",)
CASES: tuple[tuple[int, str, int], ...] = (
    (16, "layer_streaming", 16),
    (16, "cgopipe", 16),
    (16, "cgopipe", 8),
    (16, "expert_streaming", 16),
    (1, "expert_cache", 1),
    (1, "lru_offload", 1),
    (1, "prefetch_gate", 1),
    (1, "fate", 1),
)
"""Sequences of the batch, policy, sequences of a micro-batch."""
MOST_OVER_DISK = {16: 1.10, 1: 1.20}
"""Bars of the fastest policy's step over (bytes read / disk bandwidth), by batch."""
MOST_OVER_NEEDED = 1.02


def part_disk(model: Model, rounds: int, advance: Callable[[str], None]) -> dict[str, Any]:
    """Each policy between two measurements of the disk, several times."""
    runs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    disk: list[dict[str, float]] = []
    advance("the disk")
    before = best_of(disk, disk_bandwidth(model))
    for _ in range(rounds):
        for index, (batch, policy, micro_batch) in enumerate(CASES):
            advance(f"batch {batch}: {policy}, micro-batches of {micro_batch}")
            decoded = decode(model, policy, batch, micro_batch, model.budget)
            after = best_of(disk, disk_bandwidth(model))
            runs[index].append(disk_figures(decoded, (before + after) / 2))
            before = after
    policies = []
    for index, (batch, policy, micro_batch) in enumerate(CASES):
        name = {"batch_size": batch, "policy": policy, "micro_batch_size": micro_batch}
        policies.append({**name, **medians(runs[index]), "runs": runs[index]})
    return {"disk_bytes_per_second": disk, "policies": policies}


def best_of(disk: list[dict[str, float]], rates: dict[str, float]) -> float:
    """Note the rates and return the highest."""
    disk.append(rates)
    return max(rates.values())


def disk_figures(decoded: Decoded, bandwidth: float) -> dict[str, Any]:
    """One run against the disk that was measured around it."""
    plan, report = decoded.plan, decoded.report
    return {
        "step_seconds": median(decoded.steps),
        "disk_bytes_per_second": bandwidth,
        "needed_bytes": median(decoded.needed),
        "read_bytes": median(decoded.read),
        "step_over_disk": sum(decoded.steps) * bandwidth / sum(decoded.read),
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


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median of each figure over the runs."""
    return {
        name: median(one[name] for one in runs)
        for name, value in runs[0].items()
        if not isinstance(value, list)
    }


def measure(model: Model, rounds: int) -> dict[str, Any]:
    """Run all policies under a progress bar."""
    columns = TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # Refreshed by hand: a thread that draws ten times a second would show in the figures.
    with Progress(*columns, console=progress, auto_refresh=False) as bars:
        bar = bars.add_task("", total=1 + rounds * len(CASES))
        done = -1

        def advance(what: str) -> None:
            nonlocal done
            done += 1
            bars.update(bar, completed=done, description=what, refresh=True)

        others = OtherLoad()
        found = part_disk(model, rounds, advance)
        advance("done")
    return {"disk": {**found, "cores_of_others": others.cores()}}


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


def claims(result: Result) -> Iterator[Claim]:
    """Decoding against the disk."""
    for name, bar in result["summary"].items():
        if not name.endswith("disk bandwidth)"):
            continue
        limit = str(bar["bar"]).replace("at most", "≤")
        yield Claim(f"disk offloading: {name}", f"{bar['value']:.3f}", limit, bar["reached"])


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    packages=("torch",),
    parts=PARTS,
    rounds=3,
    rounds_help="runs of each policy; figures are medians",
)
BENCHMARK.parser.add_argument("--model", type=Path, default=cache_folder() / MODEL, metavar="DIR")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the JSON."""
    options = BENCHMARK.parse(arguments)
    if not options.model.exists():
        progress.print(f"writing a random {MODEL} to {options.model}")
        write_random_model(MODEL, options.model)
    checkpoint = open_checkpoint(options.model)
    model = Model(options.model, checkpoint, weight_layout(checkpoint.config))
    started = time.perf_counter()
    results = measure(model, options.rounds)
    results["summary"] = summary(results)
    return BENCHMARK.write(
        {
            "model": checkpoint.config.name,
            "weight_bytes": model.weight_bytes,
            "budget_bytes": model.budget,
            "prompt_tokens": PROMPT_TOKENS,
            "rounds": options.rounds,
            "seconds": time.perf_counter() - started,
            **results,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
