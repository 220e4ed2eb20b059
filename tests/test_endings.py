"""Runs that end early: the report and the trace so far are kept, and nothing of the run stays in memory."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import moesched
from commands import failed
from moesched import run_model
from moesched.devices.torch.device import TorchDevice
from moesched.errors import report_of
from moesched.models.random_model import write_random_model
from moesched.plugins import make_policy
from moesched.runs.listeners import Listener
from moesched.runs.outcome import make_report
from moesched.runs.ranks import Rank
from moesched.runs.simulation import simulate
from moesched.runs.virtual_run import VirtualRun
from moesched.tasks import Lane, Task
from moesched.trace import Recorder, check_trace
from odd_models import MIXTRAL
from runs import FORTY_PERCENT, make_plan
from small_models import SMALL

FAILING = """
from moesched.policies.twiddler import Twiddler

class Illegal(Twiddler):
    async def decode(self, step):
        if step.index == 10:
            step.sample(step.micro_batches[0])
        await super().decode(step)

class Stumbles(Twiddler):
    async def decode(self, step):
        if step.index == 10:
            raise KeyError("a key")
        await super().decode(step)
"""
TWELVE_TOKENS = ("--prompt-ids", "1,2;3", "--max-new-tokens", 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(MIXTRAL, tmp_path_factory.mktemp("models") / "model", dtype="float32")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with policies that fail in their fifth step."""
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "load.toml").write_text('name = "load"\nnew_tokens = [12]\nprompt_tokens = [3, 2]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("failing", None)


@pytest.mark.parametrize("wanted", ["run", "simulate"])
def test_a_policy_that_fails_late_leaves_a_report_and_a_trace(
    command: Any, model: Path, here: Path, wanted: str
) -> None:
    arguments = ["run", model, *TWELVE_TOKENS]
    if wanted == "simulate":
        arguments = ["simulate", "--model", model, "--machine", "t4", "--workload", "load.toml"]
    said = command(
        *arguments, "--policy", "failing:Illegal", "--report", "report.json", "--trace", "trace.json"
    )
    failed(said, r"failing\.py:7: OutOfOrder: sample\(mb0\)")
    report = json.loads(Path("report.json").read_text())
    assert "sample(mb0)" in report["failure"]
    assert len(report["step_seconds"]) == 9
    if wanted == "run":
        assert [len(tokens) for tokens in report["tokens"]] == [9, 9]
    assert check_trace(Path("trace.json")) == []


def test_any_other_error_of_a_run_has_its_report(model: Path, here: Path) -> None:
    with pytest.raises(KeyError, match="a key") as caught:
        moesched.run_model(model, [[1, 2], [3]], policy="failing:Stumbles", max_new_tokens=12)
    report = report_of(caught.value)
    assert report.failure == "'a key'"
    whole = moesched.run_model(model, [[1, 2], [3]], max_new_tokens=9)
    assert report.tokens == whole.tokens


class Truncates(Listener):
    """Cuts the weights off once the first token is there."""

    def __init__(self, model: Path) -> None:
        self._shard = next(model.glob("*.safetensors"))

    def generated(self, request: int, token: int, text: str) -> None:
        os.truncate(self._shard, 1000)


def test_weights_that_cannot_be_read_end_a_run_with_a_report(tmp_path: Path) -> None:
    model = write_random_model(MIXTRAL, tmp_path / "model", dtype="float32")
    report = moesched.run_model(
        model, [[1, 2]], policy="layer_streaming", max_new_tokens=50, listener=Truncates(model),
        budgets={"host": 350_000},
    )  # fmt: skip
    assert report.failure is not None
    assert "it was cut short since it was opened" in report.failure
    assert report.tokens is not None
    assert 1 <= len(report.tokens[0]) < 50


@pytest.mark.parametrize("policy", ["failing:Illegal", "failing:Stumbles"])
def test_nothing_of_a_failed_run_stays_in_memory(model: Path, here: Path, policy: str) -> None:
    gc.collect()
    before = alive(TorchDevice)
    with pytest.raises((KeyError, moesched.PolicyError)):
        moesched.run_model(model, [[1, 2], [3]], policy=policy, max_new_tokens=12)
    gc.collect()
    assert alive(TorchDevice) == before


def test_lanes_of_an_interrupted_run_are_busy_for_at_most_the_time_of_its_whole_steps() -> None:
    policy = make_policy("layer_streaming")
    plan = make_plan(policy, budgets=FORTY_PERCENT, new_tokens=4)

    class Interrupts(Listener):
        def ended(self, task: Task) -> None:
            if task.step == 2 and task.verb == "sample":
                raise KeyboardInterrupt

    virtual = VirtualRun([Rank(plan, policy)], sharing=False, observers=[Interrupts()])
    with pytest.raises(KeyboardInterrupt):
        virtual.run()
    report = make_report(plan, policy, virtual.rank_runs[0].outcome(), 0.0, measured=False, interrupted=True)
    assert len(report.step_seconds) == 2
    assert max(lane.utilization for lane in report.lanes.values()) == 1.0
    busiest = max(lane.busy_seconds for lane in report.lanes.values())
    assert busiest == pytest.approx(sum(report.step_seconds), rel=0.1), "the third step adds half as much"


# -- memory ------------------------------------------------------------------------------------------------------------


def alive(kind: type) -> int:
    """The number of such objects in this process."""
    return sum(isinstance(each, kind) for each in gc.get_objects())


@contextmanager
def nothing_left(kind: type) -> Iterator[None]:
    """Check that the block leaves no more such objects, although no garbage is collected."""
    gc.collect()
    before = alive(kind)
    gc.disable()
    try:
        yield
        assert alive(kind) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("policy", ["resident", "cgopipe"])
def test_no_tensor_outlives_its_run(policy: str, tmp_path: Path) -> None:
    model = write_random_model(SMALL, tmp_path / "model")
    with nothing_left(torch.Tensor):
        report = run_model(model, [[1, 2, 3]], policy=policy, max_new_tokens=2)
        assert report.failure is None


@pytest.mark.parametrize(("sharing", "replay"), [(False, False), (True, False), (False, True)])
def test_no_task_outlives_its_simulation(sharing: bool, replay: bool) -> None:
    """Tasks refer to their lanes, and cannot be counted themselves."""
    policy = make_policy("cgopipe")
    plan = make_plan(policy)
    with nothing_left(Lane):
        simulate(plan, policy, sharing=sharing, replay=replay, recorder=Recorder())
