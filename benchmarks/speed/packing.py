"""Weights in one array or in many, left idle between uses: Algorithms 1 and 2 of the Apple silicon cluster paper.

For each wait a vector is multiplied by the matrices of a model's layers, with that wait after every layer. On a Mac
the driver wires memory again that lay idle, sooner where it is in many arrays (Figure 4 of the paper: after 8 ms
unstacked, after 512 ms prestacked). Elsewhere there is no such driver, and both take the same. `--full` is the paper's
size, 16 GB in 16-bit weights, twice. The sizes by default are those of a machine with 2 cores.

Time is what passes outside the waits: the paper subtracts the waits asked for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, times

DTYPES = {"float32": mx.float32, "float16": mx.float16}
MATRICES = 3
"""Of an expert in each layer."""
PAPER = {"size": 8192, "layers": 40, "dtype": "float16"}
HERE = {"size": 1024, "layers": 2, "dtype": "float32"}
WAITS = {f"{wait} ms": wait for wait in (0, *(2**power for power in range(12)))}
GAP_WAITS = range(8, 513)
"""Milliseconds between which the paper sees a gap."""

MatrixOf = Callable[[int, int], mx.array]
"""A layer's matrix, by their numbers."""


def write_weights(folder: Path, layers: int, size: int, dtype: str) -> None:
    """Random matrices, each in a file of its own and all in one file; a product keeps the vector's size."""
    generator = np.random.default_rng(0)
    shape = (layers, MATRICES, size, size)
    stacked = np.lib.format.open_memmap(folder / "stacked.npy", mode="w+", dtype=dtype, shape=shape)
    for layer in range(layers):
        for matrix in range(MATRICES):
            values = generator.standard_normal((size, size), dtype=np.float32) / size**0.5
            stacked[layer, matrix] = values
            np.save(folder / f"{layer}-{matrix}.npy", values.astype(dtype))
    stacked.flush()


def load(path: Path) -> mx.array:
    """The array in a file, which is read when it is first used."""
    array: Any = mx.load(str(path))
    assert isinstance(array, mx.array)
    return array


def unstacked(folder: Path, layers: int) -> MatrixOf:
    """Algorithm 1: every matrix as an array of its own."""
    arrays = [
        [load(folder / f"{layer}-{matrix}.npy") for matrix in range(MATRICES)] for layer in range(layers)
    ]
    return lambda layer, matrix: arrays[layer][matrix]


def prestacked(folder: Path, layers: int) -> MatrixOf:
    """Algorithm 1: all matrices in one array, which is indexed."""
    array = load(folder / "stacked.npy")
    return lambda layer, matrix: array[layer, matrix]


def pass_through(x: mx.array, matrix_of: MatrixOf, layers: int, wait: float) -> float:
    """One sample of Algorithm 2; returns the seconds outside the waits."""
    busy = 0.0
    for layer in range(layers):
        start = time.perf_counter()
        for matrix in range(MATRICES):
            x = x @ matrix_of(layer, matrix)
        mx.eval(x)
        busy += time.perf_counter() - start
        time.sleep(wait)
    return busy


def measure(packings: dict[str, MatrixOf], sizes: argparse.Namespace) -> dict[str, Any]:
    """Algorithm 2: of each packing the first pass, and the median of the samples for each wait in milliseconds.

    The packings take turns from wait to wait, so that both are slowed alike where somebody else needs the machine.
    """
    x = mx.random.normal((1, sizes.size)).astype(DTYPES[sizes.dtype])
    mx.eval(x)
    found: dict[str, Any] = {
        name: {"first_pass_seconds": pass_through(x, matrix_of, sizes.layers, 0), "seconds_by_wait": {}}
        for name, matrix_of in packings.items()
    }
    for wait in track([WAITS[part] for part in sizes.only], "waiting", still=True):
        for name, matrix_of in packings.items():
            pass_through(x, matrix_of, sizes.layers, 0)  # to have everything wired
            samples = [pass_through(x, matrix_of, sizes.layers, wait / 1000) for _ in range(sizes.rounds)]
            found[name]["seconds_by_wait"][wait] = median(samples)
    return found


def claims(result: Result) -> Iterator[Claim]:
    """Weights in many arrays beside weights in one; without Metal no gap is expected, and nothing is claimed."""
    if result["metal"]:
        yield Claim(
            "unstacked over prestacked weights, on Metal", times(result["median_between_8_and_512_ms"])
        )


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    packages=("mlx",),
    claims=claims,
    parts=WAITS,
    rounds=15,
    rounds_help="samples of each wait",
)
BENCHMARK.parser.add_argument(
    "--full", action="store_true", help="the paper's sizes, where others are not given"
)
BENCHMARK.parser.add_argument("--size", type=int, metavar="N", help="rows and columns of a matrix")
BENCHMARK.parser.add_argument("--layers", type=int, metavar="N")
BENCHMARK.parser.add_argument("--dtype", choices=DTYPES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the ratios, write the JSON."""
    sizes = BENCHMARK.parse(arguments)
    for name, value in (PAPER if sizes.full else HERE).items():
        if getattr(sizes, name) is None:
            setattr(sizes, name, value)
    with TemporaryDirectory() as folder:
        write_weights(Path(folder), sizes.layers, sizes.size, sizes.dtype)
        packings = {pack.__name__: pack(Path(folder), sizes.layers) for pack in (unstacked, prestacked)}
        found = measure(packings, sizes)
    slower = {
        wait: seconds / found["prestacked"]["seconds_by_wait"][wait]
        for wait, seconds in found["unstacked"]["seconds_by_wait"].items()
    }
    gap = median([ratio for wait, ratio in slower.items() if wait in GAP_WAITS] or list(slower.values()))
    figures = {
        "source": "the Apple silicon cluster paper, Algorithms 1 and 2 and Figure 4",
        "metal": mx.metal.is_available(),
        "sizes": {name: getattr(sizes, name) for name in HERE},
        "packings": found,
        "unstacked_over_prestacked": slower,
        "median_between_8_and_512_ms": gap,
    }
    return BENCHMARK.write(figures)


if __name__ == "__main__":
    sys.exit(main())
