"""DBRX from published files: equal to Hugging Face's, read in pages, refused where it is damaged, written at random."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moesched.devices.products.linear import linear
from moesched.devices.products.plain_weights import plain_linear
from moesched.devices.shared.page_reader import DTYPES, PageReader
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.operations import Operations
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.models.tensors import tensor_shapes
from reference import cut_in_three, read_weights, tensors_in
from small_models import SMALL_DBRX
from stored_checkpoints import refusal

Tensor = torch.Tensor


# ---------------------------------------------------------------- how it lies in files and in memory


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small random model in several files."""
    return write_random_model(SMALL_DBRX, tmp_path / "small", 5, dtype="float32", shard_bytes=40_000)


def test_every_tensor_is_found_in_the_one_that_holds_it(small: Path) -> None:
    checkpoint = open_checkpoint(small)
    found = read_weights(checkpoint, torch.float32)
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == tensor_shapes(SMALL_DBRX)
    published = tensors_in(small)
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


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("transformer.blocks.1.norm_attn_norm.attn.Wqkv.weight", None, "lacks 3 .*, layers.1.q the first"),
        ("transformer.blocks.0.ffn.experts.mlp.w2", None, "lacks 5 .*, layers.0.experts.0.down the first"),
        ("transformer.norm_f.weight", None, "lacks 1 .*, final_norm the first"),
        ("lm_head.weight", None, "lacks 1 .*, lm_head the first"),
        ("transformer.blocks.0.norm_attn_norm.norm_1.bias", torch.zeros(48), "norm_1.bias is a bias"),
    ],
)
def test_a_missing_tensor_is_told_with_what_it_would_hold_and_a_bias_is_refused(
    tmp_path: Path, name: str, tensor: Tensor | None, said: str
) -> None:
    folder = write_random_model(SMALL_DBRX, tmp_path / "one", dtype="float32")
    changed = tensors_in(folder) | {name: tensor}
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    kept = {name: each for name, each in changed.items() if each is not None}
    save_file(kept, folder / "model.safetensors")
    assert re.search(said, refusal(folder))
