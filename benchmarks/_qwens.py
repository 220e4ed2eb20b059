"""Small random models of Hugging Face's Qwen3-MoE."""

from __future__ import annotations

import random
from typing import Any

import torch
from _mixtrals import ready, with_norms
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def qwen(**changes: Any) -> Qwen3MoeForCausalLM:
    """A small random model whose norms differ from each other and whose experts matter."""
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    model: Qwen3MoeForCausalLM = ready(
        with_norms(Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | changes))))
    )
    return model


def random_qwen(seed: int, layers: int = 2) -> Qwen3MoeForCausalLM:
    """Odd and even head counts and sizes, 3 to 128 experts, top-1 to top-8, weights that sum to 1 or not, windows."""
    chosen = random.Random(seed)
    kv_heads = chosen.choice([1, 2, 3])
    heads = kv_heads * chosen.choice([1, 2, 3, 5])
    experts = chosen.choice([3, 7, 16, 40, 128])
    torch.manual_seed(seed)
    window = chosen.choice([None, None, 1, 4, 9])
    return qwen(
        num_hidden_layers=layers,
        hidden_size=chosen.randint(9, 70),
        head_dim=2 * chosen.randint(1, 9),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        moe_intermediate_size=chosen.randint(5, 90),
        num_experts=experts,
        num_experts_per_tok=chosen.randint(1, min(8, experts)),
        norm_topk_prob=chosen.random() < 0.6,
        use_sliding_window=window is not None,
        sliding_window=window,
        rope_parameters={"rope_type": "default", "rope_theta": chosen.choice([100.0, 1e4, 1e6])},
        tie_word_embeddings=chosen.random() < 0.3,
    )
