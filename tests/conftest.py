"""What all tests share: no network, reproducible property tests, GPU tests only where there is a GPU, commands."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

# Before any test imports transformers: its models come from the tests themselves, never from a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# Every run of a test checks the engine's transitions and the memory's books.
os.environ["MOESCHED_VALIDATE"] = "1"

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", max_examples=2_000, deadline=None, print_blob=True)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a machine without one."""
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not has_gpu():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


def has_gpu() -> bool:
    """Whether torch can use a CUDA device; imported here, since torch takes seconds to load."""
    import torch

    return torch.cuda.is_available()


class Said(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process."""
    from moesched.cli.main import main

    def run(*arguments: object) -> Said:
        code = main([str(each) for each in arguments])
        return Said(code, *capfd.readouterr())

    return run
