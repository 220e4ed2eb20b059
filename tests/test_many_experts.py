"""Models with many experts: equal to Hugging Face's, read from its files, refused where out of the ordinary."""

from __future__ import annotations

import json
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from against_hugging_face import assert_same_tokens, generated
from benchmarks.shared.random_models import (
    dbrx,
    hugging_face_logits,
    load_model,
    mixtral,
    olmoe,
    prompts_of,
    qwen,
    random_dbrx,
    random_gpt_oss,
    random_granite,
    random_minimax,
    random_mixtral,
    random_olmoe,
    random_qwen,
)
from benchmarks.shared.small_runs import ONE_MEMORY, generate, same_bits
from moesched.devices.kernels import expert_functions, functions, qkv_functions
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.models.networks import FeedForward, Router
from moesched.models.random_model import write_random_model
from moesched.models.reading import read_config
from moesched.models.shapes import SHAPES
from moesched.models.tensor_parallel import cut_config
from moesched.plugins import make_policy
from odd_models import GLM, MINIMAX
from reference import read_weights
from small_models import SMALL_DBRX
from stored_checkpoints import refusal
from tables import table

Tensor = torch.Tensor


def small(shape: str, **changes: Any) -> ModelConfig:
    """A named shape, made small."""
    sizes: dict[str, Any] = {
        "layers": 2, "hidden": 48, "intermediate": 20, "heads": 6, "kv_heads": 2, "head_dim": 8, "experts": 9,
        "top_k": 3, "vocabulary": 97, "stop_tokens": (),
    }  # fmt: skip
    return SHAPES[shape].varied(**(sizes | changes))


SMALL = {"qwen3_moe": small("qwen3-30b-a3b", head_dim=10), "olmoe": small("olmoe-1b-7b")}


# ---------------------------------------------------------------- Hugging Face


FAMILIES = [
    random_qwen, random_olmoe, random_dbrx, random_minimax, random_gpt_oss, random_granite, random_mixtral,
]  # fmt: skip


@pytest.mark.parametrize(("seed", "make"), [*zip(range(14), cycle(FAMILIES))])
def test_tokens_of_a_random_model_cut_into_small_pages_equal_those_of_hugging_face(
    tmp_path: Path, make: Any, seed: int
) -> None:
    model = make(seed)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    config = read_config(tmp_path)
    # A few rows for each page: a down matrix that lies transposed then arrives as several column blocks.
    rows = 4 * max(config.hidden, config.routed.intermediate, config.attention.query_width)
    assert_same_tokens(model, generated(tmp_path, page_bytes=4 * rows))


@pytest.mark.parametrize(
    "make",
    [
        partial(qwen, hidden_size=128, num_hidden_layers=3),
        partial(olmoe, hidden_size=128, num_hidden_layers=3),
        partial(dbrx, d_model=128, ffn={"ffn_hidden_size": 256}, n_layers=4),
        partial(mixtral, hidden_size=128, intermediate_size=256, num_hidden_layers=4),
    ],
    ids=["qwen", "olmoe", "dbrx", "mixtral"],
)
def test_bfloat16_is_about_as_close_to_float32_as_hugging_face_is(tmp_path: Path, make: Any) -> None:
    ours, theirs = [], []
    for seed in range(4):  # a token that takes another expert weighs much, so one model would say little
        torch.manual_seed(seed)
        make(initializer_range=0.06).to(torch.bfloat16).save_pretrained(tmp_path)
        run = generated(tmp_path, "bfloat16", page_bytes=40_000)
        in_bfloat16, in_float32 = (load_model(tmp_path, dtype) for dtype in (torch.bfloat16, torch.float32))
        for prompt, tokens, logits in zip(prompts_of(97), run.tokens, run.logits_RSV, strict=True):
            rounded, exact = (
                hugging_face_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
                for model in (in_bfloat16, in_float32)
            )
            theirs.append((rounded - exact).abs())
            ours.append((logits - exact).abs())
    assert 0 < torch.cat(ours).mean() <= 2 * torch.cat(theirs).mean()


