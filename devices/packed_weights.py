"""Weights that stay in memory, rearranged once for oneDNN: products have the same bits and are faster."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

# oneDNN rearranges a plain matrix anew in every product; with few tokens that costs more than the product.


@cache
def packing_pays() -> bool:
    """Whether this processor gains from packed bfloat16 weights, and gets the same bits from them.

    The second is tried, not assumed: one policy may keep packed what another one streams, and a schedule
    must not show in the results. The matrices tried are packed whole and compared with their row blocks.
    """
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        return all(_same_bits(outputs, inputs) for outputs, inputs in ((256, 192), (96, 4096), (33, 40)))
    except (AttributeError, RuntimeError):
        return False


def _same_bits(outputs: int, inputs: int) -> bool:
    generator = torch.Generator().manual_seed(outputs)
    weight_ND = torch.randn(outputs, inputs, generator=generator).to(torch.bfloat16)
    packed, blocks = pack(weight_ND), (weight_ND[: outputs // 2], weight_ND[outputs // 2 :])
    for tokens in (1, 2, 5, 16, 33):
        x_TD = torch.randn(tokens, inputs, generator=generator).to(torch.bfloat16)
        plain = torch.cat([torch.nn.functional.linear(x_TD, block) for block in blocks], dim=-1)
        if not torch.equal(packed_linear(x_TD, packed), plain):
            return False
    return True


@cache
def cores_keep_bits(dtype: torch.dtype, cores: int) -> bool:
    """Whether a product of this dtype has the same bits on one core as on so many, packed or not; tried, not assumed.

    Where it has not, a product must run on the same number of cores under every policy.
    """
    if dtype != torch.bfloat16:
        return False  # float32 products of five rows were seen to differ
    before = torch.get_num_threads()
    try:
        return all(_same_on_cores(outputs, inputs, cores) for outputs, inputs in ((1024, 512), (33, 40)))
    finally:
        torch.set_num_threads(before)


def _same_on_cores(outputs: int, inputs: int, cores: int) -> bool:
    generator = torch.Generator().manual_seed(outputs)
    weight_ND = torch.randn(outputs, inputs, generator=generator).to(torch.bfloat16)
    products: list[Callable[[torch.Tensor], torch.Tensor]] = [
        partial(torch.nn.functional.linear, weight=weight_ND)
    ]
    if packing_pays():
        products.append(partial(packed_linear, packed=pack(weight_ND)))
    for tokens in (1, 5, 16, 128):
        x_TD = torch.randn(tokens, inputs, generator=generator).to(torch.bfloat16)
        for product in products:
            torch.set_num_threads(1)
            alone = product(x_TD)
            torch.set_num_threads(cores)
            if not torch.equal(alone, product(x_TD)):
                return False
    return True


def pack(weight_ND: torch.Tensor) -> torch.Tensor:
    """The matrix in oneDNN's own arrangement, in memory of its own; `linear` takes it like a plain one.

    weight_ND: bfloat16, CPU. Ask `packing_pays` first.
    """
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_ND)
    return packed


def packed_bytes(packed: torch.Tensor) -> int:
    """The bytes that a packed matrix takes: a little more than the plain one where its sizes are odd."""
    return int(torch.ops.mkldnn._nbytes(packed))


def packed_linear(x_TD: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """x times the packed matrix's transpose."""
    y_TN: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TD, packed, None, "none", [], "")
    return y_TN
