"""The memory of the process that runs a plan, apart from the plan's own weights, KV cache and buffers."""

from __future__ import annotations

from typing import NamedTuple

ALLOCATOR_BYTES = 32_000_000
"""Bytes that the C library keeps after kernels released them, since each thread has its own pool; no plan counts them.

Measured with glibc. If the library returned large pieces at once, kernels would be slower.
"""


class Process(NamedTuple):
    """Resident bytes of a process, without the memory of its plans.

    Attributes:
        runtime: bytes before the first batch: Python, libraries, tokenizer, prompts.
        peak: the most resident bytes so far; more than `runtime` if this process timed kernels, as a first run does.
        kernels: bytes that kernels take for their own code, on all devices of this process.
        whole: whether this process's resident bytes include its data on the accelerator. If not, as on a GPU, the peak
            cannot be predicted, since the accelerator's driver takes an unknown part of the resident bytes.
        limit: the user's limit of the process's resident bytes; None for none.
    """

    runtime: int
    peak: int = 0
    kernels: int = 0
    whole: bool = True
    limit: int | None = None
