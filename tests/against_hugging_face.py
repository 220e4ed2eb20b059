"""Greedy tokens of a device beside Hugging Face's, for the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.random_models import DECISIVE, hugging_face_logits, prompts_of
from benchmarks.shared.small_runs import ONE_MEMORY, Generated, generate
from moesched.devices.torch.device import TorchDevice
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy

STEPS = 6


def generated(
    model: Path,
    dtype: str = "float32",
    page_bytes: int | None = None,
    kind: Any = TorchDevice,
    policy: str = "resident",
) -> Generated:
    """Tokens of a policy, by default the one without transfers, for prompts of mixed length, on a kind of device."""
    checkpoint = open_checkpoint(model)
    device = kind(checkpoint, weight_layout(checkpoint.config, dtype, page_bytes), keep_logits=True)
    prompts = prompts_of(checkpoint.config.vocabulary)
    return generate(device, make_policy(policy), ONE_MEMORY, prompts, new_tokens=STEPS, micro_batch_size=3)


def assert_near(model: Any, ours: Generated, most: float) -> None:
    """Logits are those of Hugging Face, up to a share of the largest one."""
    prompts = prompts_of(model.config.vocab_size)
    for prompt, tokens, logits_SV in zip(prompts, ours.tokens, ours.logits_RSV, strict=True):
        theirs_SV = hugging_face_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        assert (logits_SV - theirs_SV).abs().max() <= most * theirs_SV.abs().max()


def assert_same_tokens(
    model: Any, ours: Generated, logits_of: Callable[[Any, list[int]], torch.Tensor] = hugging_face_logits
) -> None:
    """Greedy tokens equal those of another library, by default Hugging Face, wherever its choice is decisive."""
    prompts = prompts_of(model.config.vocab_size)
    decisive = 0
    for prompt, tokens, logits in zip(prompts, ours.tokens, ours.logits_RSV, strict=True):
        expected = logits_of(model, prompt + tokens)[len(prompt) - 1 : -1]
        assert torch.allclose(logits, expected, atol=2e-4, rtol=1e-3)
        first, second = expected.topk(2, dim=-1).values.unbind(-1)
        clear = first - second > DECISIVE
        decisive += int(clear.sum())
        assert torch.equal(expected.argmax(-1)[clear], torch.tensor(tokens)[clear])
    assert decisive > 0.9 * len(prompts) * STEPS
