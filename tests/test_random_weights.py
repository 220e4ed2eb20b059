"""Weights that are made in memory: a model of any size without a file."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from moesched.devices.shared.page_reader import PageReader
from moesched.devices.torch.device import TorchDevice
from moesched.machines import parse_machine
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.testing.random_weights import MATRICES, REPEATED_BYTES, Repeated, random_checkpoint
from small_models import SMALL
from test_emulated_device import MACHINE

CONFIG = msgspec.structs.replace(SMALL, dtype="float32")


def tokens(policy: str, seed: int = 0, *, direct: bool = True) -> list[list[int]] | None:
    layout = weight_layout(CONFIG)
    device = TorchDevice(random_checkpoint(CONFIG, seed), layout, direct=direct)
    made = make_policy(policy)
    plan = plan_run(
        parse_machine(MACHINE, "test"), layout, split_batch([3, 3], 5, 1), made, None, device.slot_bytes
    )
    return run(plan, made, device, [[1, 2, 3], [4, 5, 6]]).tokens


def test_norms_are_one_and_matrices_are_random() -> None:
    with PageReader(random_checkpoint(CONFIG), weight_layout(CONFIG)) as reader:
        assert reader.read_tensor("final_norm").eq(1).all()
        q = reader.read_tensor("layers.0.q")
    assert 0.01 < q.std().item() < 0.03
    assert len(q.unique()) > q.numel() / 2


def test_every_policy_generates_the_same_from_them() -> None:
    assert tokens("layer_streaming") == tokens("cgopipe") == tokens("cgopipe", direct=False)


def test_a_seed_makes_the_same_weights_again_and_another_one_others() -> None:
    assert tokens("resident", seed=1) == tokens("resident", seed=1)
    assert tokens("resident", seed=1) != tokens("resident", seed=2)


@pytest.mark.parametrize("offset", [0, 4096, REPEATED_BYTES - 4096, 3 * REPEATED_BYTES + 8192])
def test_a_file_without_end_repeats_its_items(offset: int) -> None:
    items = np.arange(REPEATED_BYTES // 4, dtype=np.int32)
    into = bytearray(3 * 4096)
    assert Repeated(MATRICES, items.view(np.uint8)).read(memoryview(into), offset, 1) == len(into)
    first = offset % REPEATED_BYTES // 4
    wanted = (np.arange(len(into) // 4) + first) % len(items)
    assert np.frombuffer(into, dtype=np.int32).tolist() == wanted.tolist()
