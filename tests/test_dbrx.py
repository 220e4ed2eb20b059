"""DBRX from published files: equal to Hugging Face's, read in pages, refused where it is damaged, written at random."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DbrxForCausalLM

import moesched
from against_hugging_face import STEPS, assert_same_tokens, generated
from benchmarks.shared.random_models import (
    NO_CLIP,
    dbrx,
    hugging_face_logits,
    load_model,
    prompts_of,
    random_dbrx,
)
from moesched.devices.products.linear import linear
from moesched.devices.products.plain_weights import plain_linear
from moesched.devices.shared.page_reader import DTYPES, PageReader
from moesched.machines import parse_machine
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layers import FeedForward, GroupedAttention, Layer
from moesched.models.layout import weight_layout
from moesched.models.operations import Operations
from moesched.models.random_model import write_random_model
from moesched.models.reading import read_config
from moesched.models.shapes import SHAPES
from moesched.models.tensors import tensor_shapes
from reference import Reference, cut_in_three, read_weights
from reference import generate as generate_in_loops
from small_models import SMALL_DBRX
from stored_checkpoints import refusal

Tensor = torch.Tensor


# ---------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"attention": {"clip_qkv": 0.5}}, id="clip that bites"),
        pytest.param({"n_heads": 3, "d_model": 30, "attention": {"kv_n_heads": 3}}, id="odd head count"),
        pytest.param({"n_heads": 6, "d_model": 48, "attention": {"kv_n_heads": 1}}, id="one kv head"),
        pytest.param({"ffn": {"moe_num_experts": 3, "moe_top_k": 1}}, id="top-1 of 3"),
        pytest.param({"ffn": {"moe_num_experts": 5, "moe_top_k": 3}}, id="top-3 of 5"),
        pytest.param({"ffn": {"moe_num_experts": 16, "moe_top_k": 4}}, id="top-4 of 16"),
        pytest.param({"rope_theta": 100.0}, id="another rope_theta"),
    ],
)
def test_tokens_equal_those_of_hugging_face(tmp_path: Path, changes: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = dbrx(**changes)
    model.save_pretrained(tmp_path)
    assert_same_tokens(model, generated(tmp_path))


@pytest.mark.parametrize("seed", range(12))
def test_tokens_of_a_random_model_cut_into_small_pages_equal_those_of_hugging_face(
    tmp_path: Path, seed: int
) -> None:
    model = random_dbrx(seed)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    # A few rows for each page: an expert's down matrix then arrives as several column blocks.
    rows = 8 * max(model.config.d_model, model.config.ffn_config.ffn_hidden_size)
    assert_same_tokens(model, generated(tmp_path, page_bytes=4 * rows))


def test_without_a_clip_nothing_is_clipped(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = dbrx(attention={"clip_qkv": NO_CLIP})
    model.save_pretrained(tmp_path)
    change_config(tmp_path, "attn_config", clip_qkv=None)
    assert read_config(tmp_path).attention.clip is None
    assert_same_tokens(model, generated(tmp_path))


def test_bfloat16_is_about_as_close_to_float32_as_hugging_face_is(tmp_path: Path) -> None:
    ours, theirs = [], []
    for seed in range(4):  # a token that takes another expert weighs much, so one model would say little
        torch.manual_seed(seed)
        model = dbrx(d_model=128, ffn={"ffn_hidden_size": 256}, n_layers=4, initializer_range=0.06)
        model.to(torch.bfloat16).save_pretrained(tmp_path)
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


# ---------------------------------------------------------------- how it lies in files and in memory


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small random model in several files."""
    return write_random_model(SMALL_DBRX, tmp_path / "small", 5, dtype="float32", shard_bytes=40_000)


def stored(directory: Path) -> dict[str, Tensor]:
    files = [load_file(path) for path in sorted(directory.glob("*.safetensors"))]
    return {name: tensor.clone() for file in files for name, tensor in file.items()}


