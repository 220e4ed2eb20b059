"""Layers that differ in window, norms, clipping and the router's weights: each runs by its own description."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace

from benchmarks.shared.small_runs import ONE_MEMORY, TWO_MEMORIES, generate
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.models.checkpoint import Checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.models.networks import Router
from moesched.models.prestack import prestack_model
from moesched.models.reading import require_runs
from moesched.models.rotary import Rotary
from moesched.plugins import make_policy
from moesched.transports.inproc import InprocTransport
from odd_models import GLM, GPT_OSS, GRANITE, OLMOE, PROMPTS, stored
from reference import Reference
from reference import generate as by_plain_loops

if TYPE_CHECKING:
    from moesched.devices.mlx.device import MlxDevice

STEPS = 4
VARIANTS: list[dict[str, Any]] = [
    {"window": 2},
    {"qk_norm": None, "clip": 0.05},
    {"router": Router()},
    {},
]


def with_layers(config: ModelConfig) -> ModelConfig:
    """The model with the variants one after the other."""
    layers = zip(config.pattern, VARIANTS, strict=True)
    return replace(config, pattern=tuple(layer.varied(**changes) for layer, changes in layers))


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return stored(OLMOE, tmp_path_factory.mktemp("models"))


def expected(checkpoint: Checkpoint, config: ModelConfig, dtype: str = "float32") -> torch.Tensor:
    """Logits (requests, steps, V) of plain loops over the layers."""
    model = Reference(checkpoint.path, getattr(torch, dtype))
    model.config = config
    return by_plain_loops(model, PROMPTS, STEPS)[1].transpose(0, 1)


@pytest.mark.parametrize(
    ("device", "dtype", "policy", "machine"),
    [
        ("torch", "float32", "resident", ONE_MEMORY),
        ("torch", "bfloat16", "resident", ONE_MEMORY),
        ("torch", "float32", "cgopipe", TWO_MEMORIES),
        ("torch", "float32", "expert_cache", TWO_MEMORIES),
        ("mlx", "float32", "resident", ONE_MEMORY),
    ],
)
def test_layers_that_differ_give_the_logits_of_plain_loops(
    alike: Checkpoint, device: str, dtype: str, policy: str, machine: Machine
) -> None:
    config = with_layers(alike.config)
    opened = device_of(device, replace(alike, config=config), dtype)
    got = generate(opened, make_policy(policy), machine, PROMPTS, new_tokens=STEPS, micro_batch_size=2)
    allowed = 1e-6 if dtype == "float32" else 1e-2
    torch.testing.assert_close(got.logits_RSV, expected(alike, config, dtype), rtol=0, atol=allowed)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_difference_shows_in_the_logits(alike: Checkpoint, number: int) -> None:
    config = with_layers(alike.config)
    pattern = [*config.pattern[:number], config.pattern[-1], *config.pattern[number + 1 :]]
    other = replace(config, pattern=tuple(pattern))
    assert (expected(alike, config) - expected(alike, other)).abs().max() > 1e-3


def device_of(name: str, checkpoint: Checkpoint, dtype: str) -> TorchDevice | MlxDevice:
    layout = weight_layout(checkpoint.config, dtype)
    if name == "torch":
        return TorchDevice(checkpoint, layout, keep_logits=True)
    pytest.importorskip("mlx.core", reason="there is no MLX for this platform")
    from moesched.devices.mlx.device import MlxDevice

    return MlxDevice(checkpoint, layout, keep_logits=True)


@pytest.mark.parametrize(
    ("setting", "value"), [("heads", 10), ("rotary", Rotary(theta=7.0)), ("intermediate", 88), ("top_k", 2)]
)
def test_what_devices_keep_alike_in_all_layers_may_not_differ(setting: str, value: Any) -> None:
    first, *others = OLMOE.pattern
    with pytest.raises(BadInput, match=f"its layers differ in {setting}, .*moesched simulate"):
        require_runs(replace(OLMOE, pattern=(first.varied(**{setting: value}), *others)))


def _on_mlx(model: Checkpoint, folder: Path) -> object:
    return device_of("mlx", model, "float32")


def _a_rank(model: Checkpoint, folder: Path) -> object:
    share = replace(model, config=replace(model.config, ranks=2))
    return device_of("torch", share, "float32").join(0, InprocTransport(2), None)


def _stacked(model: Checkpoint, folder: Path) -> object:
    return prestack_model(model.path, folder / "stacked")


@pytest.mark.parametrize("use", [_on_mlx, _a_rank, _stacked])
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GLM, "glm has biases of qkv and networks that every token uses, which .* does not"),
        (
            GPT_OSS,
            "gpt-oss has attention sinks and biases of experts and .* experts with a limit, which .* does not",
        ),
        (GRANITE, "granite has a scale of attention and factors of embeddings, .* which .* does not"),
    ],
)
def test_what_cannot_run_such_layers_says_so(
    use: Any, config: ModelConfig, said: str, tmp_path: Path
) -> None:
    model = stored(config, tmp_path)
    with pytest.raises(BadInput, match=said):
        use(model, tmp_path)
