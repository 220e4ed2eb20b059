"""Hugging Face's Accelerate on a capped GPU: the same shape, random weights, layers moved in as they are needed."""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import Any

import torch

from benchmarks.gpu._peers import kept
from moesched.models.config import ModelConfig
from moesched.models.published import published_config

BATCHES = (1024, 512, 256, 128, 64, 32, 16, 8)
DECODE_STEPS = 3
KEPT_FREE = 0.35
"""Of the cap, for the KV cache and activations of the largest batch that fits; the rest holds layers."""


def generate(config: ModelConfig, cap: int, prompt: int, new_tokens: int) -> dict[str, float]:
    """The largest batch of prompts of one length that fits: a step's time hardly depends on its size.

    A few decode steps are timed and stand for all. cap: bytes of the GPU's memory.

    Raises:
        torch.cuda.OutOfMemoryError: none fits.
    """
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, cap / torch.cuda.get_device_properties(0).total_memory)
    )
    model = _dispatched(config, cap)
    for batch in BATCHES:
        try:
            return _timed(model, config, batch, prompt, new_tokens)
        except torch.cuda.OutOfMemoryError:
            gc.collect()
            torch.cuda.empty_cache()
    raise torch.cuda.OutOfMemoryError(f"not even {BATCHES[-1]} prompts fit into {cap:,} bytes")


def _dispatched(config: ModelConfig, cap: int) -> Any:
    from accelerate import dispatch_model, infer_auto_device_map
    from transformers import AutoModelForCausalLM, MixtralConfig

    described = MixtralConfig(**published_config(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16, attn_implementation="sdpa")
    rotary = type(model.model.rotary_emb)(config=described)
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = rotary
    values = (torch.randn(1 << 25) * 0.02).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
            continue
        for piece in parameter.data.view(-1).split(len(values)):
            piece.copy_(values[: len(piece)])
    device_map = infer_auto_device_map(
        model,
        max_memory={0: int(cap * (1 - KEPT_FREE)), "cpu": 1 << 40},
        no_split_module_classes=["MixtralDecoderLayer"],
        dtype=torch.bfloat16,
    )
    return dispatch_model(model, device_map=device_map).eval()


@torch.inference_mode()
def _timed(model: Any, config: ModelConfig, batch: int, prompt: int, new_tokens: int) -> dict[str, float]:
    ids = torch.randint(config.vocabulary, (batch, prompt), device="cuda")
    begun = time.perf_counter()
    out = model(ids, use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1:].argmax(-1)
    torch.cuda.synchronize()
    prefill = time.perf_counter() - begun
    steps = []
    for _ in range(DECODE_STEPS):
        start = time.perf_counter()
        out = model(token.to("cuda"), **kept(model, out.past_key_values), use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        steps.append(time.perf_counter() - start)
    seconds = prefill + (new_tokens - 1) * median(steps)
    return {
        "batch_size": batch,
        "prefill_seconds": prefill,
        "decode_step_seconds": median(steps),
        "throughput_tokens_per_second": batch * new_tokens / seconds,
    }
