"""The kernels for coded matrices (Q8_0, Q4_K and others): products and embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..products.coded_linear import coded_linear, unpacked_linear
from ..products.linear import linear
from ..shared.coded import Block, Coded
from .layer_weights import Tensor, Weights
from .seam import CODED, Bound, Case
from .torch_rows import TorchEmbed, TorchKernel


class CodedKernel(TorchKernel):
    """A kernel for matrices of which all or some blocks are coded."""

    name = "coded"
    takes = f"weights in {', '.join(sorted(CODED))}"

    def refusal(self, case: Case) -> str:
        """A reason to refuse matrices without a coded block; empty for other cases."""
        return "" if case.formats & CODED else "it reads coded matrices"


class CodedProduct(CodedKernel):
    """A product with each row block of a matrix by exact sums; a row's result depends on no other row."""

    operation = "product"
    takes = f"{CodedKernel.takes} on the CPU"
    independent = True

    def refusal(self, case: Case) -> str:
        """A reason to refuse GPUs, and matrices without a coded block; empty for other cases."""
        return super().refusal(case) if case.device == "cpu" else "it is for the CPU"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind the product with a matrix: (x_TD) -> y_TN."""
        return partial(_product, coded_linear, weights["matrix"])


class UnpackedProduct(CodedKernel):
    """A product with each row block of a matrix, which is decoded to the dtype of x tile by tile."""

    operation = "product"
    name = "unpacked"
    takes = f"{CodedKernel.takes} on GPUs"

    def refusal(self, case: Case) -> str:
        """A reason to refuse the CPU, and matrices without a coded block; empty for other cases."""
        return "it is for GPUs" if case.device == "cpu" else super().refusal(case)

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind the product with a matrix: (x_TD) -> y_TN."""
        return partial(_product, unpacked_linear, weights["matrix"])


def _product(multiply: Callable[[Tensor, Coded], Tensor], blocks: Sequence[Block], x_TD: Tensor) -> Tensor:
    parts = [multiply(x_TD, block) if isinstance(block, Coded) else linear(x_TD, [block]) for block in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class CodedEmbed(CodedKernel, TorchEmbed):
    """Coded embeddings, decoded and rounded to the dtype of hidden states, and angles of the rotary embedding."""

    operation = "embed"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind the lookup of embeddings: (ids, positions, steps) -> hidden_TD, angles."""
        return self._bound(partial(_embed, weights["embedding"][0], self._resources.dtype))


def _embed(embedding: Coded, dtype: torch.dtype, tokens_T: Tensor) -> Tensor:
    return embedding.take(tokens_T).plain(dtype)


CODED_ROWS = (CodedEmbed, CodedProduct, UnpackedProduct)
