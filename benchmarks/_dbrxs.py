"""Small random models of Hugging Face's DBRX."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import DbrxConfig, DbrxForCausalLM

NO_CLIP = 1e9
"""Hugging Face's code accepts no clip_qkv of null, though its configuration does; this one clips nothing."""


def dbrx(
    *,
    rope_theta: float = 5e5,
    attention: dict[str, Any] | None = None,
    ffn: dict[str, Any] | None = None,
    **changes: Any,
) -> DbrxForCausalLM:
    """A small random model whose weights are large enough for its experts and its clip to matter."""
    config = DbrxConfig(
        attn_config={"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": rope_theta} | (attention or {}),
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2} | (ffn or {}),
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        **{
            "vocab_size": 97,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 256,
            "initializer_range": 0.3,
            **changes,
        },
    )
    return DbrxForCausalLM(config).eval()


def random_dbrx(seed: int, layers: int = 2) -> DbrxForCausalLM:
    """Odd and even head counts and sizes, 3 to 16 experts, top-1 to top-4, clips that bite, hardly bite or never do."""
    chosen = random.Random(seed)
    kv_heads = chosen.choice([1, 2, 3])
    heads = kv_heads * chosen.choice([1, 2, 3, 5])
    experts = chosen.randint(3, 16)
    torch.manual_seed(seed)
    return dbrx(
        n_layers=layers,
        n_heads=heads,
        d_model=heads * 2 * chosen.randint(1, 9),
        rope_theta=chosen.choice([1e4, 5e5]),
        attention={"kv_n_heads": kv_heads, "clip_qkv": chosen.choice([0.5, 2.0, 8.0, NO_CLIP])},
        ffn={
            "ffn_hidden_size": chosen.randint(5, 90),
            "moe_num_experts": experts,
            "moe_top_k": chosen.randint(1, min(4, experts)),
        },
    )
