"""The choices of the CUDA device that were made before it ran on one, measured: is the safe way the fast one here?

attention: torch's back ends on one query after the other, of lengths that grow by one, as in decode steps; a back end
that plans anew for each length has a slow typical call, not only a slow first one. launches: attention in a decode step
of sequences whose lengths all differ, a call for each length as the device does it, and one call of all of them, padded
and masked, which needs memory for the padding. alignment: products with weights at a multiple of 16 bytes and 8 bytes
behind one, as files have them. reads: direct reads into ordinary memory, into ordinary memory that CUDA locked, and
into memory that CUDA allocated as page-locked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from moesched.devices.shared.arena import ALIGNMENT, aligned_bytes
from moesched.devices.shared.direct_file import DirectFile
from moesched.devices.torch.locked_memory import locked_bytes
from moesched.errors import MoeschedError
from moesched.system.cuda import FIRST_WITH_BFLOAT16

BACK_ENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
LENGTHS = 32
"""Number of lengths that attention is timed at, each one token longer than the one before."""
REPEATS = 20


def choices(small: bool, folder: Path) -> dict[str, Any]:
    """All of them; milliseconds, and GB/s of reads.

    small: whether to take small sizes. folder: of a file that is read, and removed.
    """
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return {
        "attention": attention(device, small),
        "launches": launches(device, small),
        "alignment": alignment(device, small),
        "reads": reads(device, small, folder),
    }


def attention(device: torch.device, small: bool) -> dict[str, Any]:
    """Milliseconds of the first and of a typical call of each back end; the reason where it takes no such call."""
    sequences, heads, head, start = (2, 4, 64, 32) if small else (64, 8, 128, 1000)
    dtype = _half(device)
    found: dict[str, Any] = {}
    for name, back_end in BACK_ENDS.items():
        times = []
        try:
            with sdpa_kernel(back_end), torch.inference_mode():
                for length in range(start, start + LENGTHS):
                    query = torch.zeros(sequences, heads, 4, head, dtype=dtype, device=device)
                    keys = torch.zeros(sequences, heads, length, head, dtype=dtype, device=device)
                    attend = partial(scaled_dot_product_attention, query, keys, keys)
                    times.append(_milliseconds(attend, device))
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
            continue
        found[name] = {"first": times[0], "typical": median(times[1:])}
    return found


def launches(device: torch.device, small: bool) -> dict[str, Any]:
    """Milliseconds of attention in a decode step, by the calls that it takes."""
    sequences, heads, head, start = (2, 4, 64, 32) if small else (64, 8, 128, 1000)
    dtype = _half(device)
    query = torch.zeros(sequences, heads, 4, head, dtype=dtype, device=device)
    longest = start + sequences
    keys = torch.zeros(sequences, heads, longest, head, dtype=dtype, device=device)
    lengths_S = torch.arange(start, longest, device=device)
    mask_S11L = torch.arange(longest, device=device) < lengths_S[:, None, None, None]

    def each() -> None:
        for number, length in enumerate(range(start, longest)):
            one = keys[number : number + 1, :, :length]
            scaled_dot_product_attention(query[number : number + 1], one, one)

    ways: dict[str, Callable[[], object]] = {
        "a call for each length": each,
        "one call, padded": partial(scaled_dot_product_attention, query, keys, keys, attn_mask=mask_S11L),
    }
    with torch.inference_mode():
        return {
            name: median(_milliseconds(way, device) for _ in range(REPEATS)) for name, way in ways.items()
        }


def alignment(device: torch.device, small: bool) -> dict[str, Any]:
    """Milliseconds of a product by rows, with weights at a multiple of 16 bytes, and 8 bytes behind one."""
    outputs, inputs = (64, 64) if small else (14336, 4096)
    dtype = _half(device)
    raw = torch.zeros(outputs * inputs + 8, dtype=dtype, device=device)
    found: dict[str, Any] = {}
    for rows in (1, 16, 256):
        x_TD = torch.zeros(rows, inputs, dtype=dtype, device=device)
        for behind in (0, 8):
            first = behind // dtype.itemsize
            weight_ND = raw[first : first + outputs * inputs].view(outputs, inputs)
            multiply = partial(linear, x_TD, weight_ND)
            times = [_milliseconds(multiply, device) for _ in range(REPEATS)]
            found[f"{rows} rows, {behind} bytes behind"] = median(times)
    return found


def reads(device: torch.device, small: bool, folder: Path) -> dict[str, Any]:
    """GB/s of direct reads into each kind of memory; the reason where the system refuses it."""
    nbytes = (1 if small else 256) << 20
    kinds: dict[str, Callable[[], torch.Tensor]] = {"ordinary": lambda: aligned_bytes(nbytes)}
    if device.type == "cuda":
        kinds["locked by CUDA"] = lambda: locked_bytes(nbytes, device)
        kinds["allocated by CUDA"] = lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    found: dict[str, Any] = {}
    with NamedTemporaryFile(dir=folder, prefix="reads-") as file:
        file.write(bytes(nbytes))
        file.flush()
        opened = DirectFile(Path(file.name))
        for name, allocate in kinds.items():
            memory = allocate()
            if memory.data_ptr() % ALIGNMENT:
                found[name] = "it starts at no multiple of 4096"
                continue
            began = time.perf_counter()
            try:
                opened.read(memory.numpy().data, 0, nbytes)
            except MoeschedError as error:
                found[name] = str(error)
            else:
                found[name] = round(nbytes / (time.perf_counter() - began) / 1e9, 2)
        found["direct"] = opened.caching == "bypassed"
        opened.close()
    return found


def _half(device: torch.device) -> torch.dtype:
    """The number format of 16 bits that the device has."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_WITH_BFLOAT16
    return torch.float16 if old else torch.bfloat16


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - began), 4)
