"""llama.cpp by its C interface, on a GGUF file of the same weights.

Contexts have one KV cache per sequence, as `llama-batched-bench` has them. Greedy tokens are chosen here, from logits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np
import numpy.typing as npt

from benchmarks.peers.protocol import Answer, Message, serve
from benchmarks.shared.gguf_files import gguf_of
from moesched.system.cores import usable_cores

BATCH_TOKENS = 2048
MICRO_BATCH = 512
ALL_LAYERS = 999  # where it was built with CUDA


class Sequences:
    """Sequences that are decoded together in a context of their own."""

    def __init__(self, model: Any, count: int, tokens: int, setting: Message) -> None:
        options = api.llama_context_default_params()
        options.n_ctx = count * (-(-tokens // 256) * 256)
        options.n_batch = BATCH_TOKENS
        options.n_ubatch = MICRO_BATCH
        options.n_seq_max = count
        options.n_threads = options.n_threads_batch = usable_cores()
        options.flash_attn_type = int(setting["flash_attention"])
        options.kv_unified = False
        options.no_perf = True
        self._context = api.llama_init_from_model(model, options)
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)

    def close(self) -> None:
        """Release the context."""
        api.llama_batch_free(self._batch)
        api.llama_free(self._context)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Read all prompts; the first token of each."""
        entries = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        chosen = []
        for start in range(0, len(entries), BATCH_TOKENS):
            chosen += self._decode(entries[start : start + BATCH_TOKENS])
        return chosen

    def step(self, tokens: Sequence[int], position: int) -> list[int]:
        """The next token of each sequence."""
        return self._decode([(token, position, sequence, True) for sequence, token in enumerate(tokens)])

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        batch = self._batch
        for index, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wanted
        batch.n_tokens = len(entries)
        if code := api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode gave {code}")
        wanted_at = [index for index, entry in enumerate(entries) if entry[3]]
        return [int(self._logits(index).argmax()) for index in wanted_at]

    def _logits(self, index: int) -> npt.NDArray[np.float32]:
        values = api.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(values, shape=(self._vocabulary,))


def load() -> tuple[Answer, Message]:
    """The file that the command names, or that of the model in a folder, which is written first if there is none."""
    model_path = Path(sys.argv[1])
    file = gguf_of(model_path) if model_path.is_dir() else model_path
    api.llama_backend_init()
    options = api.llama_model_default_params()
    options.n_gpu_layers = ALL_LAYERS
    model = api.llama_model_load_from_file(str(file).encode(), options)
    if not model:
        raise RuntimeError(f"{file} does not load")

    def generate(request: Message) -> Message:
        prompts, steps = request["prompts"], request["new_tokens"] - 1
        longest = max(map(len, prompts))
        sequences = Sequences(model, len(prompts), longest + steps + 1, request["setting"])
        seconds: list[float] = []
        tokens: list[list[int]] = []
        try:
            for step in range(steps + 1):
                started = time.perf_counter()
                if step:
                    chosen = sequences.step(tokens[-1], longest + step - 1)
                else:
                    chosen = sequences.prefill(prompts)
                seconds.append(time.perf_counter() - started)
                tokens.append(chosen)
        finally:
            sequences.close()
        return {
            "prefill_seconds": seconds[0],
            "step_seconds": seconds[1:],
            "tokens": [list(each) for each in zip(*tokens, strict=True)],
        }

    system = api.llama_print_system_info().decode()
    return generate, {"versions": {"llama-cpp-python": version("llama-cpp-python")}, "built_for": system}


if __name__ == "__main__":
    serve(load)
