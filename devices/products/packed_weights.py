"""Packed weights: matrices that stay in memory, after one copy to oneDNN's own layout, which makes products faster.

oneDNN copies a plain matrix to that layout in every product, which for few tokens takes longer than the product itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch

from moesched.system.memory_advice import move_to_huge_pages

from .bfloat16_support import has_bfloat16
from .plain_weights import plain_linear
from .row_tiles import in_tiles

TRIED = ((256, 192), (96, 4096), (33, 40), (1024, 3584))
"""Outputs and inputs of the matrices whose products are compared; with the last, cores may share an output's sum."""


@cache
def packing_pays(transposed: bool = False, cores: int = 1) -> bool:
    """Test if bfloat16 weights should be packed.

    They should if the processor has instructions that multiply bfloat16, and packing changes no bits of results. The
    bits matter because one policy may keep weights packed that another policy streams unpacked, and results must not
    depend on the schedule. So products with packed whole matrices are compared with products with the same
    matrices in plain row blocks. The result is False, too, if torch cannot pack matrices.

    Args:
        transposed: True to compare matrices that are stored transposed, too.
        cores: the largest number of cores that a product runs on; bits are compared on one core and on that number.
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
    """Test if products in a dtype have the same bits on one core as on `cores` cores, by computing some both ways.

    Only bfloat16 products are tried; for other dtypes, whose bits may differ, the result is always False. If the bits
    differ, a product must run on the same number of cores under every policy.

    Args:
        transposed: True to try matrices that are stored transposed, too.
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
    """Yield functions that multiply by random matrices (outputs, inputs) in plain, transposed and packed layout.

    The transposed layout is included only if `transposed` is True, and the packed one only if `packing_pays` returns
    True.
    """
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
    """Copy a matrix to oneDNN's own layout; `linear` takes the copy like a plain matrix.

    weight_ND: bfloat16, on the CPU. Call this only where `packing_pays` returns True.
    """
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_ND.contiguous())
    move_to_huge_pages(torch.ops.mkldnn.data_ptr(packed), packed_bytes(packed))
    return packed


def packed_bytes(packed: torch.Tensor) -> int:
    """Return the bytes of a packed matrix, which for some shapes are a little more than those of the plain matrix."""
    return int(torch.ops.mkldnn._nbytes(packed))


def packed_linear(x_TD: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Multiply rows by a packed matrix W: x @ W.T, (T, N)."""
    return in_tiles(_multiply, x_TD, packed)


def _multiply(x_TD: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    y_TN: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TD, packed, None, "none", [], "")
    return y_TN
