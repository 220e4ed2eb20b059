"""Runs of a small model through a policy on a device, in memory that may make it stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.shared.small_runs import TWO_MEMORIES, Generated, generate
from moesched.devices.torch.device import TorchDevice
from moesched.machines import Machine
from moesched.models.checkpoint import Checkpoint
from moesched.plugins import make_policy
from moesched.seams import Observer
from odd_models import PROMPTS, layout_of


def generated(
    device: TorchDevice,
    policy: str,
    settings: Mapping[str, float] | None = None,
    *,
    machine: Machine = TWO_MEMORIES,
    weights: float = 2.0,
    observers: Sequence[Observer] = (),
    keep_open: bool = False,
) -> Generated:
    """The result of one batch.

    weights: the share of the weights that fast memory has room for beside all else.
    """
    return generate(
        device,
        make_policy(policy, dict(settings or {})),
        machine,
        PROMPTS,
        new_tokens=4,
        micro_batch_size=2,
        weights=weights,
        observers=observers,
        keep_open=keep_open,
    )


def two_batches(
    open_device: Callable[..., TorchDevice],
    checkpoint: Checkpoint,
    dtype: str,
    policy: str,
    settings: Mapping[str, int],
    weights: float,
) -> Sequence[Generated]:
    """The results of both batches; `weights` as above."""
    device = open_device(checkpoint, layout_of(checkpoint.config, dtype), keep_logits=True)
    return [
        generated(device, policy, settings, weights=weights, keep_open=not last) for last in (False, True)
    ]
