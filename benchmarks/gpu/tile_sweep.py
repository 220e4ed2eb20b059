"""Tiles of the products in Triton: which are the fastest on this GPU?

Each product runs with a number of rows for each height of tiles, by weights of Mixtral 8x7B in bfloat16: one captured
graph with as many copies of the weights as no cache holds. Times are medians. The fastest tiles are printed as the
table of `devices/kernels/triton_sizes.py`, to be pasted there. `--small` tries all of this with tiny sizes by Triton's
interpreter; its figures measure nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.record.benchmark import Benchmark, progress, track
from moesched.devices.kernels import operators
from moesched.devices.kernels.triton_sizes import TILES, Tile

Tensor = torch.Tensor
Launch = Callable[[int], None]
"""Launches a product with one copy of the weights."""


class Sizes(NamedTuple):
    """A layer, the number of copies of its weights, and the tokens for each height of tiles."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    copies: int
    tokens: dict[int, int]


FULL = Sizes(4096, 14336, 8, 2, 32, 8, 128, 32000, 3, {16: 1, 32: 64, 64: 128, 128: 2048})
SMALL = Sizes(64, 96, 2, 1, 2, 1, 32, 64, 1, {16: 1, 128: 65})
EXPERTS = ("gate_and_up", "down")
REPLAYS = 9

BENCHMARK = Benchmark(
    __file__,
    __doc__,
    parts=list(TILES),
    rounds=1,
    rounds_help="time each tile this often; the last time counts",
)
BENCHMARK.parser.add_argument("--small", action="store_true", help="tiny sizes, by Triton's interpreter")


def main(arguments: Sequence[str] | None = None) -> int:
    """Time all tiles, print the table of the fastest, and write the JSON; returns 0."""
    options = BENCHMARK.parse(arguments)
    if not options.small and not torch.cuda.is_available():
        print("torch sees no CUDA device here: nothing is measured")
        return 0
    sizes = SMALL if options.small else FULL
    found: dict[str, dict[int, dict[str, float | str]]] = {}
    fastest: dict[str, list[Tile]] = {}
    for name in options.only:
        timed = found[name] = {
            height: timed_tiles(name, height, sizes, options.rounds) for height in sizes.tokens
        }
        fastest[name] = [Tile(*map(int, fastest_of(times).split())) for times in timed.values()]
    print("TILES: dict[str, Sequence[Tile]] = {")
    for name, tiles in fastest.items():
        print(f'    "{name}": ({", ".join(f"Tile{tuple(tile)}" for tile in tiles)}),')
    print("}")
    gpu = None if options.small else torch.cuda.get_device_name()
    return BENCHMARK.write({"small": options.small, "gpu": gpu, "microseconds": found})


def fastest_of(times: dict[str, float | str]) -> str:
    """The tile with the least time."""
    return min((took, name) for name, took in times.items() if isinstance(took, float))[1]


def timed_tiles(name: str, height: int, sizes: Sizes, rounds: int) -> dict[str, float | str]:
    """Microseconds of a product by tile, or the reason why the GPU does not take it."""
    from triton.runtime.errors import OutOfResources

    launch = launch_of(name, sizes, sizes.tokens[height])
    kept, times = TILES[name], dict[str, float | str]()
    try:
        for tile in track([*candidates(height, sizes)], f"{name}, tiles of {height} rows", still=True):
            TILES[name] = (tile,)
            try:
                for _ in range(rounds):
                    times[" ".join(map(str, tile))] = microseconds(launch, sizes.copies)
            except OutOfResources as error:
                times[" ".join(map(str, tile))] = str(error)
    finally:
        TILES[name] = kept
    best = fastest_of(times)
    progress.print(f"{name}, {sizes.tokens[height]} tokens: {best}: {times[best]:.0f} µs")
    return times


def candidates(height: int, sizes: Sizes) -> Iterator[Tile]:
    """Tiles of a height that are worth a try."""
    if sizes is SMALL:
        yield Tile(height, 32, 64, 4, 3)
        return
    wide = height == 128
    for outputs, inputs in product((64, 128, 256) if wide else (32, 64, 128), (64, 128)):
        for stages in (3, 4) if inputs == 128 or wide else (4, 6):
            for warps in (4, 8) if outputs * height >= 64 * 128 else (4,):
                yield Tile(height, outputs, inputs, warps, stages)


