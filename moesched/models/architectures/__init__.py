"""Supported architectures, one per file: the configuration, the names of tensors, and known shapes."""

from __future__ import annotations

from moesched.models.architectures.architecture import Architecture
from moesched.models.architectures.dbrx import DBRX
from moesched.models.architectures.llama import LLAMA
from moesched.models.architectures.mixtral import MIXTRAL
from moesched.models.architectures.olmoe import OLMOE
from moesched.models.architectures.qwen3_moe import QWEN3_MOE

ARCHITECTURES: dict[str, Architecture] = {
    "mixtral": MIXTRAL,
    "dbrx": DBRX,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "llama": LLAMA,
}
"""Architectures by the `form` of a ModelConfig."""
