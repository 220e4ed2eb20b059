"""Hugging Face's transformers, and Accelerate's disk offload, decoding the same prompts."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _decoding import Model
from _reading import warm

from moesched.system.cores import usable_cores

EXPERT_SETTINGS = ("eager", "grouped_mm")


def missing_peers() -> str | None:
    """Why there is nothing to compare with, if so."""
    absent = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


class HuggingFace:
    """A model of transformers, decoding greedily."""

    def __init__(self, directory: Path, experts: str, **loading: Any) -> None:
        from transformers import AutoModelForCausalLM
        from transformers import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        logging.getLogger("accelerate").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=torch.bfloat16,
                attn_implementation="sdpa",
                experts_implementation=experts,
                **loading,
            ).eval()

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> tuple[float, list[float]]:
        """Seconds of the prefill, and of each decode step."""
        torch.set_num_threads(usable_cores())
        tokens_ST, cache, seconds = torch.tensor(prompts), None, []
        with torch.inference_mode():
            for _ in range(steps):
                started = time.perf_counter()
                output = self.model(tokens_ST, past_key_values=cache, use_cache=True)
                cache, tokens_ST = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
                seconds.append(time.perf_counter() - started)
        return seconds[0], seconds[1:]


def decode_from_disk(
    model: Model, experts: str, prompts: Sequence[Sequence[int]], steps: int
) -> tuple[float, list[float]]:
    """The same with Accelerate's disk offload under the model's budget, its files in the page cache."""
    folder = Path(tempfile.mkdtemp(dir=model.directory.parent, prefix=".offload-"))
    try:
        limits = {"max_memory": {"cpu": model.budget}, "offload_folder": str(folder)}
        peer = HuggingFace(model.directory, experts, device_map="auto", **limits)
        warm(folder)
        return peer.decode(prompts, steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
