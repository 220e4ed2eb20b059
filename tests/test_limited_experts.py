"""Native calls for experts with a limited activation: right, and bits depend on no cut and no other row."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

from moesched.devices.kernels.check import cpu_resources
from moesched.devices.kernels.expert_of_products import expert_of
from moesched.devices.kernels.layer_weights import Weights
from moesched.devices.kernels.native_experts import NativeExpert, NativeExpertByColumns
from moesched.devices.kernels.seam import COLUMNS, EXPERT_MATRICES, ROWS, Case
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.products.linear import linear
from moesched.models.layers import Layer
from moesched.models.networks import Activation, FeedForward
from small_models import SMALL

Tensor = torch.Tensor
HIDDEN, WIDTH = 160, 200


def layer_of(*, together: bool, biases: bool = True) -> Layer:
    """A layer with experts whose gate and up are one matrix, or two."""
    network = FeedForward(
        experts=2,
        top_k=1,
        intermediate=WIDTH,
        biases=biases,
        alternating=together,
        activation=Activation(alpha=1.7, limit=0.5),
    )
    return Layer(attention=SMALL.attention, feed_forward=network)


def tensors_of(layer: Layer) -> dict[str, Tensor]:
    """The matrices and biases of one expert, with random numbers."""
    generator = torch.Generator().manual_seed(7)
    shapes = layer.feed_forward.expert_shapes(HIDDEN)
    return {
        name: (torch.randn(*shape, generator=generator) * 0.2).bfloat16() for name, shape in shapes.items()
    }


def cut(tensor: Tensor, blocks: int, *, transposed: bool) -> list[Tensor]:
    """Cut a bias or a matrix by rows, or a matrix into blocks of columns that are each stored transposed."""
    if not transposed or tensor.dim() == 1:
        return [*tensor.split(-(-len(tensor) // blocks))]
    return [block.T.contiguous().T for block in tensor.split(-(-tensor.shape[1] // blocks), 1)]


def run(native: NativeKernels, layer: Layer, x_nD: Tensor, *, transposed: bool, blocks: int) -> Tensor:
    """One expert's outputs for rows x, by the kernel for matrices that are stored by rows or transposed."""
    kind = NativeExpertByColumns if transposed else NativeExpert
    kernel = kind(cpu_resources(SMALL.varied(hidden=HIDDEN), torch.bfloat16, native))
    case = Case("expert", len(x_nD), frozenset({COLUMNS if transposed else ROWS}), "bfloat16", "cpu", layer)
    assert not kernel.refusal(case)
    parts = {name: cut(each, blocks, transposed=transposed) for name, each in tensors_of(layer).items()}
    y_nD = torch.full_like(x_nD, torch.nan)
    kernel.bind(case, Weights(parts, layer), None)(x_nD, y_nD)
    return y_nD


def exact(layer: Layer, x_nD: Tensor) -> Tensor:
    """One expert's outputs in float64."""
    doubled = {name: [each.double()] for name, each in tensors_of(layer).items()}
    products = {name: partial(linear, blocks=doubled[name]) for name in EXPERT_MATRICES if name in doubled}
    return expert_of(products, doubled, layer.feed_forward.activation)(x_nD.double())


CASES = [*product([True, False], [True, False], [True, False])]


@pytest.mark.parametrize("rows", [1, 3, 5, 16])
@pytest.mark.parametrize(("transposed", "together", "biases"), CASES)
def test_an_expert_is_right_and_bits_depend_on_no_cut_and_no_row(
    native: NativeKernels, transposed: bool, together: bool, biases: bool, rows: int
) -> None:
    layer = layer_of(together=together, biases=biases)
    x_nD = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).bfloat16()
    whole, expected = run(native, layer, x_nD, transposed=transposed, blocks=1), exact(layer, x_nD)
    assert ((whole.double() - expected).abs() <= expected.abs().amax() * 2**-7).all()
    assert torch.equal(run(native, layer, x_nD, transposed=transposed, blocks=3), whole)
    alone = [run(native, layer, row_D[None], transposed=transposed, blocks=1) for row_D in x_nD]
    assert torch.equal(torch.cat(alone), whole)


def test_a_number_that_is_none_stays_none(native: NativeKernels) -> None:
    layer = layer_of(together=True)
    x_nD = torch.ones(2, HIDDEN).bfloat16()
    x_nD[1, 3] = torch.nan
    y_nD = run(native, layer, x_nD, transposed=True, blocks=1)
    assert y_nD[0].isfinite().all()
    assert y_nD[1].isnan().all()