@pytest.mark.parametrize("make", [mixtral, qwen, olmoe])
def test_experts_of_a_layer_in_one_tensor_are_the_same_weights(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(2)
    model = make()
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    single, fused = (
        read_weights(open_checkpoint(tmp_path / form), torch.float32) for form in ("single", "fused")
    )
    assert single.keys() == fused.keys()
    assert all(torch.equal(single[name], fused[name]) for name in single)


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "olmoe-1b-7b"])
def test_a_router_large_enough_to_be_packed_is_kept_as_it_is_computed_with(
    tmp_path: Path, shape: str
) -> None:
    config = small(shape, hidden=64, heads=8, intermediate=64, experts=64, top_k=4, vocabulary=128)
    opened = open_checkpoint(write_random_model(config, tmp_path / "small", 6, dtype="bfloat16"))
    layout = weight_layout(config, "bfloat16", page_bytes=1 << 20)  # large enough for the whole router
    got = {}
    for policy in ("resident", "layer_streaming"):
        device = TorchDevice(opened, layout, kernel="torch", keep_logits=True)
        run = make_policy(policy)
        got[policy] = generate(device, run, ONE_MEMORY, prompts_of(97), new_tokens=4, micro_batch_size=4)
    assert got["resident"].tokens == got["layer_streaming"].tokens
    assert same_bits(*(each.logits_RSV for each in got.values()))


# ---------------------------------------------------------------- kernels


def test_weights_that_need_not_sum_to_one_are_shares_of_a_softmax_over_all_experts() -> None:
    torch.manual_seed(3)
    x_TD, router = torch.randn(30, 16), torch.randn(9, 16)
    experts_Tk, weights_Tk = expert_functions.route(
        x_TD, {"router": [router]}, FeedForward(experts=9, top_k=4, router=Router(normalised=False))
    )
    shares_TE = (x_TD @ router.T).softmax(-1)
    assert torch.equal(experts_Tk, shares_TE.topk(4).indices.sort(-1).values)
    assert torch.allclose(weights_Tk, shares_TE.gather(-1, experts_Tk), atol=1e-6)


@pytest.mark.parametrize("together", [1, 3])
def test_heads_are_normalised_as_many_together_as_the_weight_is_long(together: int) -> None:
    torch.manual_seed(4)
    x_TD, qkv, cos, sin = torch.randn(5, 12), torch.randn(40, 12), torch.ones(5, 1, 8), torch.zeros(5, 1, 8)
    norms = torch.rand(8 * together), torch.rand(8)
    config = SMALL["olmoe"].varied(heads=3, kv_heads=1, norm_eps=1e-6, qk_norm="head")
    weights = {
        "attention_norm": [torch.ones(12)],
        "qkv": list(qkv.split((24, 8, 8))),
        "q_norm": [norms[0]],
        "k_norm": [norms[1]],
    }
    q_THd, k_TKd, v_TKd = qkv_functions.project_qkv(x_TD, weights, (cos, sin), config, config.attention)
    plain = functions.rms_norm(x_TD, torch.ones(12), 1e-6) @ qkv.T
    groups = plain[:, :24].view(5, -1, 8 * together)
    scale = groups.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
    assert torch.allclose(q_THd.reshape(5, -1), (groups * scale * norms[0]).reshape(5, -1), atol=1e-5)
    assert torch.allclose(k_TKd[:, 0], functions.rms_norm(plain[:, 24:32], norms[1], 1e-6), atol=1e-5)
    assert torch.allclose(v_TKd[:, 0], plain[:, 32:], atol=1e-5)


# ---------------------------------------------------------------- configurations


REFUSED = {"Qwen3-MoE": SMALL["qwen3_moe"], "GLM-4.5": GLM, "MiniMax-M2": MINIMAX, "DBRX": SMALL_DBRX}
SECTIONS = ("attn_config", "ffn_config")
"""Keys of DBRX whose values are settings, too."""


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [(family, *row) for family in REFUSED for row in table("broken_files.md", f"Configurations of {family}")],
)
def test_a_model_that_the_kernels_do_not_compute_is_refused_with_its_value(
    tmp_path: Path, family: str, changes: dict[str, Any], complaint: str
) -> None:
    directory = write_random_model(REFUSED[family], tmp_path / "small")
    config = json.loads((directory / "config.json").read_text())
    config |= {key: config[key] | value if key in SECTIONS else value for key, value in changes.items()}
    (directory / "config.json").write_text(json.dumps(config))
    message = refusal(directory)
    assert message.startswith(str(directory / "config.json"))
    assert complaint in message


def test_a_norm_over_all_heads_is_not_cut_over_accelerators() -> None:
    with pytest.raises(BadInput, match="normalised over all heads together: use --tensor-parallel 1"):
        cut_config(SHAPES["olmoe-1b-7b"], 2)
    assert cut_config(SHAPES["olmoe-1b-7b"], 1) == SHAPES["olmoe-1b-7b"]
    assert cut_config(SHAPES["qwen3-30b-a3b"], 4).attention.kv_heads == 1
