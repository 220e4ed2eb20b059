"""The number of rows up to which native kernels are used instead of torch, measured once for each shape."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from importlib.metadata import version
from itertools import accumulate, cycle
from math import log
from pathlib import Path
from time import thread_time
from typing import Annotated, NamedTuple

import msgspec
import torch
from msgspec import Meta

from moesched.errors import BadInput
from moesched.system.cache import cache_folder
from moesched.system.decoding import decode_json
from moesched.system.input_file import read_input

from ..native.compiled import library_checksum
from ..native.kernels import NativeKernels
from ..shared.arena import aligned_bytes
from .linear import Blocks, Tensor, linear
from .packed_weights import pack
from .team import use_cores

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
LEAST, MOST_WEIGHTS = 512, 1 << 24
"""Least number of rows and of columns, and largest number of weights, of a measured matrix.

Matrices beyond these limits take as long for each weight.
"""
COLD_BYTES = 96 << 20
"""Bytes of all matrices together, so that no cache still holds one when it is used again."""
TURNS = 7
"""Number of times that each of the two products is measured."""
MANY_ROWS, MANY_ROWS_TURNS = 256, 3
"""Number of rows from which on products are measured fewer times, as they take longer; and that number of times."""
LOST = 2
"""Ratio of the kernel's time to torch's: if two successive numbers of rows exceed it, larger ones are not tried."""
ANY_ROWS = 1 << 40
"""A number larger than any number of rows."""
TIE_WITH_PACKED, TIE_WITH_PLAIN = 1.15, 1.3
"""Largest ratio of the kernel's time to torch's with which the kernel is used, for packed and for plain weights.

The ratios are above 1, since products are timed on one core, and the native kernels gain more in a decode step: a whole
task is one call, and all cores read each matrix. Where both were equally fast on one core, torch's decode steps took
longer: 1.2 to 1.9 times as long for 1 to 128 requests with packed weights, 1.4 times for 64 requests with plain ones.
"""
MOST_BYTES = 1_000_000
"""Largest size in bytes of the file with the results."""

Rows = Annotated[int, Meta(ge=0, le=ROWS[-1])]


class Shape(NamedTuple):
    """The shape of a matrix: its outputs (rows) and inputs (columns)."""

    outputs: int
    inputs: int

    @property
    def measured(self) -> Shape:
        """The shape that is measured in place of this one: its sizes rounded to powers of two."""
        inputs = _power_of_two(self.inputs, MOST_WEIGHTS // LEAST)
        return Shape(_power_of_two(self.outputs, MOST_WEIGHTS // inputs), inputs)


def _power_of_two(number: int, most: int) -> int:
    return min(max(LEAST, 1 << (number - 1).bit_length()), most)


@cache
def most_rows(instruction_set: str, shape: Shape, packed: bool) -> int:
    """Return the number of rows up to which the native kernel is preferred to torch; measured once, then cached.

    The result is 0 if the kernel saves no time, and ANY_ROWS if the limit found is the largest number in ROWS.

    Args:
        instruction_set: the instruction set of the kernel.
        shape: the shape of the matrix.
        packed: True to compare with torch's product by packed weights, False by plain weights.
    """
    here = _here(instruction_set, shape, packed)
    kept = _kept()
    if here not in kept:
        with _alone():
            kept = _kept()  # another process may have measured it meanwhile
            if here not in kept:
                kept[here] = measure_most_rows(instruction_set, shape.measured, packed)
                _keep(kept)
    return ANY_ROWS if kept[here] == ROWS[-1] else kept[here]


def forget() -> None:
    """Drop all measurements, so that products are measured again when needed."""
    _keep({})
    most_rows.cache_clear()


def measure_most_rows(instruction_set: str, shape: Shape, packed: bool) -> int:
    """Measure up to how many rows the native kernel is preferred to torch: a number in ROWS; 0 if it never is.

    Kernel and torch take turns on one core. The thread's processor time is measured, and the fastest turn of each
    counts. Other processes hardly disturb such a measurement, while threads on several cores would wait for each other.
    """
    # On a thread of its own, as the number of cores that torch uses is the thread's.
    with ThreadPoolExecutor(1, "crossover") as thread:
        return thread.submit(_measure, instruction_set, shape, packed).result()


@torch.inference_mode()
def _measure(instruction_set: str, shape: Shape, packed: bool) -> int:
    use_cores(1)
    with closing(NativeKernels(ROWS[-1], instruction_set, threads=1)) as kernel:
        contests = _contests(kernel, shape, packed)
        ratios: dict[int, float] = {}
        for rows, ours, theirs in contests:
            ratios[rows] = _ratio(ours, theirs, _turns(rows))
            if len(ratios) > 1 and min([*ratios.values()][-2:]) > LOST:
                break
        return most_saved(ratios, _tie(packed))


def _tie(packed: bool) -> float:
    return TIE_WITH_PACKED if packed else TIE_WITH_PLAIN


def most_saved(ratios: Mapping[int, float], tie: float = 1) -> int:
    """Return the number of rows up to which use of the kernel saves the most time; 0 if the kernel saves none.

    For each number of rows, the savings up to that number are added up, and the number with the largest sum is
    returned. So a single ratio that another process spoiled does not decide.

    Args:
        ratios: the kernel's time divided by torch's, by number of rows, ascending.
        tie: the ratio with which the kernel saves nothing; above 1, it favours the kernel.
    """
    saved = list(accumulate((log(tie / ratio) for ratio in ratios.values()), initial=0.0))
    return (0, *ratios)[saved.index(max(saved))]


Call = Callable[[], object]


def _contests(kernel: NativeKernels, shape: Shape, packed: bool) -> Iterator[tuple[int, Call, Call]]:
    """Yield each number of rows with two products to time, the native one and torch's.

    Args:
        shape: shape of the matrices.
        packed: True if torch multiplies by packed weights.
    """
    count = max(2, COLD_BYTES // (2 * shape.outputs * shape.inputs))
    matrices = [_matrix(shape) for _ in range(count)]
    plain = cycle(matrices)
    torchs = cycle([pack(each) for each in matrices] if packed else matrices)
    for rows in ROWS:
        x_TD = torch.full((rows, shape.inputs), 0.01, dtype=torch.bfloat16)
        yield rows, partial(_multiply, kernel.linear, x_TD, plain), partial(_multiply, linear, x_TD, torchs)


def _matrix(shape: Shape) -> Tensor:
    """Make a bfloat16 matrix of this shape in huge pages, as a model's weights are."""
    return aligned_bytes(2 * shape.outputs * shape.inputs).view(torch.bfloat16).view(shape).fill_(0.01)


