"""Estimates the memory for resident weights early, so that it is allocated while the device's libraries load."""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence

from moesched.errors import MoeschedError
from moesched.inputs.budgets import PROCESS
from moesched.inputs.defaults import DEVICE
from moesched.inputs.lookup import find_machine
from moesched.inputs.options import DeviceOptions
from moesched.jobs.job import Job
from moesched.jobs.options import SessionOptions
from moesched.models.config import ModelConfig
from moesched.models.layout import room_for
from moesched.models.tensors import global_shapes
from moesched.plugins import name_of
from moesched.requests.batch import Batch
from moesched.requests.batching import batches_of
from moesched.system.memory import available_memory

LEAST = 2 << 20
"""Bytes of the smallest piece of memory to take early: a huge page. Taking smaller pieces early saves nothing."""

MOST_ROWS = 16
"""Largest number of rows of an expert in a decode step for which weights are used in the form in which they are read.

For more rows, some processors use packed weights, which torch allocates.
"""

BESIDE = 1 << 30
"""Bytes of memory that must stay available, since libraries are loaded meanwhile."""


def pieces_to_take(
    given: SessionOptions, config: ModelConfig, lengths: Sequence[int], new_tokens: int, beams: int
) -> list[int]:
    """Return the sizes, in bytes, of the pieces of memory to allocate while the device's libraries load.

    There is a piece for each page of weights that is resident by a rough plan of the first batch, and for each tensor
    outside the layers. Pieces smaller than `LEAST` are left out. The list is empty if the device keeps weights
    elsewhere or in another form, if the process's memory is limited, if too little memory is available, or if the plan
    does not fit. The run itself reports later that a plan does not fit.

    Args:
        lengths: tokens of each prompt.
        new_tokens: tokens to generate for each prompt.
        beams: beams of each prompt; 1 without beam search.
    """
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    limited = PROCESS in (given.budgets or {}) or address_space != resource.RLIM_INFINITY
    if not computes_on_cpu(given) or limited:
        return []
    try:
        sizes = _sizes_by_plan(given, config, lengths, new_tokens, beams)
    except MoeschedError:
        return []
    pieces = [nbytes for nbytes in sizes if nbytes >= LEAST]
    return pieces if sum(pieces) + BESIDE <= available_memory() else []


def computes_on_cpu(given: DeviceOptions) -> bool:
    """Test whether the options name the CPU as the device, without importing the device's libraries."""
    settings = given.device_settings or {}
    return name_of("devices", given.device) == DEVICE and settings.get("accelerator", "cpu") == "cpu"


def _sizes_by_plan(
    given: SessionOptions, config: ModelConfig, lengths: Sequence[int], new_tokens: int, beams: int
) -> list[int]:
    job = Job(given, config, find_machine(given.machine, foreign=True), beams=beams)
    sizes = job.sizes(lengths, new_tokens)
    batch = next(batches_of(lengths, new_tokens, sizes))
    if not job.machine.unified or job.layout.config.ranks > 1 or _rows(batch, config) > MOST_ROWS:
        return []
    plan, _ = job.plan(batch)
    tensors = [
        round(math.prod(shape) * config.tensor_bytes(name, shape, job.layout.dtype))
        for name, shape in global_shapes(config).items()
    ]
    return tensors + [room_for(page) for pool in plan.weights.resident for page in pool.pages()]


def _rows(batch: Batch, config: ModelConfig) -> float:
    """Return the mean number of tokens that an expert gets in a decode step of the largest micro-batch."""
    return max(map(len, batch.micro_batches)) * config.routed.top_k / config.routed.experts
