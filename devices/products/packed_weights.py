"""Weights that stay in memory, rearranged once for oneDNN: products have the same bits and are faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch

from .bfloat16_support import has_bfloat16
from .plain_weights import plain_linear
from .row_tiles import in_tiles

# oneDNN rearranges a plain matrix in every product; with few tokens that costs more than the product.


TRIED = ((256, 192), (96, 4096), (33, 40), (1024, 3584))
"""Outputs and inputs of the matrices whose bits are tried; of the last one several cores share a row's sum, if ever."""


@cache
def packing_pays(transposed: bool = False, cores: int = 1) -> bool:
    """Test whether packed bfloat16 weights are faster on this processor, with the same bits.

    The bits are tested, since one policy may keep weights packed that another one streams, and results must not depend
    on the schedule. Matrices packed whole are compared with their row blocks.

    Args:
        transposed: also for matrices that are transposed in memory.
        cores: the most cores that a product runs on; bits are compared on one core and on all of them.
    """
    if not has_bfloat16():
        return False
    same_bits = [_same_bits, *([_same_bits_transposed] if transposed else [])]
    before = torch.get_num_threads()
    try:
        for count in {1, cores}:
            torch.set_num_threads(count)
            if not all(same(*shape) for same in same_bits for shape in TRIED):
                return False
    except (AttributeError, RuntimeError):
        return False
    finally:
        torch.set_num_threads(before)
    return True


def _same_bits(outputs: int, inputs: int) -> bool:
    weight_ND = _random(outputs, inputs)
    packed, blocks = pack(weight_ND), weight_ND.split(-(-outputs // 3))
    for tokens in (1, 2, 5, 16, 33):
        x_TD = _random(tokens, inputs)
        plain = torch.cat([plain_linear(x_TD, block) for block in blocks], dim=-1)
        if not torch.equal(packed_linear(x_TD, packed), plain):
            return False
    return True


def _same_bits_transposed(outputs: int, inputs: int) -> bool:
    weight_ND = _random(inputs, outputs).T
    packed = pack(weight_ND)
    for tokens in (1, 2, 5, 16, 33):
        x_TD = _random(tokens, 2 * inputs)[:, inputs:]  # as where the matrix is one of several column blocks
        if not torch.equal(packed_linear(x_TD, packed), plain_linear(x_TD, weight_ND)):
            return False
    return True


@cache
def cores_keep_bits(dtype: torch.dtype, cores: int, transposed: bool = False) -> bool:
    """Test by trying whether a product of this dtype has the same bits on one core as on `cores`, packed or not.

    If not, a product must run on the same number of cores under every policy.

    Args:
        transposed: also for matrices that are transposed in memory.
    """
    if dtype != torch.bfloat16:
        return False  # float32 products of five rows were seen to differ
    before = torch.get_num_threads()
    try:
        return all(
            _same_on_cores(product, inputs, cores)
            for outputs, inputs in ((1024, 512), (33, 40))
            for product in _products(outputs, inputs, transposed, cores)
        )
    finally:
        torch.set_num_threads(before)


Product = Callable[[torch.Tensor], torch.Tensor]


def _products(outputs: int, inputs: int, transposed: bool, cores: int) -> Iterator[Product]:
    """The ways in which a matrix may be multiplied: plain, transposed and packed, as far as they are used."""
    weight_ND = _random(outputs, inputs)
    yield partial(plain_linear, weight_ND=weight_ND)
    if transposed:
        yield partial(plain_linear, weight_ND=_random(inputs, outputs).T)
    if packing_pays(transposed, cores):
        yield partial(packed_linear, packed=pack(weight_ND))


def _same_on_cores(product: Product, inputs: int, cores: int) -> bool:
    for tokens in (1, 2, 3, 5, 16, 33, 128):
        x_TD = _random(tokens, inputs)
        torch.set_num_threads(1)
        alone = product(x_TD)
        torch.set_num_threads(cores)
        if not torch.equal(alone, product(x_TD)):
            return False
    return True


def _random(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=generator).to(torch.bfloat16)


def pack(weight_ND: torch.Tensor) -> torch.Tensor:
    """A copy of the matrix in oneDNN's own layout; `linear` takes it like a plain one.

    weight_ND: bfloat16, on the CPU. Pack only where `packing_pays`.
    """
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_ND.contiguous())
    return packed


def packed_bytes(packed: torch.Tensor) -> int:
    """The bytes that a packed matrix takes: a little more than the plain one where its sizes are odd."""
    return int(torch.ops.mkldnn._nbytes(packed))


def packed_linear(x_TD: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """x @ W.T for a packed W: (T, N)."""
    return in_tiles(_multiply, x_TD, packed)


def _multiply(x_TD: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    y_TN: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TD, packed, None, "none", [], "")
    return y_TN
