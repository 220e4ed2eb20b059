"""vLLM on a CUDA GPU, with weights offloaded to the host's memory.

It streams no times of single steps: a step's time is what each further token of a whole generation took on average.
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version

from vllm import LLM, SamplingParams, TokensPrompt

from peers.protocol import Answer, Message, serve

OFFLOADED_GB = 1


def load() -> tuple[Answer, Message]:
    """The model in the folder that the command names."""
    model = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        cpu_offload_gb=OFFLOADED_GB,
        max_model_len=4096,
        enable_prefix_caching=False,
    )

    def timed(prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        sampling = SamplingParams(
            temperature=0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        started = time.perf_counter()
        outputs = model.generate(inputs, sampling, use_tqdm=False)
        return time.perf_counter() - started, [list(each.outputs[0].token_ids) for each in outputs]

    def generate(request: Message) -> Message:
        prefill, tokens = timed(request["prompts"], 1)
        steps = request["new_tokens"] - 1
        if not steps:
            return {"prefill_seconds": prefill, "step_seconds": [], "tokens": tokens}
        seconds, tokens = timed(request["prompts"], steps + 1)
        return {
            "prefill_seconds": prefill,
            "step_seconds": [(seconds - prefill) / steps] * steps,
            "tokens": tokens,
        }

    return generate, {"versions": {"vllm": version("vllm")}}


if __name__ == "__main__":
    serve(load)
