"""Operations that a calibration of a machine with a GPU times, and the interface of the device that runs them."""

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
    """A product of rows with a matrix (outputs, inputs) that lies in a processor's memory but not in its caches.

    Attributes:
        dtype: dtype of the rows and of a plain matrix.
        format: coded storage format of the matrix; empty for a plain one.
    """

    processor: str
    dtype: str
    outputs: int
    inputs: int
    rows: int
    format: str = ""


class Stream(NamedTuple):
    """A pass that reads `nbytes` consecutive bytes of one memory, the GPU's or the host's; not a CUDA stream."""

    memory: str
    nbytes: int


class Copy(NamedTuple):
    """A copy of a page from one memory to another: to or from the GPU, or from host memory to a page-locked slot."""

    source: str
    destination: str
    nbytes: int


class Launches(NamedTuple):
    """Launches of `kernels` almost empty kernels on a GPU, one after the other."""

    kernels: int


class RoundTrip(NamedTuple):
    """An almost empty kernel, and the host's wait for its result of `nbytes` bytes."""

    nbytes: int


Operation = Product | Stream | Copy | Launches | RoundTrip


class GpuProbe(Protocol):
    """A machine with a GPU, whose operations can be timed.

    Attributes:
        gpu_name: the GPU's name, from its driver.
        gpu_bytes, host_bytes: bytes of the GPU's and of the host's memory.
        half: the GPU's dtype of 16 bits: "bfloat16", or "float16" if it has no bfloat16.
    """

    gpu_name: str
    gpu_bytes: int
    host_bytes: int
    half: DType

    def seconds(self, operation: Operation, *beside: Operation) -> float:
        """Return the seconds of one repetition of an operation, while the operations in `beside` are repeated, too."""

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
            policy, machine: the policy that schedules the run, and the machine that it plans for.
            groups: prompt lengths of each micro-batch.
            steps: number of steps, prefill included.
        """

    def close(self) -> None:
        """Free the memory of the GPU and the host, and end threads."""