def _multiply(linear: Callable[[Tensor, Blocks], Tensor], x_TD: Tensor, matrices: Iterator[Tensor]) -> Tensor:
    return linear(x_TD, [next(matrices)])


def _turns(rows: int) -> int:
    return TURNS if rows < MANY_ROWS else MANY_ROWS_TURNS


def _ratio(ours: Call, theirs: Call, count: int) -> float:
    ours(), theirs()  # torch compiles code in the first call
    turns = [(_core_seconds(ours), _core_seconds(theirs)) for _ in range(count)]
    return min(ours for ours, _ in turns) / min(theirs for _, theirs in turns)


def _core_seconds(call: Call) -> float:
    start = thread_time()
    call()
    return thread_time() - start


def _here(instruction_set: str, shape: Shape, packed: bool) -> str:
    outputs, inputs = shape.measured
    torchs = f"{'packed' if packed else 'plain'} to {_tie(packed)}"
    return f"{instruction_set}, {outputs} x {inputs}, {torchs}, torch {version('torch')}, kernels {library_checksum()}"


def _file() -> Path:
    return cache_folder() / "expert-kernel.json"


@contextmanager
def _alone() -> Iterator[None]:
    """Hold a lock until the context ends, so that only one process measures at a time."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(_file().with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # nothing can be kept there
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _kept() -> dict[str, int]:
    try:
        return decode_json(
            read_input(_file(), "cache", MOST_BYTES), dict[str, Rows], str(_file()), "remove it"
        )
    except BadInput:
        return {}


def _keep(rows: dict[str, int]) -> None:
    """Write the results of measurements, by key, to the cache folder for later processes, if the folder is writable."""
    path = _file()
    unfinished = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(msgspec.json.encode(rows))
        unfinished.replace(path)
