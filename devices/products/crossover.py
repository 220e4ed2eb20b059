"""The number of rows up to which the CPU expert kernel is faster than torch: measured once per machine, and cached."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import cache, partial
from importlib.metadata import version
from itertools import accumulate, cycle
from math import log
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from moesched.errors import BadInput
from moesched.system.cache import cache_folder
from moesched.system.decoding import decode_json
from moesched.system.input_file import read_input

from ..native.kernels import NativeKernels
from ..native.library import build
from .linear import Blocks, Tensor, linear
from .packed_weights import pack, packing_pays
from .team import Team

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
OUTPUTS, INPUTS = 2048, 1024
COLD_BYTES = 96 << 20
"""Bytes of all matrices together, so that no cache still holds one when it is used again."""
TURNS = 9
MOST_BYTES = 1_000_000
"""Limit of the file of results."""

Rows = Annotated[int, Meta(ge=0, le=ROWS[-1])]


@cache
def most_rows(instruction_set: str, cores: int) -> int:
    """The number of rows up to which the kernel wins on that many cores; read from the cache folder, or measured."""
    resident = _resident()
    here = _here(instruction_set, cores)
    if here not in resident:
        resident[here] = measure_most_rows(instruction_set, cores)
        _keep(resident)
    return resident[here]


def measure_again(instruction_set: str, cores: int) -> None:
    """Measure again, and save the result for later runs."""
    _keep(_resident() | {_here(instruction_set, cores): measure_most_rows(instruction_set, cores)})
    most_rows.cache_clear()


def measure_most_rows(instruction_set: str, cores: int) -> int:
    """The number of ROWS up to which the kernel saves the most in all; 0 if it saves nothing.

    Each multiplies as many matrices as there are cores: the kernel one after the other on all cores; torch as on the
    device, each on a core of its own and packed where that pays. They take turns, and the fastest of
    each counts, which other processes disturbed the least.
    """
    # On a thread of its own, as the number of cores that torch uses is the thread's.
    with ThreadPoolExecutor(1, "crossover") as thread:
        return thread.submit(_measure, instruction_set, cores).result()


@torch.inference_mode()
def _measure(instruction_set: str, cores: int) -> int:
    with closing(NativeKernels(ROWS[-1], instruction_set, cores)) as kernel, closing(Team(cores)) as team:
        return most_saved({rows: _ratio(ours, theirs) for rows, ours, theirs in _contests(kernel, team)})


def most_saved(ratios: Mapping[int, float]) -> int:
    """The number of rows up to which the product of all ratios is smallest; 0 if it is never below one.

    One ratio that another process spoiled does not cut off the rows behind it.

    ratios: the kernel's time to torch's by number of rows, ascending.
    """
    saved = list(accumulate((-log(ratio) for ratio in ratios.values()), initial=0.0))
    return (0, *ratios)[saved.index(max(saved))]


Call = Callable[[], object]


def _contests(kernel: NativeKernels, team: Team) -> Iterator[tuple[int, Call, Call]]:
    """Numbers of rows, and the same products by the kernel and by torch."""
    count = COLD_BYTES // (2 * OUTPUTS * INPUTS)
    matrices = [torch.full((OUTPUTS, INPUTS), 0.01, dtype=torch.bfloat16) for _ in range(count)]
    plain = cycle(matrices)
    torchs = cycle([pack(each) for each in matrices] if packing_pays() else matrices)
    for rows in ROWS:
        x_TD = torch.full((rows, INPUTS), 0.01, dtype=torch.bfloat16)
        ours = [partial(_multiply, kernel.linear, x_TD, plain)] * team.cores
        theirs = [partial(_multiply, linear, x_TD, torchs)] * team.cores
        yield rows, partial(_one_by_one, ours), partial(team.run, theirs)


def _multiply(linear: Callable[[Tensor, Blocks], Tensor], x_TD: Tensor, matrices: Iterator[Tensor]) -> Tensor:
    return linear(x_TD, [next(matrices)])


def _one_by_one(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _ratio(ours: Call, theirs: Call) -> float:
    ours(), theirs()  # first calls start threads and compile code
    turns = [(_seconds(ours), _seconds(theirs)) for _ in range(TURNS)]
    return min(ours for ours, _ in turns) / min(theirs for _, theirs in turns)


def _seconds(call: Call) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def _here(instruction_set: str, cores: int) -> str:
    return f"{instruction_set}, {cores} cores, torch {version('torch')}, kernels {build()}"


def _file() -> Path:
    return cache_folder() / "expert-kernel.json"


def _resident() -> dict[str, int]:
    try:
        return decode_json(
            read_input(_file(), "cache", MOST_BYTES), dict[str, Rows], str(_file()), "remove it"
        )
    except BadInput:
        return {}


def _keep(rows: dict[str, int]) -> None:
    """Save the measurements for later processes, where the cache folder can be written."""
    path = _file()
    unfinished = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(msgspec.json.encode(rows))
        unfinished.replace(path)
