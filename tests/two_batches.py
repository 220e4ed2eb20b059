"""Two batches of a small model through a policy on a device, in memory that makes it stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from _small_runs import TWO_MEMORIES, Generated, generate

from moesched.devices.torch.device import TorchDevice
from moesched.models.checkpoint import Checkpoint
from moesched.plugins import make_policy
from odd_models import PROMPTS, layout_of


def two_batches(
    open_device: Callable[..., TorchDevice],
    checkpoint: Checkpoint,
    dtype: str,
    policy: str,
    settings: Mapping[str, int],
    weights: float,
) -> Sequence[Generated]:
    """The results of both batches.

    weights: the share of the weights that fast memory has room for beside all else.
    """
    device = open_device(checkpoint, layout_of(checkpoint.config, dtype), keep_logits=True)
    return [
        generate(
            device,
            make_policy(policy, dict(settings)),
            TWO_MEMORIES,
            PROMPTS,
            new_tokens=4,
            micro_batch_size=2,
            weights=weights,
            keep_open=not last,
        )
        for last in (False, True)
    ]