def test_every_tensor_is_found_in_the_one_that_holds_it(small: Path) -> None:
    checkpoint = open_checkpoint(small)
    found = read_weights(checkpoint, torch.float32)
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == tensor_shapes(SMALL_DBRX)
    published = stored(small)
    block = "transformer.blocks.1."
    q, k, v = published[block + "norm_attn_norm.attn.Wqkv.weight"].split([48, 16, 16])
    w1, v1, w2 = (published[f"{block}ffn.experts.mlp.{name}"].split(40) for name in ("w1", "v1", "w2"))
    expected = {
        "embedding": published["transformer.wte.weight"],
        "final_norm": published["transformer.norm_f.weight"],
        "lm_head": published["lm_head.weight"],
        "layers.1.attention_norm": published[block + "norm_attn_norm.norm_1.weight"],
        "layers.1.q": q,
        "layers.1.k": k,
        "layers.1.v": v,
        "layers.1.o": published[block + "norm_attn_norm.attn.out_proj.weight"],
        "layers.1.ffn_norm": published[block + "norm_attn_norm.norm_2.weight"],
        "layers.1.router": published[block + "ffn.router.layer.weight"],
        "layers.1.experts.4.gate": w1[4],
        "layers.1.experts.4.up": v1[4],
        "layers.1.experts.4.down": w2[4].T,
    }
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # the second is converted on the way
@pytest.mark.parametrize("page_bytes", [None, 2_000])
def test_pages_hold_the_transposed_matrix_as_column_blocks(
    small: Path, dtype: str, page_bytes: int | None
) -> None:
    checkpoint = open_checkpoint(small)
    expected = read_weights(checkpoint, DTYPES[dtype])
    layout = weight_layout(checkpoint.config, dtype, page_bytes)
    blocks: dict[str, list[Tensor]] = {}
    with PageReader(checkpoint, layout) as reader:
        for page in layout.expert(1, 3):
            slot = torch.empty(reader.slot_bytes + 4096, dtype=torch.uint8)
            slot = slot[-slot.data_ptr() % 4096 :][: reader.slot_bytes]
            reader.read(page, slot)
            for name, views in reader.views(slot, page).items():
                blocks.setdefault(name, []).extend(views)
    assert (len(blocks["layers.1.experts.3.down"]) > 1) == (page_bytes is not None)
    for name, views in blocks.items():
        assert torch.equal(torch.cat(views, dim=1 if name.endswith("down") else 0), expected[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_column_blocks_is_that_with_the_whole_matrix(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    stored_FD, x_TF = torch.randn(700, 60).to(dtype), torch.randn(5, 700).to(dtype)
    exact = x_TF.double() @ stored_FD.double()
    blocks = [block.T for block in cut_in_three(stored_FD)]
    rounding = exact.abs().mean() * torch.finfo(dtype).eps
    for product in (linear(x_TF, blocks), plain_linear(x_TF, stored_FD.T)):
        assert product.dtype == dtype
        assert (product - exact).abs().mean() < 8 * rounding  # the order of the sums is the processor's


def test_the_device_and_plain_loops_agree(small: Path) -> None:
    ours = generated(small)
    tokens, logits_SRV = generate_in_loops(Reference(small, cut=cut_in_three), prompts_of(97), STEPS)
    assert tokens == ours.tokens
    assert torch.allclose(logits_SRV.transpose(0, 1), ours.logits_RSV, atol=1e-5)


# ---------------------------------------------------------------- random models


def test_hugging_face_loads_a_random_model_with_every_tensor_in_its_place(small: Path) -> None:
    model, report = DbrxForCausalLM.from_pretrained(small, output_loading_info=True)
    assert not any(report.values()), report
    ours = generated(small)
    for prompt, tokens, logits in zip(prompts_of(97), ours.tokens, ours.logits_RSV, strict=True):
        expected = hugging_face_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        assert torch.allclose(logits, expected, atol=1e-5)


def test_its_config_reads_back_as_the_shape_that_was_asked_for(small: Path) -> None:
    assert read_config(small) == msgspec.structs.replace(SMALL_DBRX, name="small", dtype="float32")


def test_the_named_shape_has_132_billion_weights_and_uses_36_billion() -> None:
    config = SHAPES["dbrx"]
    expert = 3 * config.hidden * config.routed.intermediate
    weights = weight_layout(config, "bfloat16")
    total = (sum(page.nbytes for page in weights.pages) + weights.globals_bytes) / 2
    unused = config.layers * (config.routed.experts - config.routed.top_k) * expert
    assert total == pytest.approx(132e9, rel=0.005)
    assert total - unused == pytest.approx(36e9, rel=0.02)


# ---------------------------------------------------------------- what a simulation counts


def test_the_work_of_a_token_is_that_of_the_published_shape() -> None:
    operations = Operations(SHAPES["dbrx"], "bfloat16")
    assert operations.pre_attention(1).flops == 2 * 6144 * (6144 + 2 * 1024)
    assert operations.output_projection(1).flops == 2 * 6144 * 6144
    assert operations.attention([(1, 500)]).flops == 4 * 500 * 6144
    assert operations.kv_bytes == 2 * 1024 * 2
    assert operations.expert_bytes == 3 * 6144 * 10752 * 2
    assert operations.experts(1).flops == pytest.approx(4 * 6 * 6144 * 10752)
    assert operations.experts(1).nbytes == pytest.approx(4 * operations.expert_bytes, rel=1e-3)
    assert operations.sample(1).flops == 2 * 6144 * 100352


def test_a_simulation_moves_every_layer_once_a_step() -> None:
    t4 = resources.files("moesched.machines").joinpath("t4.toml").read_text()
    machine = parse_machine(
        t4.replace('"192GB"', '"400GB"').replace('"15360MiB"', '"64GB"').encode(), "a large machine"
    )
    report = moesched.simulate_model(
        "dbrx",
        machine=machine,
        policy="layer_streaming",
        workload=moesched.given_lengths([64] * 4, 3),
        batch_size=4,
    )
    layers = 40 * (2 * 6144 * (6144 + 1024) + 2 * 6144 + 16 * 6144 + 16 * 3 * 6144 * 10752) * 2
    assert report.lanes["host->gpu"].busy_seconds == pytest.approx(3 * layers / 12e9, rel=1e-3)


# ---------------------------------------------------------------- what is refused


def change_config(directory: Path, section: str | None = None, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    (config[section] if section else config).update(changes)
    path.write_text(json.dumps(config))


@pytest.fixture
def one_file(tmp_path: Path) -> Path:
    """A small random model in one file."""
    directory = write_random_model(SMALL_DBRX, tmp_path / "one", dtype="float32")
    save_file(stored(directory), tmp_path / "model.safetensors")
    for path in [*directory.glob("*.safetensors"), *directory.glob("*.index.json")]:
        path.unlink()
    (tmp_path / "model.safetensors").rename(directory / "model.safetensors")
    return directory


def rewrite(directory: Path, **tensors: Tensor | None) -> None:
    """The same file with tensors replaced, or without them."""
    path = directory / "model.safetensors"
    changed = stored(directory) | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path)


@pytest.mark.parametrize(
    ("name", "count", "first"),
    [
        ("transformer.blocks.1.norm_attn_norm.attn.Wqkv.weight", 3, "layers.1.q"),
        ("transformer.blocks.0.ffn.experts.mlp.w2", 5, "layers.0.experts.0.down"),
        ("transformer.norm_f.weight", 1, "final_norm"),
        ("lm_head.weight", 1, "lm_head"),
    ],
)
def test_a_missing_tensor_is_told_with_what_it_would_hold(
    one_file: Path, name: str, count: int, first: str
) -> None:
    rewrite(one_file, **{name: None})
    assert f"{one_file} lacks {count} of the model's tensors, {first} the first" in refusal(one_file)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("transformer.blocks.1.norm_attn_norm.attn.Wqkv.weight", [79, 48], [80, 48]),
        ("transformer.blocks.0.ffn.experts.mlp.w2", [48, 200], [200, 48]),
        ("transformer.blocks.0.ffn.experts.mlp.v1", [5, 40, 48], [200, 48]),
        ("transformer.blocks.0.norm_attn_norm.norm_2.weight", [47], [48]),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_both_shapes(
    one_file: Path, name: str, shape: list[int], expected: list[int]
) -> None:
    rewrite(one_file, **{name: torch.ones(shape)})
    message = refusal(one_file)
    assert f"{name} has shape {shape}, config.json says {expected}" in message
    assert str(one_file / "model.safetensors") in message


def test_a_bias_is_refused_since_no_kernel_adds_it(one_file: Path) -> None:
    name = "transformer.blocks.0.norm_attn_norm.norm_1.bias"
    rewrite(one_file, **{name: torch.zeros(48)})
    assert f"{name} is a bias" in refusal(one_file)


@pytest.mark.parametrize(
    ("section", "changes", "complaint"),
    [
        ("ffn_config", {"ffn_act_fn": {"name": "gelu"}}, "hidden_act is 'gelu'"),
        ("ffn_config", {"moe_normalize_expert_weights": 2.0}, "moe_normalize_expert_weights is 2.0"),
        ("ffn_config", {"moe_normalize_expert_weights": None}, "moe_normalize_expert_weights is None"),
        ("ffn_config", {"moe_top_k": 6}, "num_experts_per_tok is 6, num_local_experts 5"),
        ("ffn_config", {"ffn_hidden_size": "large"}, "$.ffn_config.ffn_hidden_size"),
        ("attn_config", {"kv_n_heads": 4}, "6 attention heads and 4 key-value heads"),
        ("attn_config", {"clip_qkv": -1.0}, "clip_qkv is -1"),
        (
            "attn_config",
            {"rope_theta": 1e4},
            "rope_theta is 10000 in attn_config and 500000 in rope_parameters",
        ),
        (None, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        (None, {"quantization_config": {"quant_method": "exl2"}}, "quant_method is 'exl2'"),
        (None, {"n_layers": 0}, "layers is 0"),
    ],
)
def test_a_model_that_the_kernels_do_not_compute_is_refused_with_its_value(
    small: Path, section: str | None, changes: dict[str, Any], complaint: str
) -> None:
    change_config(small, section, **changes)
    message = refusal(small)
    assert message.startswith(str(small / "config.json"))
    assert complaint in message


# ---------------------------------------------------------------- configurations

PUBLISHED = {
    "architectures": ["DbrxForCausalLM"],
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
    "d_model": 6144,
    "emb_pdrop": 0.0,
    "ffn_config": {
        "ffn_act_fn": {"name": "silu"},
        "ffn_hidden_size": 10752,
        "model_type": "",
        "moe_jitter_eps": 0.01,
        "moe_loss_weight": 0.05,
        "moe_num_experts": 16,
        "moe_top_k": 4,
    },
    "initializer_range": 0.02,
    "max_seq_len": 32768,
    "model_type": "dbrx",
    "n_heads": 48,
    "n_layers": 40,
    "resid_pdrop": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 100352,
}


def test_the_published_configuration_is_the_named_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 100257}')
    assert read_config(tmp_path) == msgspec.structs.replace(SHAPES["dbrx"], name=tmp_path.name)


def test_what_is_missing_has_the_default_of_hugging_face(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "dbrx"}')
    assert read_config(tmp_path) == ModelConfig(
        name=tmp_path.name,
        pattern=(
            Layer(
                attention=GroupedAttention(heads=16, kv_heads=1, head_dim=128),
                feed_forward=FeedForward(intermediate=3584, experts=4, top_k=1, transposed_down=True),
            ),
        )
        * 24,
        hidden=2048,
        vocabulary=32000,
        norm_eps=1e-5,
        max_positions=2048,
        tied_embeddings=False,
        stop_tokens=(),
        dtype="float32",
        norm="layer",
        form="dbrx",
    )
