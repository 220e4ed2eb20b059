"""The process that runs a plan: memory that it takes beside the plan's weights, KV cache and buffers."""

from __future__ import annotations

from typing import NamedTuple

from moesched.models.layout import WeightLayout

ALLOCATOR_BYTES = 32_000_000
ALLOCATOR_WORKSPACES, WORKSPACES_BESIDE_ONEDNN = 1.0, 1.5
"""Memory that the C library keeps after kernels released it, in bytes and in workspaces, since each thread has its own
pool; more where oneDNN multiplies by plain weights of 16 bits. Measured with glibc; returning large pieces at once made
kernels two to three times slower.
"""


class Process(NamedTuple):
    """Resident bytes of a process, without the memory of its plans.

    Attributes:
        runtime: bytes before the first batch: Python, libraries, tokenizer, prompts.
        peak: the most resident bytes so far: the first run on a machine times kernels, which takes 200 MB for a second.
        kernels: bytes that kernels take for their own code, on all devices of this process.
        whole: whether all memories of the machine are in this process; otherwise its peak cannot be predicted, since an
            accelerator's driver takes memory too.
        limit: the user's limit of the process's resident bytes; None for none. The plan then also counts the workspace
            that the allocator keeps.
    """

    runtime: int
    peak: int = 0
    kernels: int = 0
    whole: bool = True
    limit: int | None = None


def kept_workspace(workspace: int, layout: WeightLayout) -> int:
    """Bytes that the allocator keeps of kernels' workspace after its release."""
    beside_onednn = layout.dtype != "float32" and not layout.config.coded_formats
    return round((WORKSPACES_BESIDE_ONEDNN if beside_onednn else ALLOCATOR_WORKSPACES) * workspace)
