"""One expert as products that other rows of the table compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from moesched.models.networks import Activation

from .expert_functions import activated
from .functions import with_bias
from .layer_weights import Blocks, Tensor, Weights
from .seam import EXPERT_MATRICES, Bound, Case
from .torch_rows import TorchKernel

Product = Callable[[Tensor], Tensor]


class ExpertOfProducts(TorchKernel):
    """One expert with matrices in any format, biases, gate and up in turn, and any activation."""

    operation = "expert"
    name = "products"
    made_of = ("product",)

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind one expert: (x_nD, y_nD) -> None."""
        return _Expert(partial(self._made_for, case, weights))

    def _made_for(self, case: Case, weights: Weights, rows: int) -> Product:
        case = case._replace(rows=rows)
        assert case.layer is not None, "it is in a layer"
        products = {
            name: self._product(case, weights.matrix(name)) for name in EXPERT_MATRICES if name in weights
        }
        return expert_of(products, weights, case.layer.feed_forward.activation)


class _Expert:
    """A bound call; which kernels compute the products depends on the number of rows."""

    __slots__ = ("_by_rows", "_made_for")

    def __init__(self, made_for: Callable[[int], Product]) -> None:
        self._made_for = made_for
        self._by_rows: dict[int, Product] = {}

    def __call__(self, x_nD: Tensor, y_nD: Tensor) -> None:
        expert = self._by_rows.get(len(x_nD))
        if expert is None:
            expert = self._by_rows[len(x_nD)] = self._made_for(len(x_nD))
        y_nD.copy_(expert(x_nD))


def expert_of(
    products: Mapping[str, Product], biases: Mapping[str, Blocks], activation: Activation
) -> Product:
    """The outputs (n, D) of an expert's inputs, given the product with each of its matrices.

    biases: those that the expert has, by the name of the matrix and "_bias".
    """
    biased = {name: with_bias(product, biases.get(f"{name}_bias")) for name, product in products.items()}
    if "gate_up" in biased:
        return partial(_in_turn, biased["gate_up"], biased["down"], activation)
    return partial(_apart, biased["gate"], biased["up"], biased["down"], activation)


def _in_turn(gate_up: Product, down: Product, activation: Activation, x_nD: Tensor) -> Tensor:
    both_nX = gate_up(x_nD)
    return down(activated(both_nX[:, ::2].contiguous(), both_nX[:, 1::2], activation))


def _apart(gate: Product, up: Product, down: Product, activation: Activation, x_nD: Tensor) -> Tensor:
    return down(activated(gate(x_nD), up(x_nD), activation))
