"""Operations of a machine with a GPU that a calibration times, and the seam of the device that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from moesched.machines import Machine
from moesched.models.config import DType, ModelConfig
from moesched.seams import Policy
from moesched.tasks import Task

GPU, CPU = "gpu", "cpu"
HOST, PINNED = "host", "pinned"


class Product(NamedTuple):
    """A product of rows with a matrix (outputs, inputs) in the memory of a processor, not cached."""

    processor: str
    dtype: str
    outputs: int
    inputs: int
    rows: int


class Stream(NamedTuple):
    """One pass over bytes of the GPU's or the host's memory."""

    memory: str
    nbytes: int


class Copy(NamedTuple):
    """A copy of a page, as the device makes it: between the GPU and page-locked memory of the host, or within that.

    A copy from the host's memory to pinned memory is one into a staging slot, on the device's threads.
    """

    source: str
    destination: str
    nbytes: int


class Launches(NamedTuple):
    """Kernels on a GPU that have next to nothing to compute, one after the other."""

    kernels: int


class Answer(NamedTuple):
    """A kernel that has next to nothing to compute, and the host's wait for its result of some bytes."""

    nbytes: int


Operation = Product | Stream | Copy | Launches | Answer


class GpuProbe(Protocol):
    """A machine with a GPU, whose operations can be timed.

    Attributes:
        gpu_name: as its driver says it.
        gpu_bytes: size of the GPU's memory.
        host_bytes: size of the host's memory.
        half: the number format of 16 bits that the GPU has: "bfloat16", or "float16" where it has none.
    """

    gpu_name: str
    gpu_bytes: int
    host_bytes: int
    half: DType

    def seconds(self, operation: Operation, *beside: Operation) -> float:
        """The time of an operation among repetitions of it, while other operations are repeated beside it."""

    def tasks(
        self,
        model: ModelConfig,
        policy: Policy,
        groups: Sequence[Sequence[int]],
        steps: int,
        machine: Machine,
    ) -> list[Task]:
        """Run a small random model on the GPU, and return its tasks in the order of their ends.

        Args:
            groups: the prompt lengths of each micro-batch.
            steps: prefill included.
        """

    def close(self) -> None:
        """Free memory, and end threads."""
