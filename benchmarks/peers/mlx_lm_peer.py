"""mlx-lm on the CPU, decoding greedily, in float32: its products of stacked experts have no other type there."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from benchmarks.peers.protocol import Answer, Message, serve


def load() -> tuple[Answer, Message]:
    """The model in the folder that the command names, without a tokenizer."""
    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(sys.argv[1]))
    model.set_dtype(mx.float32)

    def generate(request: Message) -> Message:
        tokens_ST, cache, seconds, chosen = mx.array(request["prompts"]), make_prompt_cache(model), [], []
        for _ in range(request["new_tokens"]):
            started = time.perf_counter()
            tokens_ST = mx.argmax(model(tokens_ST, cache=cache)[:, -1], axis=-1, keepdims=True)
            mx.eval(tokens_ST)
            seconds.append(time.perf_counter() - started)
            chosen.append(tokens_ST)
        return {
            "prefill_seconds": seconds[0],
            "step_seconds": seconds[1:],
            "tokens": mx.concatenate(chosen, axis=1).tolist(),
        }

    return generate, {"versions": {name: version(name) for name in ("mlx", "mlx-lm")}}


if __name__ == "__main__":
    serve(load)
