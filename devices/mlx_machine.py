"""What MLX runs on: which machine that is, and how much of its memory the driver keeps wired."""

from __future__ import annotations

import mlx.core as mx
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.machines import Machine, Processor, Roles, machine_names

ASSUMED_FLOPS = {"float32": 5e12, "bfloat16": 1e13}
"""Of an Apple GPU, until somebody calibrates."""


def with_metal(host: Machine) -> Machine:
    """This machine as MLX has it: on Apple silicon its GPU too, with what Metal recommends to use of the memory.

    Its rates are assumed. Where there is no Metal, MLX computes on the processor.
    """
    if not mx.metal.is_available():
        return host
    memory = host.host.memory
    tier = host.memories[memory]
    usable = min(tier.nbytes, _recommended(tier.nbytes))
    return replace(
        host,
        name=f"{host.name} with {mx.device_info().get('device_name', 'Metal')}",
        processors=host.processors | {"gpu": Processor(memory=memory, flops=ASSUMED_FLOPS)},
        memories=host.memories | {memory: replace(tier, capacity=usable)},
        roles=Roles(accelerator="gpu", host=host.roles.host, weights=host.roles.weights),
    )


def require_unified(machine: Machine) -> None:
    """Whether a machine can be one that MLX runs on.

    Raises:
        BadInput: its accelerator has a memory of its own, or it is a profile that ships and there is no Metal here.
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


class WiredMemory:
    """How much memory Metal may keep wired, so that weights that lie idle need not be wired again.

    The limit is the process's: whoever sets it gives it back. Without Metal MLX takes the call and does nothing.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    def set(self, nbytes: int) -> None:
        """Wire what a plan takes, but no more than the system recommends: beyond that small machines stall."""
        before = mx.set_wired_limit(min(nbytes, _recommended(nbytes)))
        if self._before is None:
            self._before = before

    def give_back(self) -> None:
        """Set the limit that was there before."""
        if self._before is not None:
            mx.set_wired_limit(self._before)
            self._before = None


def _recommended(otherwise: int) -> int:
    """The bytes that the system recommends to use at most, where it says so."""
    return int(mx.device_info().get("max_recommended_working_set_size", otherwise))
