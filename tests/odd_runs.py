"""Runs of a small model through a policy on a device, in memory that may make it stream."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.shared.small_runs import TWO_MEMORIES, Generated, fast_memory, generate
from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.machines import Machine
from moesched.models.checkpoint import Checkpoint
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.outcome import Report
from moesched.runs.planning import plan_run
from moesched.seams import Observer, TokenSpan
from odd_models import PROMPTS, layout_of


def one_batch(
    device: Any,
    policy: str,
    settings: Mapping[str, float] | None = None,
    *,
    machine: Machine = TWO_MEMORIES,
    weights: float = 2.0,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    new_tokens: int = 4,
    size: int = 2,
    observers: Sequence[Observer] = (),
    keep_open: bool = False,
) -> Generated:
    """The result of one batch.

    weights: the share of the weights that fast memory has room for beside all else.
    size: that of micro-batches.
    """
    return generate(
        device,
        make_policy(policy, dict(settings or {})),
        machine,
        prompts,
        new_tokens=new_tokens,
        micro_batch_size=size,
        weights=weights,
        observers=observers,
        keep_open=keep_open,
    )


def report_of(
    device: TorchDevice,
    policy: str,
    *,
    machine: Machine = TWO_MEMORIES,
    weights: float = 2.0,
    observers: Sequence[Observer] = (),
    keep_open: bool = False,
) -> Report:
    """The report of one batch, which may end early; `weights` as above."""
    made, batch = make_policy(policy), split_batch([len(prompt) for prompt in PROMPTS], 4, 2)
    budgets = fast_memory(device, machine, batch, weights)
    plan = plan_run(machine, device.layout, batch, made, budgets, device.slot_bytes)
    return run(plan, made, device, PROMPTS, observers=observers, keep_open=keep_open)


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
        one_batch(device, policy, settings, weights=weights, keep_open=not last) for last in (False, True)
    ]


class Choices:
    """An observer of routing that keeps the choices for each request, in order."""

    def __init__(self) -> None:
        self.of: defaultdict[int, list[object]] = defaultdict(list)

    def routed(self, layer: int, spans: Sequence[TokenSpan], experts_Tk: npt.NDArray[np.int64]) -> None:
        start = 0
        for span in spans:
            self.of[span.request].append((layer, span, experts_Tk[start : start + span.tokens].tolist()))
            start += span.tokens


def kv_caches() -> int:
    """The number of KV caches of torch devices that exist."""
    return sum(type(each) is BlockedKV for each in gc.get_objects())
