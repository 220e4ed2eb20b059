"""The CPU expert kernel beside the memory's bandwidth and beside torch, alone and in whole decode steps.

Alone: one expert of Mixtral-8x7B's shape in bfloat16, for several numbers of rows; each call takes another expert;
together they are at least four times the last-level cache. The bandwidth is that of a sum over a large
array on all cores, taken right before and right after each call. Torch has two ways: one expert on all cores, and as
many experts as there are cores, each on a core of its own, as the device shares them out; the faster one counts, and
weights are packed where that pays; it takes turns with the kernel too. What two neighbours are to each other is taken
in each turn, and the medians of that count: the bandwidth of a shared machine moves more within a minute than what is
measured here.

Others: the instruction sets that this processor has beside the best one, for up to 4 rows, without torch.

In whole: `mixtral-0.8b`, all weights in memory, batches of 1 and of 16, with the kernel and with `kernel=torch`, in
turn, and medians of each turn's ratio again.

Parts that are not measured stay in the result file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from _options import Benchmark, track

from moesched.devices.native.kernels import NativeKernels
from moesched.devices.native.library import instruction_sets
from moesched.devices.products.crossover import Shape, most_rows
from moesched.devices.products.linear import expert_ffn
from moesched.devices.products.packed_weights import pack, packing_pays
from moesched.devices.products.team import Team, use_cores
from moesched.jobs.run_model import run_model
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.system.cache import cache_folder
from moesched.system.cores import usable_cores

HIDDEN, WIDTH = 4096, 14336
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 2
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
MOST_ROWS_BY_STREAM = 4
LEAST_SHARE_OF_STREAM = 0.85
LEAST_DECODE_RATIO = 1.2
STREAM_BYTES = 256 << 20
MODEL = "mixtral-0.8b"
PROMPT = 8
NEW_TOKENS = {1: 48, 16: 5}
"""By batch size; torch takes long for large batches where the processor has no bfloat16."""

PARTS = ("alone", "others", "decode_1", "decode_16")
TORCHS = ("torch", "torch_shared")

Matrices = list[list[torch.Tensor]]


BENCHMARK = Benchmark(
    __doc__,
    "expert_kernel",
    measures=("devices",),
    packages=("torch",),
    parts=PARTS,
    rounds=9,
    rounds_help="turns of each number of rows; a third as many generations of each batch",
    keeps_parts=True,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print what came out, write the result."""
    options = BENCHMARK.parse(arguments)
    few = [rows for rows in ROWS if rows <= MOST_ROWS_BY_STREAM]
    best, *others = instruction_sets()
    found: dict[str, Any] = {}
    with torch.inference_mode():
        if "alone" in options.only:
            found["alone"] = measure_alone(best, ROWS, options.rounds)
        if "others" in options.only:
            found["others"] = {
                name: measure_alone(name, few, options.rounds, torchs=False) for name in others
            }
    for batch in NEW_TOKENS:
        if f"decode_{batch}" in options.only:
            found[f"decode_{batch}"] = measure_decode(batch, max(1, options.rounds // 3))
    figures = {
        "instructions": best,
        "most_rows": most_rows(best, Shape(WIDTH, HIDDEN)),
        "expert": {"hidden": HIDDEN, "width": WIDTH, "bytes": EXPERT_BYTES},
        "bars": {
            "share_of_stream_up_to_4_rows": LEAST_SHARE_OF_STREAM,
            "times_torch_up_to_16_rows": 1.0,
            "decode_ratio_at_batch_1": LEAST_DECODE_RATIO,
        },
    }
    stored = BENCHMARK.stored()
    BENCHMARK.write(figures | {part: stored[part] for part in PARTS if part in stored} | found)


# ---------------------------------------------------------------- alone


def measure_alone(
    variant: str, numbers: Sequence[int], turns: int, torchs: bool = True
) -> dict[str, dict[str, float]]:
    """By number of rows: bandwidths in GB/s, and their ratios.

    torchs: whether torch takes part.
    """
    count = max(usable_cores(), 2, -(-4 * last_level_cache() // EXPERT_BYTES))
    experts = [random_expert(seed) for seed in range(count)]
    kept = (
        [[[pack(matrix)] for [matrix] in expert] for expert in experts]
        if torchs and packing_pays()
        else experts
    )
    figures = {}
    with closing(NativeKernels(max(ROWS), variant)) as kernel, closing(Team(usable_cores())) as team:
        for rows in track(numbers, "rows"):
            calls = contenders(kernel, team, rows, experts, kept)
            figures[str(rows)] = compare(calls, TORCHS if torchs else (), turns)
            print(f"{rows:>3} rows: {figures[str(rows)]}", flush=True)
    return figures


def contenders(
    kernel: NativeKernels, team: Team, rows: int, experts: list[Matrices], kept: list[Matrices]
) -> dict[str, Callable[[], float]]:
    """Calls to measure: each gives its bandwidth in GB/s, and does as many experts as there are cores."""
    x_nD = torch.randn(rows, HIDDEN).bfloat16()
    plain, torchs = cycle(experts), cycle(kept)
    numbers = torch.ones(STREAM_BYTES // 8, dtype=torch.float64)
    theirs = [partial(lambda: expert_ffn(x_nD, *next(torchs)))] * team.cores

    def stream() -> None:
        use_cores(team.cores)
        numbers.sum()

    def ours() -> None:
        for _ in range(team.cores):
            kernel.expert(x_nD, *next(plain))

    def one_by_one() -> None:
        use_cores(team.cores)
        for call in theirs:
            call()

    nbytes = team.cores * EXPERT_BYTES
    return {
        "stream": partial(rate, stream, STREAM_BYTES),
        "kernel": partial(rate, ours, nbytes),
        "torch": partial(rate, one_by_one, nbytes),
        "torch_shared": partial(rate, partial(team.run, theirs), nbytes),
    }


def compare(calls: dict[str, Callable[[], float]], rivals: Sequence[str], turns: int) -> dict[str, float]:
    """Bandwidths in GB/s, and the medians of what neighbours are to each other."""
    rates: dict[str, list[float]] = {name: [] for name in ("stream", "kernel", *rivals)}
    shares, times = [], []
    for _ in range(turns):
        turn = {name: [calls[name]()] for name in ("stream", "kernel")}
        turn["stream"].append(calls["stream"]())
        theirs = {name: [calls[name]()] for name in rivals}
        turn["kernel"].append(calls["kernel"]())
        for name, found in (turn | theirs).items():
            rates[name] += found
        shares.append(turn["kernel"][0] / mean(turn["stream"]))
        if theirs:
            times.append(mean(turn["kernel"]) / max(chain.from_iterable(theirs.values())))
    figures = {f"{name}_gbs": median(found) for name, found in rates.items()}
    figures["share_of_stream"] = median(shares)
    if times:
        figures["times_torch"] = median(times)
    return {name: round(figure, 3) for name, figure in figures.items()}


def rate(call: Callable[[], object], nbytes: int) -> float:
    """GB/s of one call that reads `nbytes`."""
    start = perf_counter()
    call()
    return nbytes / (perf_counter() - start) / 1e9


def random_expert(seed: int) -> Matrices:
    """Gate, up and down."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    return [[(torch.randn(shape, generator=generator) * 0.02).bfloat16()] for shape in shapes]


def last_level_cache() -> int:
    """Bytes; 64 MiB where the system does not tell."""
    sizes = [
        int(path.read_text().strip().removesuffix("K")) << 10
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=64 << 20)


# ---------------------------------------------------------------- in whole


def measure_decode(batch: int, runs: int) -> dict[str, Any]:
    """Tokens per second with the kernel and with torch alone; the sides take turns."""
    model = cache_folder() / MODEL
    if not (model / "config.json").exists():
        write_random_model(SHAPES[MODEL], model)
    rates: dict[str, list[float]] = {"auto": [], "torch": []}
    for _ in track(range(runs), f"batch {batch}"):
        for kernel, found in rates.items():
            found.append(decode(model, batch, kernel))
    middle = {kernel: median(found) for kernel, found in rates.items()}
    print(f"batch {batch}: {rates}", flush=True)
    return {
        "kernel_tokens_per_second": round(middle["auto"], 2),
        "torch_tokens_per_second": round(middle["torch"], 2),
        "ratio": round(median(ours / theirs for ours, theirs in zip(*rates.values(), strict=True)), 3),
        "all": {kernel: [round(each, 2) for each in found] for kernel, found in rates.items()},
    }


def decode(model: Path, batch: int, kernel: str) -> float:
    """Decoded tokens per second of one run."""
    prompts = [[(31 * request + 17 * n) % 1000 for n in range(PROMPT)] for request in range(batch)]
    report = run_model(
        model,
        prompts,
        policy="resident",
        max_new_tokens=NEW_TOKENS[batch],
        batch_size=batch,
        micro_batch_size=batch,
        device_settings={"kernel": kernel},
    )
    return report.decode_tokens_per_second


if __name__ == "__main__":
    main()