def microseconds(launch: Launch, copies: int) -> float:
    """The median time of a launch, by the weights of each copy in turn."""
    if not torch.cuda.is_available():
        begun = time.perf_counter()
        launch(0)
        return 1e6 * (time.perf_counter() - begun)
    launch(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            launch(copy)
    took: list[float] = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(1e3 * begin.elapsed_time(end) / copies)
    return median(took[1:])


def launch_of(name: str, sizes: Sizes, tokens: int) -> Launch:
    """The launch of a product, on made-up data."""
    data = Data(sizes, tokens)
    return data.experts(name) if name in EXPERTS else data.product(name)


class Data:
    """Made-up tensors on the GPU, or on the CPU without one."""

    def __init__(self, sizes: Sizes, tokens: int) -> None:
        from moesched.devices.kernels import triton_launches

        self._on_gpu = torch.cuda.is_available()
        self._launches: Any = operators if self._on_gpu else triton_launches
        self._sizes, self._tokens = sizes, tokens

    def product(self, name: str) -> Launch:
        """The launch of a product of all tokens."""
        sizes, tokens = self._sizes, self._tokens
        attended = sizes.heads * sizes.head_dim
        rows = {
            "attention_inputs": attended + 2 * sizes.kv_heads * sizes.head_dim,
            "output_projection": sizes.hidden,
            "logits": sizes.vocabulary,
        }[name]
        inputs = attended if name == "output_projection" else sizes.hidden
        tables = [self._table(1, rows, inputs) for _ in range(sizes.copies)]
        x, launch = self._random(tokens, inputs), getattr(self._launches, name)
        if name == "attention_inputs":
            heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
            qkv = [self._random(tokens, each, sizes.head_dim) for each in heads]
            angles = [self._random(tokens, 1, sizes.head_dim).float() for _ in range(2)]
            return lambda copy: launch(x, *tables[copy], [], *angles, 1e-5, False, None, *qkv)
        if name == "output_projection":
            residual, out = (self._random(tokens, sizes.hidden) for _ in range(2))
            return lambda copy: launch(x, *tables[copy], residual, out)
        logits = self._random(tokens, sizes.vocabulary).float()
        return lambda copy: launch(x, *tables[copy], logits)

    def experts(self, name: str) -> Launch:
        """The launch of a product of the experts of all tokens, which are drawn evenly."""
        sizes, tokens = self._sizes, self._tokens
        device = "cuda" if self._on_gpu else "cpu"
        drawn = torch.rand(tokens, sizes.experts, generator=torch.Generator().manual_seed(0))
        experts_Tk = drawn.topk(sizes.top_k).indices.sort().values.to(device)
        rows_Tk, starts = torch.empty_like(experts_Tk), experts_Tk.new_empty(sizes.experts + 1)
        pairs = torch.empty(experts_Tk.numel(), dtype=torch.int32, device=device)
        self._launches.sort_rows(experts_Tk, rows_Tk, pairs, starts)
        x, y = (self._random(rows, sizes.hidden) for rows in (tokens, len(pairs)))
        inner = self._random(len(pairs), sizes.intermediate)
        launch = getattr(self._launches, name)
        shape = (sizes.hidden, sizes.intermediate) if name == "down" else (sizes.intermediate, sizes.hidden)
        tables = [self._table(sizes.experts, *shape) for _ in range(sizes.copies)]
        if name == "down":
            return lambda copy: launch(inner, starts, *tables[copy], y)
        ups = [self._table(sizes.experts, *shape) for _ in range(sizes.copies)]
        return lambda copy: launch(x, pairs, starts, *tables[copy], *ups[copy], inner, None)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda" if self._on_gpu else "cpu")

    def _table(self, count: int, rows: int, width: int) -> tuple[Tensor, list[Tensor]]:
        """Matrices, each in one row block, and their table."""
        blocks = [*self._random(count, rows, width).unbind()]
        table = torch.tensor([[[0, block.data_ptr()]] for block in blocks], device=blocks[0].device)
        return table, blocks


if __name__ == "__main__":
    sys.exit(main())
