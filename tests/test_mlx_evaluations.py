"""MLX evaluates where the host needs a value: few times for a token, with the same bits."""

# ruff: noqa: E402  # what needs MLX is imported after the check that it is there
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="there is no MLX for this platform")

import moesched
from mlx_nodes import TOY_DBRX, run_nodes
from moesched.devices.mlx.thread import OneThread
from moesched.models.random_model import write_random_model
from moesched.trace import check_trace

TOKENS = 5
MOST_FOR_A_TOKEN = 90


@pytest.fixture(scope="module")
def dbrx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(TOY_DBRX, tmp_path_factory.mktemp("models") / "dbrx", dtype="float32")


def test_a_token_of_dbrx_on_two_nodes_takes_few_evaluations_and_has_the_bits_of_one_for_every_task(
    dbrx: Path,
) -> None:
    settings = {"keep_logits": True}
    needed, devices = run_nodes(dbrx, TOKENS, {**settings})
    every_task, others = run_nodes(dbrx, TOKENS, {**settings, "evaluate": "task"})
    assert needed.tokens == every_task.tokens
    for device, other in zip(devices, others, strict=True):
        assert device.evaluations <= MOST_FOR_A_TOKEN * TOKENS
        assert other.evaluations > 3 * device.evaluations
        for (_, mine), (_, theirs) in zip(device.logits, other.logits, strict=True):
            assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("policy", ["resident", "cgopipe", "expert_streaming"])
def test_a_traced_run_has_a_span_for_every_task_either_way(
    no_text: Path, tmp_path: Path, policy: str
) -> None:
    tokens = []
    for evaluate in ("needed", "task"):
        trace = tmp_path / f"{evaluate}.json"
        report = moesched.run_model(
            no_text,
            [[1, 2, 3], [4, 5]],
            device="mlx",
            device_settings={"evaluate": evaluate},
            policy=policy,
            max_new_tokens=4,
            micro_batch_size=1,
            trace=trace,
        )
        assert not check_trace(trace)
        tokens.append(report.tokens)
    assert tokens[0] == tokens[1]


def test_posted_calls_run_in_order_before_the_next_one_that_is_waited_for() -> None:
    thread = OneThread("test")
    ran: list[int] = []
    for number in range(3):
        thread.post(ran.append, number)
    assert not ran
    thread.call(ran.append, 3)
    assert ran == [0, 1, 2, 3]
    thread.post(ran.append, 4)
    thread.drop_posted()
    thread.call(ran.append, 5)
    assert ran == [0, 1, 2, 3, 5]
    thread.close()


def test_what_a_posted_call_raises_ends_the_next_one_and_drops_what_builds_on_it() -> None:
    thread = OneThread("test")
    ran: list[int] = []
    thread.post({}.__getitem__, 0)
    thread.post(ran.append, 1)
    with pytest.raises(KeyError):
        thread.call(ran.append, 2)
    thread.call(ran.append, 3)
    assert ran == [3]
    thread.close()
