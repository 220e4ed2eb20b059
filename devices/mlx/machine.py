"""The machine that MLX runs on, and MLX's memory limits for the process."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.machines import Machine, Processor, machine_names
from moesched.system.macos import raise_wired_limit
from moesched.units import format_bytes

ASSUMED_FLOPS = {"float32": 5e12, "bfloat16": 1e13}
"""Assumed FLOP/s of an Apple GPU that was not calibrated, by dtype."""


LEAST_ROOM, ROOM_SHARE = 4_000_000_000, 0.05
"""Memory for kernels in the wired limit: at least these bytes, and at least this share of the plan's bytes."""


def with_metal(host: Machine) -> Machine:
    """Return the machine `host`: with its GPU added where Metal is available, unchanged elsewhere."""
    if not mx.metal.is_available():
        return host
    return with_gpu(host, str(mx.device_info()["device_name"]), recommended_bytes())


def with_gpu(host: Machine, gpu: str, recommended: int | None) -> Machine:
    """Return a machine's profile with a GPU added that has assumed FLOP/s and uses the host's memory.

    Args:
        gpu: name of the GPU.
        recommended: the largest number of bytes that the system recommends for the GPU; the memory's capacity is cut to
            it. None without a recommendation.
    """
    memory = host.host.memory
    tier = host.memories[memory]
    usable = tier.nbytes if recommended is None else min(tier.nbytes, recommended)
    return replace(
        host,
        name=f"{host.name} with {gpu}",
        processors=host.processors | {"gpu": Processor(memory=memory, flops=ASSUMED_FLOPS)},
        memories=host.memories | {memory: replace(tier, capacity=usable)},
        roles=replace(host.roles, accelerator="gpu"),
    )


def require_unified(machine: Machine) -> None:
    """Check that a batch planned for a machine can run on MLX here.

    Raises:
        BadInput: the machine's accelerator has a memory of its own, or the machine is a built-in profile (of
            `machine_names`) and Metal is not available here.
    """
    if not machine.unified:
        raise BadInput(
            f"machine {machine.name} has an accelerator with a memory of its own, and device mlx computes from one "
            "memory: use --machine auto"
        )
    if machine.name in machine_names() and not mx.metal.is_available():
        raise BadInput(
            f"machine {machine.name} describes other hardware than the processor that device mlx runs on: "
            "use --machine auto"
        )


class ProcessLimit:
    """A memory limit of this process, which is restored after use.

    Args:
        set_limit: a function that sets the limit in bytes and returns the previous limit.
    """

    def __init__(self, set_limit: Callable[[int], int]) -> None:
        self._set_limit = set_limit
        self._before: int | None = None

    def set(self, nbytes: int) -> None:
        """Set the limit to `nbytes` bytes."""
        before = self._set_limit(nbytes)
        if self._before is None:
            self._before = before

    def give_back(self) -> None:
        """Restore the limit that was in force before the first `set`."""
        if self._before is not None:
            self._set_limit(self._before)
            self._before = None


class WiredLimit:
    """The limit of the memory that Metal keeps wired (resident), so that weights need not be wired again after a pause.

    The limit is set above the plan's bytes: if it were just these bytes, Metal would unwire one of the plan's arrays
    for any further array. The limit is not lowered between batches, as this would unwire weights that the next batch
    uses. Without Metal the limit has no effect.

    Args:
        set_limit: a function that sets the limit in bytes and returns the previous limit.
        recommended: the largest number of bytes that the system recommends to wire; None where there is no such bound.
    """

    def __init__(self, set_limit: Callable[[int], int], recommended: int | None) -> None:
        self._limit = ProcessLimit(set_limit)
        self._recommended = recommended
        self._highest = 0

    def hold(self, used: int) -> None:
        """Raise the limit so that `used` bytes of a plan stay wired.

        Raises:
            BadInput: the system wires fewer bytes; weights would be paged out between two uses.
        """
        most = self._recommended
        wanted = used + max(LEAST_ROOM, int(ROOM_SHARE * used))
        if most is not None and used > most:
            raise BadInput(
                f"the plan takes {format_bytes(used)}, and this Mac keeps {format_bytes(most)} wired for its GPU: "
                f"raise that with {raise_wired_limit(wanted)}, or give less with --budget, or memory in the cluster "
                "file"
            )
        limit = wanted if most is None else min(wanted, most)
        if limit > self._highest:
            self._highest = limit
            self._limit.set(limit)

    def give_back(self) -> None:
        """Restore the limit that was in force before the first `hold`."""
        self._limit.give_back()
        self._highest = 0


def wired_limit() -> WiredLimit:
    """Return an object that sets this process's limit of wired memory."""
    return WiredLimit(mx.set_wired_limit, recommended_bytes())


def cache_limit() -> ProcessLimit:
    """Return an object that sets this process's limit of the freed memory that MLX keeps for reuse."""
    return ProcessLimit(mx.set_cache_limit)


def recommended_bytes() -> int | None:
    """Return the most bytes of memory that the system recommends to wire; None where it recommends none."""
    nbytes = mx.device_info().get("max_recommended_working_set_size")
    return None if nbytes is None else int(nbytes)
