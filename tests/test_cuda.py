"""CUDA: the same tokens as on the CPU. Needs a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import moesched
from moesched.models.random_model import write_random_model
from test_same_logits import CONFIG, DBRX, PROMPTS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[CONFIG, DBRX], ids=lambda config: config.name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param.name
    return write_random_model(request.param, folder, seed=3, dtype="float32")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]] | None:
    return moesched.run_model(model, PROMPTS, max_new_tokens=6, micro_batch_size=2).tokens


@pytest.mark.parametrize(
    ("policy", "settings"),
    [("resident", {}), ("layer_streaming", {}), ("cgopipe", {}), ("adversarial", {"seed": 1})],
)
def test_every_policy_gives_the_tokens_of_the_cpu(
    model: Path, expected: list[list[int]], policy: str, settings: Mapping[str, int]
) -> None:
    report = moesched.run_model(
        model, PROMPTS, policy=policy, settings=settings, max_new_tokens=6, micro_batch_size=2, device="cuda"
    )
    assert report.tokens == expected
