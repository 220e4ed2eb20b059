"""CUDA: the same tokens as on the CPU. Needs a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import moesched
from moesched.devices.torch.copies import copied, wait_for_copies
from moesched.devices.torch.cuda_streams import CudaStreams
from moesched.models.random_model import write_random_model
from moesched.tasks import Kernel, Lane, Task, Work
from odd_models import DBRX, MIXTRAL, PROMPTS
from policies_for_two_memories import POLICIES

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[MIXTRAL, DBRX], ids=lambda config: config.name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param.name
    return write_random_model(request.param, folder, seed=3, dtype="float32")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]] | None:
    return moesched.run_model(model, PROMPTS, max_new_tokens=6, micro_batch_size=2).tokens


@pytest.mark.parametrize(("policy", "settings"), POLICIES)
def test_every_policy_gives_the_tokens_of_the_cpu(
    model: Path, expected: list[list[int]], policy: str, settings: Mapping[str, int]
) -> None:
    report = moesched.run_model(
        model, PROMPTS, policy=policy, settings=settings, max_new_tokens=6, micro_batch_size=2, device="cuda"
    )
    assert report.tokens == expected


def test_a_page_locked_copy_is_there_when_the_stream_has_come_so_far() -> None:
    cuda, host = torch.device("cuda:0"), torch.device("cpu")
    numbers = torch.arange(1 << 20).view(1024, 1024)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        back = copied(copied(numbers, cuda)[:, 1::2], host)
        assert back.is_pinned()
        wait_for_copies(cuda)
    assert back.equal(numbers[:, 1::2])


def test_events_are_used_again_and_edges_hold_all_the_same() -> None:
    total = torch.zeros(1, device="cuda")
    device = torch.device("cuda:0")
    streams = CudaStreams(device, ("a", "b"), lambda task: total.add_(1).mul_(1.0))
    lanes = [Lane("a"), Lane("b")]
    before: list[Task] = []
    for number in range(12_000):
        task = Kernel(lanes[number % 2], Work("add", "gpu"), "add", id=number)
        issued = streams.issue(task, before)
        before = [task]
        if number % 64 == 0:
            issued.wait()
            assert issued.span()[0] <= issued.span()[1]
    torch.cuda.synchronize()
    assert total.item() == 12_000
