"""The kernels for quantised ("coded") matrices, in Q8_0, Q4_K and other formats: products and embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..products.coded_linear import coded_linear, unpacked_linear
from ..products.linear import linear
from ..shared.coded import Block, CodedRows
from .layer_weights import Tensor, Weights
from .seam import CODED, Bound, Case
from .torch_rows import TorchEmbed, TorchKernel


class CodedKernel(TorchKernel):
    """The base of kernels for matrices of which at least one row block is quantised ("coded")."""

    name = "coded"
    takes = f"weights in {', '.join(sorted(CODED))}"

    def refusal(self, case: Case) -> str:
        """Return the reason why plain (not quantised) matrices are refused; empty for all other cases."""
        return "" if case.formats & CODED else "it reads coded matrices"


class CodedProduct(CodedKernel):
    """Multiplies rows by a quantised matrix on the CPU with exact sums; a row's result depends on no other row."""

    operation = "product"
    takes = f"{CodedKernel.takes} on the CPU"
    independent = True

    def refusal(self, case: Case) -> str:
        """Return the reason why GPUs and plain (not quantised) matrices are refused; empty for all other cases."""
        return super().refusal(case) if case.device == "cpu" else "it is for the CPU"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        return partial(_product, coded_linear, weights["matrix"])


class UnpackedProduct(CodedKernel):
    """Multiplies rows by a quantised matrix on a GPU; some rows of weights at a time are decoded to the dtype of x."""

    operation = "product"
    name = "unpacked"
    takes = f"{CodedKernel.takes} on GPUs"

    def refusal(self, case: Case) -> str:
        """Return the reason why the CPU and plain (not quantised) matrices are refused; empty for all other cases."""
        return "it is for GPUs" if case.device == "cpu" else super().refusal(case)

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        return partial(_product, unpacked_linear, weights["matrix"])


def _product(
    multiply: Callable[[Tensor, CodedRows], Tensor], blocks: Sequence[Block], x_TD: Tensor
) -> Tensor:
    parts = [
        multiply(x_TD, block) if isinstance(block, CodedRows) else linear(x_TD, [block]) for block in blocks
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class CodedEmbed(CodedKernel, TorchEmbed):
    """Looks up embeddings that are stored quantised, decodes them, and computes cosines and sines of rotary angles."""

    operation = "embed"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        return self._bound(partial(_embed, weights["embedding"][0], self._resources.dtype))


def _embed(embedding: CodedRows, dtype: torch.dtype, tokens_T: Tensor) -> Tensor:
    return embedding.take(tokens_T).plain(dtype)


CODED_ROWS = (CodedEmbed, CodedProduct, UnpackedProduct)
