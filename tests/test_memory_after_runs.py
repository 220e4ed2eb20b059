"""Weights, caches and results of a run are freed at its end, without waiting for the garbage collector."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from moesched import run_model
from moesched.models.random_model import write_random_model
from moesched.plugins import make_policy
from moesched.runs.simulation import simulate
from moesched.tasks import Lane
from moesched.trace import Recorder
from runs import make_plan
from small_models import SMALL


@pytest.mark.parametrize("policy", ["resident", "cgopipe"])
def test_no_tensor_outlives_its_run_although_no_garbage_is_collected(policy: str, tmp_path: Path) -> None:
    model = write_random_model(SMALL, tmp_path / "model")
    gc.collect()
    before = tensors()
    gc.disable()
    try:
        report = run_model(model, [[1, 2, 3]], policy=policy, max_new_tokens=2)
        assert report.failure is None
        assert tensors() == before
    finally:
        gc.enable()


@pytest.mark.parametrize(("sharing", "replay"), [(False, False), (True, False), (False, True)])
def test_no_task_outlives_its_simulation_although_no_garbage_is_collected(
    sharing: bool, replay: bool
) -> None:
    policy = make_policy("cgopipe")
    plan = make_plan(policy)
    gc.collect()
    before = lanes()
    gc.disable()
    try:
        simulate(plan, policy, sharing=sharing, replay=replay, recorder=Recorder())
        assert lanes() == before
    finally:
        gc.enable()


def lanes() -> int:
    """The number of lanes in this process. Tasks refer to theirs, and cannot be counted themselves."""
    return sum(isinstance(each, Lane) for each in gc.get_objects())


def tensors() -> int:
    """The number of tensors in this process."""
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
