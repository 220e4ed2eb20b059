"""Native attention in decode beside the limits of the machine and beside torch.

One layer's attention of a decode step, 32 query heads of size 128: contexts of 1,024 to 32,768 tokens, batches of 1 and
of 16, 4 and 8 key-value heads, in bfloat16, and one row in float32. Each call takes another layer's keys and values, so
that no cache holds them; calls for small rows are timed in series.

The kernel is called with arguments made before, as a decode step whose shapes repeat calls it. A call that is not
measured wakes each contender's threads.

`read_limit` reads the same bytes on the same cores (`shared/limits.py`); `compute_limit` is the rate at which the
processor multiplies and adds, over the FLOPs per byte: with AVX512_BF16, scores are products of pairs of bfloat16
numbers, and weighted values those of float32 numbers. A row's limit is the smaller one. In each turn read, kernel,
torch, kernel and read follow each other, and the medians of the turns' ratios count.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_least, together
from benchmarks.record.tables import markdown
from benchmarks.shared.limits import Race
from moesched.devices.kernels import attention_functions
from moesched.devices.native.attention import (
    AttentionCall,
    LayerAddresses,
    NativeAttention,
    SequencesInBlocks,
)
from moesched.devices.native.compiled import instruction_sets
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.products.team import use_cores
from moesched.models.kv_blocks import KV_BLOCK_TOKENS
from moesched.system.cores import usable_cores

HEADS, SIZE = 32, 128
ARENA_BYTES = 2 << 30
TURN_BYTES = 128 << 20
FLOAT32_OF = {"amx_bf16": "avx512", "avx512_bf16": "avx512", "neon_bf16": "neon"}
"""The instruction sets whose products of float32 numbers are another one's."""
LEAST_FRACTION, LEAST_TIMES_TORCH = 0.8, 5.0

Tensor = torch.Tensor


class Row(NamedTuple):
    """The shape of a decode step's attention."""

    context: int
    batch: int
    kv_heads: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.context} tokens, batch {self.batch}, {self.kv_heads} KV heads, {kind}"

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.batch * self.context * self.kv_heads * SIZE * self.dtype.itemsize

    @property
    def flop_per_byte(self) -> float:
        """Each number is multiplied and added once for every head of its group."""
        return 2 * HEADS / self.kv_heads / self.dtype.itemsize


ROWS = {
    str(row): row
    for row in (
        *(Row(*shape) for shape in product((1024, 4096, 32768), (1, 16), (4, 8))),
        Row(4096, 1, 8, torch.float32),
    )
}


def claims(result: Result) -> Iterator[Claim]:
    """Native attention in decode steps."""
    rows = result["rows"].values()
    share, ratio = (min(each[name] for each in rows) for name in ("share_of_limit", "times_torch"))
    words = (
        f"attention in decode, {len(rows)} contexts and batches: share of the limit, and over torch, least"
    )
    yield together(
        words,
        at_least("", share, LEAST_FRACTION, "{:.2f}"),
        at_least("", ratio, LEAST_TIMES_TORCH, "{:.1f}x"),
    )


def limit(row: Result) -> float:
    """The smaller limit of a row, in GB/s."""
    return float(min(row["read_limit_gbs"], row["compute_limit_gbs"]))


