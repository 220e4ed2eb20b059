"""gpt-oss's own files: codes and scales of MXFP4 in two tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from against_hugging_face import assert_near, generated
from benchmarks.shared.random_models import gpt_oss, ready
from benchmarks.shared.small_runs import ONE_MEMORY, TWO_MEMORIES, Generated, generate, same_bits
from moesched.devices.native.compiled import why_unusable
from moesched.devices.native.mxfp4_files import join_by_library
from moesched.devices.shared.mxfp4_rows import join_by_arrays
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from stored_mxfp4 import with_experts_in_mxfp4

Tensors = dict[str, torch.Tensor]
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [90]]
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A folder as gpt-oss is published, and the same model in Hugging Face's code."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    torch.manual_seed(1)
    model = gpt_oss(hidden_size=64, intermediate_size=32, swiglu_limit=2.0)
    model.save_pretrained(folder)
    with_experts_in_mxfp4(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [each.removesuffix("_blocks") for each in tensors if each.endswith("_blocks")]:
        codes, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        model.get_parameter(name).data = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
    return folder, ready(model)


def run(folder: Path, policy: str, machine: Machine, dtype: str, page_bytes: int = 1 << 20) -> Generated:
    checkpoint = open_checkpoint(folder)
    layout = weight_layout(checkpoint.config, dtype, page_bytes=page_bytes)
    device = TorchDevice(checkpoint, layout, keep_logits=True)
    return generate(device, make_policy(policy), machine, PROMPTS, new_tokens=6, micro_batch_size=2)


def test_logits_are_those_of_hugging_face(model: tuple[Path, torch.nn.Module]) -> None:
    folder, theirs = model
    assert_near(theirs, generated(folder), 1e-4)


@pytest.mark.parametrize("policy", ["expert_streaming", "expert_cache", "twiddler"])
@pytest.mark.parametrize("page_bytes", [1 << 20, 600])
def test_the_bits_depend_on_no_policy_and_no_page(
    model: tuple[Path, torch.nn.Module], policy: str, page_bytes: int
) -> None:
    folder, _ = model
    expected = run(folder, "resident", ONE_MEMORY, "bfloat16")
    found = run(folder, policy, TWO_MEMORIES, "bfloat16", page_bytes)
    assert found.tokens == expected.tokens
    assert same_bits(found.logits_RSV, expected.logits_RSV)


def test_the_library_joins_codes_and_scales_as_arrays_do() -> None:
    if problem := why_unusable():
        pytest.skip(problem)
    generator = np.random.default_rng(1)
    codes, scales = (generator.integers(0, 256, count, dtype=np.uint8) for count in (97 * 16, 97))
    ours, by_arrays = np.zeros((97, 17), np.uint8), np.zeros((97, 17), np.uint8)
    join_by_library(codes, scales, ours)
    join_by_arrays(codes, scales, by_arrays)
    assert np.array_equal(ours, by_arrays)


def _without_scales(tensors: Tensors) -> None:
    del tensors[f"{GATE_UP}_scales"]


def _of_other_groups(tensors: Tensors) -> None:
    tensors[f"{GATE_UP}_scales"] = tensors[f"{GATE_UP}_scales"][:, :, :1].contiguous()


def _too_narrow(tensors: Tensors) -> None:
    for ending in ("_blocks", "_scales"):
        tensors[GATE_UP + ending] = tensors[GATE_UP + ending][:, 2:].contiguous()


def _of_numbers(tensors: Tensors) -> None:
    tensors[f"{GATE_UP}_scales"] = tensors[f"{GATE_UP}_scales"].to(torch.float32)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without_scales, "gate_up_proj_blocks is there, and .*gate_up_proj_scales is not"),
        (_of_other_groups, r"gate_up_proj_blocks is U8 of shape \[6, 64, 2, 16\].* of shape \[6, 64, 1, 16\]"),
        (_too_narrow, r"gate_up_proj is U8 of shape \[6, 62, 34\], and rows in mxfp4"),
        (_of_numbers, "gate_up_proj_scales F32 of shape"),
    ],
)  # fmt: skip
def test_codes_and_scales_that_do_not_match_are_refused(
    tmp_path: Path, model: tuple[Path, torch.nn.Module], damage: Callable[[Tensors], None], said: str
) -> None:
    folder, _ = model
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(BadInput, match=said):
        open_checkpoint(tmp_path)
