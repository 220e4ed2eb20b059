"""Small random models of Hugging Face's families, of any shape that its code accepts, and their logits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DbrxConfig, DbrxForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

DECISIVE = 1e-4
"""A smaller gap between the first and the second logit may fall either way."""
NO_CLIP = 1e9
"""Hugging Face's code accepts no clip_qkv of null, though its configuration does; this one clips nothing."""

SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64},
)
"""Rotary embeddings for longer contexts."""

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
"""Weights large enough for experts to matter and for logits to be decisive."""


def small(model_type: str, finish: Callable[[Any], Any], **settings: Any) -> Callable[..., Any]:
    """Make a function for small random models of a family, which takes other settings.

    finish: changes the weights of a new model, and returns it.
    """

    def make(**changes: Any) -> Any:
        config = AutoConfig.for_model(model_type, **{**COMMON, **settings, **changes})
        return ready(finish(AutoModelForCausalLM.from_config(config)))

    return make


def with_norms(model: Any) -> Any:
    """The model with norms whose weights differ, from each other and from the 1 that they start as."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.3 * torch.randn(weight.shape))
    return model


def with_corrections(model: Any) -> Any:
    """The model with norms and biases that differ, and corrections of its routers."""
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                weight.copy_(0.2 * torch.randn(weight.shape))
    return with_norms(model)


def with_sinks(model: Any) -> Any:
    """The model with norms, biases and sinks that matter."""
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                weights.normal_(std=0.5)
    return with_norms(model)


mixtral = small("mixtral", lambda model: model, intermediate_size=48, num_local_experts=4)
olmoe = small(
    "olmoe",
    with_norms,
    intermediate_size=24,
    num_experts=12,
    num_experts_per_tok=3,
    pad_token_id=None,
    eos_token_id=None,
)
qwen = small(
    "qwen3_moe",
    with_norms,
    moe_intermediate_size=24,
    head_dim=8,
    num_experts=12,
    num_experts_per_tok=3,
    norm_topk_prob=True,
)
minimax = small(
    "minimax_m2",
    with_corrections,
    intermediate_size=24,
    head_dim=8,
    rotary_dim=4,
    num_local_experts=12,
    num_experts_per_tok=3,
)
glm = small(  # with a dense layer
    "glm4_moe",
    with_corrections,
    num_hidden_layers=3,
    intermediate_size=40,
    moe_intermediate_size=24,
    head_dim=8,
    n_routed_experts=12,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=3,
    attention_bias=True,
    use_qk_norm=True,
    routed_scaling_factor=1.5,
)
gpt_oss = small(  # with a limit that matters
    "gpt_oss",
    with_sinks,
    intermediate_size=24,
    head_dim=8,
    num_local_experts=6,
    sliding_window=7,
    swiglu_limit=0.5,
    rope_parameters=SCALINGS[-1] | {"truncate": False},
)
GRANITE: dict[str, Any] = {
    "intermediate_size": 24,
    "num_local_experts": 6,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.5,
}
granite = small("granitemoe", with_norms, **GRANITE)
granite_shared = small("granitemoeshared", with_norms, **GRANITE, shared_intermediate_size=40)


def dbrx(
    *,
    rope_theta: float = 5e5,
    attention: dict[str, Any] | None = None,
    ffn: dict[str, Any] | None = None,
    **changes: Any,
) -> DbrxForCausalLM:
    """A small random DBRX whose clip matters."""
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


def random_mixtral(seed: int) -> Any:
    """Odd and even head counts, head sizes given or derived, 3 to 16 experts, top-1 to top-4, with windows or not."""
    chosen, kv_heads, heads = _heads(seed)
    head_dim = 2 * chosen.randint(1, 9)
    experts = chosen.randint(3, 16)
    torch.manual_seed(seed)
    return mixtral(
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


def random_olmoe(seed: int) -> Any:
    """Odd and even head counts, 3 to 64 experts, top-1 to top-8, weights that sum to 1 or not, clips or none."""
    chosen, kv_heads, heads = _heads(seed)
    experts = chosen.choice([3, 7, 16, 64])
    torch.manual_seed(seed)
    return olmoe(
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


def random_qwen(seed: int) -> Any:
    """Odd and even head counts and sizes, 3 to 128 experts, top-1 to top-8, weights that sum to 1 or not, windows."""
    chosen, kv_heads, heads = _heads(seed)
    experts = chosen.choice([3, 7, 16, 40, 128])
    torch.manual_seed(seed)
    window = chosen.choice([None, None, 1, 4, 9])
    return qwen(
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


def random_minimax(seed: int) -> Any:
    """Odd and even head counts and sizes, 3 to 64 experts, top-1 to top-8, parts of heads that rotate, and scalings."""
    chosen, kv_heads, heads = _heads(seed)
    experts, half = chosen.choice([3, 7, 16, 64]), chosen.randint(1, 9)
    torch.manual_seed(seed)
    return minimax(
        hidden_size=chosen.randint(9, 70),
        head_dim=2 * half,
        rotary_dim=2 * chosen.randint(1, half),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=chosen.randint(5, 90),
        num_local_experts=experts,
        num_experts_per_tok=chosen.randint(1, min(8, experts)),
        rope_parameters=_rope(chosen),
        tie_word_embeddings=chosen.random() < 0.3,
    )


def random_gpt_oss(seed: int) -> Any:
    """Odd and even head counts and sizes, 2 to 40 experts, top-1 to top-8, windows in turn or not, short and long."""
    chosen, kv_heads, heads = _heads(seed)
    experts, layers = chosen.choice([2, 7, 16, 40]), chosen.randint(2, 4)
    torch.manual_seed(seed)
    kinds = ["sliding_attention", "full_attention"]
    return gpt_oss(
        hidden_size=chosen.randint(9, 70),
        num_hidden_layers=layers,
        head_dim=2 * chosen.randint(2, 10),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=chosen.randint(5, 90),
        num_local_experts=experts,
        num_experts_per_tok=chosen.randint(1, min(8, experts)),
        sliding_window=chosen.choice([1, 5, 64]),
        swiglu_limit=chosen.choice([0.3, 7.0]),
        attention_bias=chosen.random() < 0.7,
        layer_types=None if chosen.random() < 0.5 else chosen.choices(kinds, k=layers),
        **({"rope_parameters": rope} if (rope := _rope(chosen)) else {}),
    )


def random_granite(seed: int) -> Any:
    """Odd and even head counts and sizes, 2 to 40 experts, top-1 to top-8, all factors, tied embeddings or not."""
    chosen, kv_heads, heads = _heads(seed)
    experts = chosen.choice([2, 7, 16, 40])
    torch.manual_seed(seed)
    return granite(
        hidden_size=heads * 2 * chosen.randint(2, 8),
        num_hidden_layers=chosen.randint(2, 4),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=chosen.randint(5, 90),
        num_local_experts=experts,
        num_experts_per_tok=chosen.randint(1, min(8, experts)),
        embedding_multiplier=chosen.uniform(0.5, 12.0),
        attention_multiplier=chosen.uniform(0.02, 0.2),
        residual_multiplier=chosen.uniform(0.2, 1.5),
        logits_scaling=chosen.uniform(0.5, 6.0),
        tie_word_embeddings=chosen.random() < 0.5,
        rope_parameters=_rope(chosen),
    )


def random_glm(seed: int) -> Any:
    """Odd and even head counts and sizes, 3 to 40 experts, top-1 to top-8, groups, dense layers, shared experts."""
    chosen, kv_heads, heads = _heads(seed)
    experts, layers = chosen.choice([3, 7, 16, 40]), chosen.randint(2, 4)
    groups = chosen.choice([each for each in (1, 1, 4, 8) if experts % each == 0])
    kept = chosen.randint(1, groups)
    torch.manual_seed(seed)
    return glm(
        hidden_size=chosen.randint(9, 70),
        num_hidden_layers=layers,
        first_k_dense_replace=chosen.randint(0, layers - 1),
        head_dim=4 * chosen.randint(1, 5),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=chosen.randint(5, 90),
        moe_intermediate_size=chosen.randint(5, 60),
        n_shared_experts=chosen.randint(1, 2),
        n_routed_experts=experts,
        n_group=groups,
        topk_group=kept,
        num_experts_per_tok=chosen.randint(1, min(8, experts // groups * kept)),
        norm_topk_prob=chosen.random() < 0.7,
        routed_scaling_factor=chosen.choice([1.0, 2.5]),
        attention_bias=chosen.random() < 0.6,
        use_qk_norm=chosen.random() < 0.5,
        rope_parameters=_rope(chosen),
    )


def random_dbrx(seed: int) -> DbrxForCausalLM:
    """Odd and even head counts and sizes, 3 to 16 experts, top-1 to top-4, clips that bite, hardly bite or never do."""
    chosen, kv_heads, heads = _heads(seed)
    experts = chosen.randint(3, 16)
    torch.manual_seed(seed)
    return dbrx(
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


def _rope(chosen: random.Random) -> dict[str, Any] | None:
    """Settings of a rotary embedding, to which a configuration may add; None for those of the family."""
    scaling = chosen.choice([None, *SCALINGS])
    return scaling and dict(scaling)


def _heads(seed: int) -> tuple[random.Random, int, int]:
    """The random source of a shape, and its numbers of key-value heads and of heads."""
    chosen = random.Random(seed)
    kv_heads = chosen.choice([1, 2, 3])
    return chosen, kv_heads, kv_heads * chosen.choice([1, 2, 3, 5])


def load_model(directory: Path, dtype: torch.dtype) -> Any:
    """A model of any family, as Hugging Face reads it in a dtype.

    `model.to(bfloat16)` would not do: it rounds the frequencies of the rotary embedding too.
    """
    return ready(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype))


def ready(model: Any) -> Any:
    """The model as it can be compared."""
    model.set_experts_implementation("eager")  # the others take no sizes that are odd
    return model.eval()


def prompts_of(vocabulary: int, lengths: Sequence[int] = (1, 13, 5, 5, 8)) -> list[list[int]]:
    """Prompts of mixed length."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def hugging_face_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """The logits after each of the tokens, given those before it: (T, V), float32."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()
