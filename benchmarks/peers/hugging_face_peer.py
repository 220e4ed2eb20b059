"""Hugging Face's transformers on the CPU, with each of its settings for experts, decoding greedily.

    python -m peers.hugging_face_peer MODEL [BYTES]

With BYTES, Accelerate offloads to the disk what is beyond them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.peers.protocol import Answer, Message, serve
from moesched.system.cores import usable_cores

PACKAGES = ("transformers", "accelerate", "torch")


def load() -> tuple[Answer, Message]:
    """The model; a request changes the setting for experts in place."""
    logging.disable_progress_bar()
    torch.set_num_threads(usable_cores())
    model = (
        AutoModelForCausalLM.from_pretrained(  # with torch's attention, where the family's code can use it
            sys.argv[1], dtype=torch.bfloat16, **offloading()
        ).eval()
    )

    @torch.inference_mode()
    def generate(request: Message) -> Message:
        model.set_experts_implementation(request["setting"]["experts"])
        tokens_ST, cache, seconds, chosen = torch.tensor(request["prompts"]), None, [], []
        for _ in range(request["new_tokens"]):
            started = time.perf_counter()
            output = model(tokens_ST, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, tokens_ST = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
            seconds.append(time.perf_counter() - started)
            chosen.append(tokens_ST)
        return {
            "prefill_seconds": seconds[0],
            "step_seconds": seconds[1:],
            "tokens": torch.cat(chosen, dim=1).tolist(),
        }

    return generate, {"versions": {name: version(name) for name in PACKAGES}}


def offloading() -> dict[str, Any]:
    """Arguments of loading under a budget."""
    if not sys.argv[2:]:
        return {}
    folder = tempfile.mkdtemp(prefix="offload-")
    return {"device_map": "auto", "max_memory": {"cpu": int(sys.argv[2])}, "offload_folder": folder}


if __name__ == "__main__":
    serve(load)
