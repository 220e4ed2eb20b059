"""The CPU expert kernel beside its limit and beside torch, and in whole decode steps.

Experts of named models in bfloat16, for 1 to 16 rows; each call takes another expert, and together they are four
times the last-level cache, so that weights come from memory. Kernel, limit (`shared/limits.py`) and torch take turns.
The ratio of neighbours is taken in each turn, and the median of that counts: the bandwidth of a shared machine moves
more within a minute than what is measured here.

One core: one thread each, in seconds of its processor time, which other processes disturb least; with each instruction
set but the portable one.

All cores: the best instruction set, one thread on each core, in seconds of the clock; only on an otherwise idle
machine. Torch has two ways: one expert on all cores, and as many experts as there are cores, each on a core of its
own, as the device shares them out; the faster one counts. Torch's weights are packed where that pays.

In whole: `mixtral-0.8b`, all weights in memory, batches of 1 and of 16, with the kernel and with `kernel=torch`, in
turn, and medians of each turn's ratio again.

The kernel is called with arguments made before, as a native layer calls it. A call that is not measured wakes each
contender's threads.

Parts that are not measured stay in the result file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of, at_least
from benchmarks.record.tables import across
from benchmarks.shared.kept_models import kept_model
from benchmarks.shared.limits import Contender, Race
from moesched.devices.native.compiled import instruction_sets
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.products.crossover import Shape as Matrix
from moesched.devices.products.crossover import most_rows
from moesched.devices.products.linear import expert_ffn
from moesched.devices.products.packed_weights import pack, packing_pays
from moesched.devices.products.team import Team, use_cores
from moesched.devices.shared.arena import aligned_bytes
from moesched.jobs.session import run_model
from moesched.models.shapes import SHAPES
from moesched.system.cores import usable_cores

EXPERTS = ("mixtral-8x7b", "mixtral-0.8b", "qwen3-30b-a3b", "dbrx")
ROWS = (1, 2, 4, 8, 16)
LEAST_SHARE = {1: 0.9, 2: 0.9, 4: 0.9, 8: 0.85, 16: 0.75}
"""Of the limit, by number of rows."""
LEAST_TIMES_TORCH = 0.98
LEAST_DECODE_RATIO = 1.2
TURN_BYTES = 48 << 20
"""Least bytes of weights that one turn of one contender reads."""
MODEL = "mixtral-0.8b"
PROMPT = 8
NEW_TOKENS = {1: 48, 16: 5}
"""By batch size; torch takes long for large batches where the processor has no bfloat16."""

PARTS = ("one_core", "all_cores", "decode_1", "decode_16")

Tensor = torch.Tensor
Matrices = list[list[Tensor]]
Rates = dict[str, float]


def claims(result: Result) -> Iterator[Claim]:
    """The CPU expert kernel, with the best instruction set."""
    for part, cores in (("one_core", "one core"), ("all_cores", "all cores")):
        if part not in result:
            continue
        experts = result[part][result["instructions"]].values()
        reached = [
            each[str(rows)]["share_of_limit"] >= least
            for each in experts
            for rows, least in LEAST_SHARE.items()
        ]
        words = f"CPU expert kernel, {cores}: experts by rows whose share of the limit reaches its bar"
        yield all_of(words, sum(reached), len(reached))
        ratio = min(row["times_torch"] for each in experts for row in each.values())
        words = f"CPU expert kernel over torch, 1 to 16 rows, {cores}, least"
        yield at_least(words, ratio, LEAST_TIMES_TORCH, "{:.2f}x")
    if "decode_1" in result:
        words, ratio = "`mixtral-0.8b` at batch 1, kernel over torch", result["decode_1"]["ratio"]
        yield at_least(words, ratio, LEAST_DECODE_RATIO, "{:.3f}x")


def tables(result: Result) -> dict[str, str]:
    """The tables of docs/expert-kernel.md."""
    return {
        "expert_shares": shares(result),
        "expert_limits": limits(result),
        "expert_times_torch": times_torch(result),
    }


def shares(result: Result) -> str:
    """The share of the limit that each instruction set reaches on one core, with the rate."""
    return across(
        list(_rows(result)), ["instructions", "expert"], "{n}", "{share_of_limit:.0%} ({kernel_gbs:.1f})"
    )


def limits(result: Result) -> str:
    """The limits of each instruction set on one core; the smaller one counts."""
    return across(
        list(_rows(result)),
        ["instructions", "expert"],
        "{n}",
        "{read_limit_gbs:.1f}, {compute_limit_gbs:.1f}",
    )


def times_torch(result: Result) -> str:
    """The best instruction set on one core over torch on one core."""
    rows = [row for row in _rows(result) if "times_torch" in row]
    return across(rows, ["expert"], "{n}", "{times_torch:.2f}x")


def _rows(result: Result) -> Iterator[Result]:
    for instructions, experts in result.get("one_core", {}).items():
        for expert, by_rows in experts.items():
            for rows, figures in by_rows.items():
                n = f"{rows} row{'s' if rows != '1' else ''}"
                yield {**figures, "instructions": f"`{instructions}`", "expert": f"`{expert}`", "n": n}


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    tables=tables,
    parts=PARTS,
    rounds=9,
    rounds_help="turns of each number of rows; a third as many generations of each batch",
    keeps_parts=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print what came out, write the result."""
    options = BENCHMARK.parse(arguments)
    found = BENCHMARK.stored_parts()
    best = instruction_sets()[0]
    sets = [name for name in instruction_sets() if name != "portable"]
    with torch.inference_mode():
        if {"one_core", "all_cores"} & set(options.only):
            memory = weights_in_memory()
        if "one_core" in options.only:
            found.setdefault("one_core", {}).update(
                {name: measure_experts(name, memory, 1, options.rounds) for name in sets}
            )
        if "all_cores" in options.only:
            found["all_cores"] = {best: measure_experts(best, memory, usable_cores(), options.rounds)}
    for batch in NEW_TOKENS:
        if f"decode_{batch}" in options.only:
            found[f"decode_{batch}"] = measure_decode(batch, max(1, options.rounds // 3))
    most = {
        model: most_rows(
            best, Matrix(SHAPES[model].routed.intermediate, SHAPES[model].hidden), packed=packing_pays()
        )
        for model in EXPERTS
    }
    return BENCHMARK.write({"instructions": best, "most_rows": most} | found)


# ---------------------------------------------------------------- experts


class Shape(NamedTuple):
    """The shape of an expert: gate and up (width, hidden), down (hidden, width)."""

    hidden: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of an expert."""
        return 3 * self.hidden * self.width * 2


def measure_experts(
    instruction_set: str, memory: Tensor, cores: int, turns: int
) -> dict[str, dict[str, Rates]]:
    """By model and number of rows: rates in GB/s of weights, and their ratios."""
    best = instruction_set == instruction_sets()[0]
    found: dict[str, dict[str, Rates]] = {}
    with closing(NativeKernels(0, instruction_set, cores)) as kernels, closing(Team(cores)) as team:
        for model in EXPERTS:
            shape = Shape(SHAPES[model].hidden, SHAPES[model].routed.intermediate)
            experts = list(experts_in(memory, shape))
            packed = experts
            if packing_pays() and best:
                packed = [[[pack(matrix)] for [matrix] in expert] for expert in experts]
            calls = [kernels.prepared_expert(*expert) for expert in experts]
            found[model] = {}
            for rows in track(ROWS, model):
                x_nD = torch.randn(rows, shape.hidden).bfloat16()
                run = partial(run_all, calls, x_nD, torch.empty_like(x_nD))
                race = Race(
                    pieces=[(gate.data_ptr(), shape.nbytes) for [gate], _, _ in experts],
                    flop_per_byte=rows,  # each weight of two bytes is multiplied and added once for each row
                    kernel=run,
                    torch=torch_ways(team, packed, x_nD) if best else [],
                    multiplying=[instruction_set],
                    cores=cores,
                    turn_bytes=TURN_BYTES,
                )
                rates = found[model][str(rows)] = race.figures(turns)
                print(f"{instruction_set}, {cores} cores, {model}, {rows} rows: {rates}", flush=True)
    return found


def run_all(calls: Sequence[Callable[..., None]], x_nD: Tensor, y_nD: Tensor, numbers: Sequence[int]) -> None:
    """Run the kernel on experts."""
    for number in numbers:
        calls[number](x_nD, y_nD)


def torch_ways(team: Team, packed: Sequence[Matrices], x_nD: Tensor) -> list[Contender]:
    """One expert on all cores, and as many experts as there are cores, each on one of its own."""

    def alone(numbers: Sequence[int]) -> None:
        use_cores(team.cores)
        for number in numbers:
            expert_ffn(x_nD, *packed[number])

    def shared(numbers: Sequence[int]) -> None:
        team.run([partial(expert_ffn, x_nD, *packed[number]) for number in numbers])

    return [alone, shared] if team.cores > 1 else [alone]


def weights_in_memory() -> Tensor:
    """Random bfloat16 numbers in huge pages, four times as many bytes as the last-level cache has."""
    most = max(2 * 3 * SHAPES[model].hidden * SHAPES[model].routed.intermediate for model in EXPERTS)
    memory = aligned_bytes(max(4 * last_level_cache(), usable_cores() * most)).view(torch.bfloat16)
    some = (torch.randn(1 << 20) * 0.02).bfloat16()
    for piece in memory.split(len(some)):
        piece.copy_(some[: len(piece)])
    return memory


def experts_in(memory: Tensor, shape: Shape) -> Iterator[Matrices]:
    """Gate, up and down of the experts that fit."""
    matrix = shape.hidden * shape.width
    for first in range(0, len(memory) - 3 * matrix + 1, 3 * matrix):
        gate, up, down = memory[first : first + 3 * matrix].split(matrix)
        yield [
            [gate.view(shape.width, shape.hidden)],
            [up.view(shape.width, shape.hidden)],
            [down.view(shape.hidden, shape.width)],
        ]


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
    model = kept_model(MODEL)
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
    sys.exit(main())