def tables(result: Result) -> dict[str, str]:
    """A line for each row: the limit, the kernel's share of it, and how often torch fits into both."""
    lines = [
        [
            name,
            f"{limit(row):.1f}",
            f"{row['kernel_gbs']:.1f} ({row['share_of_limit']:.0%})",
            f"{row['times_torch']:.1f}x",
            f"{limit(row) / row['torch_gbs']:.1f}x",
        ]
        for name, row in result.get("rows", {}).items()
    ]
    return {
        "attention": markdown(
            ["context", "limit, GB/s", "kernel, GB/s", "over torch", "at most possible"], lines
        )
    }


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    tables=tables,
    parts=ROWS,
    rounds=7,
    rounds_help="turns of each row",
    keeps_parts=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print what came out, write the result."""
    options = BENCHMARK.parse(arguments)
    found: dict[str, Any] = dict(BENCHMARK.stored().get("rows", {}))
    cores, name_of_set = usable_cores(), instruction_sets()[0]
    with torch.inference_mode(), closing(NativeKernels(0, name_of_set, cores)) as threads:
        attention = NativeAttention(threads)
        for name in track(options.only, "rows"):
            found[name] = measure(ROWS[name], attention, name_of_set, cores, options.rounds)
    return BENCHMARK.write(
        {
            "instructions": name_of_set,
            "threads": cores,
            "rows": {name: found[name] for name in ROWS if name in found},
        }
    )


def measure(
    row: Row, attention: NativeAttention, instruction_set: str, cores: int, turns: int
) -> dict[str, float]:
    """Bandwidths in GB/s, and their ratios."""
    layers = random_layers(row)
    ours, theirs = native_calls(row, layers, attention), torch_calls(row, layers, cores)
    race = Race(
        pieces=[(layer.data_ptr(), row.nbytes) for layer in layers],
        flop_per_byte=row.flop_per_byte,
        kernel=lambda numbers: [ours[number]() for number in numbers],
        torch=[lambda numbers: [theirs[number]() for number in numbers]],
        multiplying=multiply(instruction_set, row.dtype),
        cores=cores,
        turn_bytes=TURN_BYTES,
    )
    return race.figures(turns)


def multiply(instruction_set: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The instruction sets whose products attention takes, each for as many of them."""
    of_floats = FLOAT32_OF.get(instruction_set, instruction_set)
    if dtype == torch.bfloat16 and instruction_set == "amx_bf16":
        return (instruction_set,)
    if dtype == torch.bfloat16 and instruction_set == "avx512_bf16":
        return instruction_set, of_floats
    return (of_floats,)


def random_layers(row: Row) -> Tensor:
    """Keys and values of several layers: (layers, 2, batch * context, K, d)."""
    layers = max(2, ARENA_BYTES // row.nbytes)
    arena = torch.empty(layers, 2, row.batch * row.context, row.kv_heads, SIZE, dtype=row.dtype)
    some = torch.randn(1 << 20).to(row.dtype)
    for piece in arena.view(-1).split(len(some)):
        piece.copy_(some[: len(piece)])
    return arena


def random_step(row: Row) -> Iterator[Tensor]:
    """Queries, keys and values of the new tokens."""
    for heads in (HEADS, row.kv_heads, row.kv_heads):
        yield torch.randn(row.batch, heads, SIZE).to(row.dtype)


def native_calls(row: Row, layers: Tensor, attention: NativeAttention) -> list[Callable[[], object]]:
    """Each layer by the native kernel; every sequence's blocks follow each other."""
    step = q_SHd, k_SKd, v_SKd = tuple(random_step(row))
    blocks = row.batch * row.context // KV_BLOCK_TOKENS
    sequences = SequencesInBlocks.of(array("q", [row.context] * row.batch), array("q", range(blocks)))
    out_SX = torch.empty(row.batch, HEADS * SIZE, dtype=row.dtype)

    def call(prepared: AttentionCall, held: object) -> None:
        """held: the tensors that the call reads and writes."""
        prepared(sequences)

    def native_call(layer: Tensor) -> Callable[[], object]:
        keys = layer.data_ptr()
        cached = LayerAddresses(keys, keys + row.nbytes // 2, KV_BLOCK_TOKENS)
        return partial(call, attention.prepared(q_SHd, k_SKd, v_SKd, cached, out_SX), (step, out_SX))

    return [native_call(layer) for layer in layers]


def torch_calls(row: Row, layers: Tensor, cores: int) -> list[Callable[[], object]]:
    """Each layer by torch, as devices without native kernels attend."""
    q_SHd, _, _ = random_step(row)
    shape = (2, row.batch, row.context, row.kv_heads, SIZE)

    def call(layer: Tensor) -> None:
        use_cores(cores)
        keys, values = layer.view(shape)
        attention_functions.attention(q_SHd, [attention_functions.KVView(keys, values, 1)])

    return [partial(call, layer) for layer in layers]


if __name__ == "__main__":
    sys.exit(main())
