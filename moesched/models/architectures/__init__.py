"""Supported architectures, one per file: how config.json is read and written, names of tensors, and known models."""

from __future__ import annotations

from moesched.models.architectures.architecture import Architecture
from moesched.models.architectures.dbrx import DBRX
from moesched.models.architectures.deepseek import DEEPSEEK
from moesched.models.architectures.gemma4 import GEMMA4
from moesched.models.architectures.glm4_moe import GLM4_MOE
from moesched.models.architectures.gpt_oss import GPT_OSS
from moesched.models.architectures.granite_moe import GRANITE_MOE
from moesched.models.architectures.granite_moe_shared import GRANITE_MOE_SHARED
from moesched.models.architectures.llama import LLAMA
from moesched.models.architectures.llama4 import LLAMA4
from moesched.models.architectures.minimax_m2 import MINIMAX_M2
from moesched.models.architectures.mixtral import MIXTRAL
from moesched.models.architectures.olmoe import OLMOE
from moesched.models.architectures.qwen3_moe import QWEN3_MOE
from moesched.models.architectures.qwen3_next import QWEN3_5_MOE, QWEN3_NEXT

ARCHITECTURES: dict[str, Architecture] = {
    "mixtral": MIXTRAL,
    "dbrx": DBRX,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "llama": LLAMA,
    "gpt_oss": GPT_OSS,
    "granite_moe": GRANITE_MOE,
    "granite_moe_shared": GRANITE_MOE_SHARED,
    "glm4_moe": GLM4_MOE,
    "deepseek": DEEPSEEK,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_moe": QWEN3_5_MOE,
    "gemma4": GEMMA4,
    "llama4": LLAMA4,
    "minimax_m2": MINIMAX_M2,
}
"""Architectures by the `form` of a ModelConfig."""

BY_MODEL_TYPE: dict[str, Architecture] = {
    model_type: each for each in ARCHITECTURES.values() for model_type in each.model_types
}
"""Architectures by `model_type` in config.json."""
