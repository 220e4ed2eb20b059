"""Products by coded matrices in C: the bits of torch's kernels, with every instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coded_checkpoints import random_blocks
from kernel_tables import kernels_of
from moesched.devices.kernels.functions import norm
from moesched.devices.kernels.layer_weights import Weights
from moesched.devices.kernels.samples import coded_block
from moesched.devices.kernels.workspace import Workspace
from moesched.devices.native.compiled import availability, formats, instruction_sets
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.products.coded_linear import coded_linear
from moesched.devices.shared.coded import CodedRows
from moesched.models.stored_formats import CODED, STORED_FORMATS
from small_models import SMALL

Tensor = torch.Tensor
INPUTS = 512


def inputs(rows: int, width: int = INPUTS, seed: int = 1) -> Tensor:
    """Inputs of very different sizes, with groups of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(rows, width, generator=generator) * torch.randn(rows, width, generator=generator).exp()
    x_TD[0, 32:96] = 0
    x_TD[-1, :32] *= 1e-38
    return x_TD.bfloat16()


def coded(name: str, rows: int) -> CodedRows:
    stored = STORED_FORMATS[name]
    return CodedRows(torch.from_numpy(random_blocks(stored, rows, INPUTS // stored.block)), stored)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())


@pytest.mark.parametrize("name", CODED)
def test_a_product_has_the_bits_of_torch(name: str, native: NativeKernels) -> None:
    block = coded(name, 45)
    for rows in (1, 2, 7, 33, 130):
        x_TD = inputs(rows)
        assert same(native.linear(x_TD, [block]), coded_linear(x_TD, block))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.sampled_from(CODED), st.integers(1, 33), st.lists(st.integers(0, 250), max_size=9))
def test_neither_other_rows_nor_row_blocks_show_in_the_bits(
    native: NativeKernels, name: str, rows: int, cuts: list[int]
) -> None:
    block, x_TD = coded(name, 250), inputs(rows)
    blocks = [
        CodedRows(part.clone(), block.format) for part in block.raw_NB.tensor_split(sorted(cuts)) if len(part)
    ]
    y_TN = native.linear(x_TD, blocks)
    assert same(y_TN, native.linear(x_TD, [block]))
    assert same(y_TN[-1:], native.linear(x_TD[-1:], [block]))


@pytest.mark.parametrize("name", CODED)
def test_embeddings_are_unpacked_to_the_bits_of_torch(name: str, native: NativeKernels) -> None:
    embedding, config = coded(name, 40), SMALL.varied(hidden=INPUTS, vocabulary=40)
    embed = kernels_of(config, native).bound("embed", Weights({"embedding": [embedding]}), Workspace(3))
    hidden_TD, _ = embed([7, 39, 0], [0, 1, 2], [])
    assert torch.equal(hidden_TD, embedding.take(torch.tensor([7, 39, 0])).plain(torch.bfloat16))


def test_queries_keys_and_values_may_have_formats_of_their_own(native: NativeKernels) -> None:
    config = SMALL.varied(hidden=INPUTS, heads=4, kv_heads=2, head_dim=64)
    parts = [coded(name, rows) for name, rows in (("q4_k", 256), ("q4_k", 128), ("q6_k", 128))]
    weights = Weights({"qkv": parts, "attention_norm": [torch.ones(INPUTS)]}, config.layer(0))
    x_TD, ones_Td, zeros_Td = inputs(5), torch.ones(5, 1, 64), torch.zeros(5, 1, 64)
    run = kernels_of(config, native).bound("attention_inputs", weights, Workspace(5))
    projected = run(x_TD, (ones_Td, zeros_Td))
    normed_TD = norm(x_TD, torch.ones(INPUTS), config.norm_eps)
    for got, part in zip(projected, parts, strict=True):
        assert torch.equal(got.flatten(1), coded_linear(normed_TD, part))


def test_inputs_that_are_no_numbers_show_in_their_row_alone(native: NativeKernels) -> None:
    block, x_TD = coded_block(inputs(40, seed=2), STORED_FORMATS["q8_0"]), inputs(4)
    clean = native.linear(x_TD, [block])
    x_TD[1, 7], x_TD[2, 70] = torch.nan, torch.inf
    y_TN = native.linear(x_TD, [block])
    assert y_TN[1:3].isnan().all()
    assert torch.equal(y_TN[[0, 3]], clean[[0, 3]])


def test_an_experts_matrices_may_have_any_formats(native: NativeKernels) -> None:
    """Matrices that share no inner loops are multiplied one after the other."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"gate": (256, INPUTS), "up": (256, INPUTS), "down": (INPUTS, 256)}
    plain = {
        name: torch.randn(shape, generator=generator).mul(shape[1] ** -0.5).bfloat16()
        for name, shape in shapes.items()
    }
    x_nD = inputs(5)
    exact_nD = native.expert(x_nD, *([matrix] for matrix in plain.values())).float()
    q8_0, q6_k = STORED_FORMATS["q8_0"], STORED_FORMATS["q6_k"]
    for chosen in ((q8_0, q8_0, None), (q8_0, q6_k, q8_0), (None, q8_0, q6_k), (None, None, q8_0)):
        matrices = [
            [matrix if stored is None else coded_block(matrix, stored)]
            for matrix, stored in zip(plain.values(), chosen, strict=True)
        ]
        y_nD = native.expert(x_nD, *matrices).float()
        assert (y_nD - exact_nD).norm() < 0.05 * exact_nD.norm()
        assert torch.equal(native.expert(x_nD[2:3], *matrices).float(), y_nD[2:3])


@pytest.mark.skipif(not instruction_sets(), reason=availability())
def test_the_formats_in_c_are_known() -> None:
    assert set(formats()) <= STORED_FORMATS.keys()
