"""Other programs on a GPU, for gpu_hour.py: each call runs in a process of its own, and gives tokens per second."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared.fresh_process import RowFailed, in_one_line, last_line

EXPERTS = ("eager", "grouped_mm")
"""Settings of Hugging Face's experts; the faster one counts in each figure."""
BATCH_TOKENS = 2048
ALL_LAYERS = 99
CELLS = 256
"""A sequence's KV cache is a multiple of that many tokens."""


def hugging_face(
    model: Path, device: str, batches: Sequence[int], prompt: int, new_tokens: int
) -> dict[str, Any]:
    """Hugging Face's eager loop, all weights on the device; prompts are read twice, and the second time counts."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
    loaded = loaded.to(device).eval()
    found: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    for batch in batches:
        tried = []
        for experts in EXPERTS:
            try:
                loaded.set_experts_implementation(experts)
                tried += [_timed(loaded, device, batch, prompt, new_tokens) for _ in range(2)][1:]
            except (AttributeError, RuntimeError, ValueError) as error:  # not in this version, or no memory
                failed[f"batch {batch}, {experts}"] = in_one_line(error)
        if tried:
            found[str(batch)] = {name: max(each[name] for each in tried) for name in tried[0]}
    if not found:
        raise RowFailed(next(iter(failed.values())))
    versions = {name: version(name) for name in ("transformers", "torch")}
    return {"versions": versions, "batches": found, "failed": failed}


def _timed(model: Any, device: str, batch: int, prompt: int, new_tokens: int) -> dict[str, float]:
    import torch

    def wait() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    ids, cache, times = torch.randint(model.config.vocab_size, (batch, prompt), device=device), None, []
    with torch.inference_mode():
        for _ in range(new_tokens):
            begun = wait()
            output = model(ids, **kept(model, cache), use_cache=True, logits_to_keep=1)
            cache, ids = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
            times.append(wait() - begun)
    return {
        "prefill_tokens_per_second": batch * prompt / times[0],
        "decode_tokens_per_second": batch / median(times[1:]),
    }


def kept(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument of a model's KV cache: `cache`, in older versions `past_key_values`."""
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    return {name: cache}


def llama_cpp(
    program: Path, model: Path, batches: Sequence[int], prompt: int, new_tokens: int, *options: str
) -> dict[str, Any]:
    """llama.cpp's own benchmark of batches, with as many layers on the GPU as its options leave there.

    Raises:
        RowFailed: it fails or prints no figures.
    """
    tokens = max(batches) * -(-(prompt + new_tokens) // CELLS) * CELLS
    command = [
        *(str(program), "-m", str(model), "-ngl", str(ALL_LAYERS), "-c", str(tokens)),
        *("-b", str(BATCH_TOKENS), "-ub", str(BATCH_TOKENS)),
        *("-npp", str(prompt), "-ntg", str(new_tokens), "-npl", ",".join(map(str, batches))),
        *("--output-format", "jsonl", *options),
    ]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode or not lines:
        raise RowFailed(f"{program.name} ended with {ran.returncode}: {last_line(ran.stderr)}")
    return {
        "batches": {
            str(line["pl"]): {
                "prefill_tokens_per_second": line["speed_pp"],
                "decode_tokens_per_second": line["speed_tg"],
            }
            for line in lines
        }
    }
