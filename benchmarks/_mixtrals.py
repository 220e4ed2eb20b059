"""Small random models of Hugging Face's Mixtral, of any shape that its code accepts, and what it makes of a prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

DECISIVE = 1e-4
"""A smaller gap between the first and the second logit may fall either way."""


def mixtral(**changes: Any) -> MixtralForCausalLM:
    """A small random model whose weights are large enough for its experts to matter and its logits to be decisive."""
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    model: MixtralForCausalLM = ready(MixtralForCausalLM(MixtralConfig(**(settings | changes))))
    return model


def random_mixtral(seed: int, layers: int = 2) -> MixtralForCausalLM:
    """Odd and even head counts, head sizes given or derived, 3 to 16 experts, top-1 to top-4, with windows or not."""
    chosen = random.Random(seed)
    kv_heads = chosen.choice([1, 2, 3])
    heads = kv_heads * chosen.choice([1, 2, 3, 5])
    head_dim = 2 * chosen.randint(1, 9)
    experts = chosen.randint(3, 16)
    torch.manual_seed(seed)
    return mixtral(
        num_hidden_layers=layers,
        hidden_size=heads * head_dim if chosen.random() < 0.5 else chosen.randint(9, 70),
        head_dim=head_dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=chosen.randint(5, 90),
        num_local_experts=experts,
        num_experts_per_tok=chosen.randint(1, min(4, experts)),
        sliding_window=chosen.choice([None, None, 1, 4, 9]),
        rope_parameters={"rope_type": "default", "rope_theta": chosen.choice([100.0, 1e4, 1e6])},
        tie_word_embeddings=chosen.random() < 0.3,
    )


def load_model(directory: Path, dtype: torch.dtype) -> Any:
    """A model, of whatever family, as Hugging Face reads it in a dtype.

    `model.to(bfloat16)` would not do: it rounds the frequencies of the rotary embedding too.
    """
    return ready(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype))


def ready(model: Any) -> Any:
    """The model as it can be compared."""
    model.set_experts_implementation("eager")  # the others take no sizes that are odd
    return model.eval()


def with_norms(model: Any) -> Any:
    """The model with norms whose weights differ, from each other and from the 1 that they start as."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.3 * torch.randn(weight.shape))
    return model


def prompts_of(vocabulary: int, lengths: Sequence[int] = (1, 13, 5, 5, 8)) -> list[list[int]]:
    """Prompts of mixed length."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def hugging_face_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """What follows each of the tokens, given the ones before it: (T, V), float32."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()
