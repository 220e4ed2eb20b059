"""Small random models of Hugging Face's OLMoE."""

from __future__ import annotations

import random
from typing import Any

import torch
from _mixtrals import ready, with_norms
from transformers import OlmoeConfig, OlmoeForCausalLM


def olmoe(**changes: Any) -> OlmoeForCausalLM:
    """A small random model whose norms differ from each other and whose experts matter."""
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "pad_token_id": None,
        "eos_token_id": None,
    }
    model: OlmoeForCausalLM = ready(with_norms(OlmoeForCausalLM(OlmoeConfig(**(settings | changes)))))
    return model


def random_olmoe(seed: int, layers: int = 2) -> OlmoeForCausalLM:
    """Odd and even head counts, 3 to 64 experts, top-1 to top-8, weights that sum to 1 or not, clips or none."""
    chosen = random.Random(seed)
    kv_heads = chosen.choice([1, 2, 3])
    heads = kv_heads * chosen.choice([1, 2, 3, 5])
    experts = chosen.choice([3, 7, 16, 64])
    torch.manual_seed(seed)
    return olmoe(
        num_hidden_layers=layers,
        hidden_size=heads * 2 * chosen.randint(1, 9),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=chosen.randint(5, 90),
        num_experts=experts,
        num_experts_per_tok=chosen.randint(1, min(8, experts)),
        norm_topk_prob=chosen.random() < 0.3,
        clip_qkv=chosen.choice([None, 0.5, 2.0]),
        rope_parameters={"rope_type": "default", "rope_theta": chosen.choice([1e4, 1e6])},
        tie_word_embeddings=chosen.random() < 0.3,
    )
