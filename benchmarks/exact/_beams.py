"""Beam search of a small model: ours through a policy, and Hugging Face's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.shared.small_runs import ONE_MEMORY, fast_memory
from moesched.devices.torch.device import TorchDevice
from moesched.machines import Machine
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.requests.sampling import Sampling
from moesched.runs.generation import TokenHandling
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run


def searched(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    new_tokens: int,
    policy: str = "resident",
    machine: Machine = ONE_MEMORY,
    weights: float = 2.0,
    micro_batch_size: int = 3,
) -> tuple[list[list[int]], list[float]]:
    """The best sequence of each prompt, without the prompt, and its score; float32, all prompts in one batch.

    weights: the share of the weights that fast memory has room for beside all else.
    """
    checkpoint = open_checkpoint(directory)
    device = TorchDevice(checkpoint, weight_layout(checkpoint.config, "float32"))
    batch = split_batch(list(map(len, prompts)), new_tokens, micro_batch_size)
    batch = replace(batch, beams=sampling.beams)
    budgets = fast_memory(device, machine, batch, weights)
    scheduler = make_policy(policy)
    plan = plan_run(machine, device.layout, batch, scheduler, budgets, device.slot_bytes)
    report = run(
        plan,
        scheduler,
        device,
        prompts,
        sampling=sampling,
        tokens=TokenHandling(checkpoint.config.stop_tokens),
    )
    assert report.tokens is not None
    assert report.scores is not None
    return report.tokens, report.scores


def hugging_face_beams(
    model: Any, prompt: Sequence[int], sampling: Sampling, stop_tokens: Sequence[int], new_tokens: int
) -> tuple[list[int], float]:
    """Best sequence that `generate` finds for one prompt, up to its end token."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=sampling.beams,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        eos_token_id=list(stop_tokens) or None,
        pad_token_id=0,
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    ends = [place + 1 for place, token in enumerate(tokens) if token in stop_tokens]
    return tokens[: ends[0] if ends else None], float(out.sequences_scores[0])
