"""A kernel that runs one expert by products with its matrices; other kernels of the table compute the products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

from moesched.models.networks import Activation

from .expert_functions import activated
from .functions import with_bias
from .layer_weights import Blocks, Tensor, Weights
from .seam import EXPERT_MATRICES, Bound, Case
from .torch_rows import TorchKernel

Product = Callable[[Tensor], Tensor]

MOST_SIZES = 32
"""Largest number of row counts for which an expert keeps the kernels of its products; those of decode steps repeat."""


class ExpertOfProducts(TorchKernel):
    """Runs one expert by products with its matrices: any storage format, any activation, with biases or without."""

    operation = "expert"
    name = "products"
    made_of = ("product",)

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        made_for = lru_cache(MOST_SIZES)(partial(self._made_for, case, weights))
        return partial(_run, made_for)

    def _made_for(self, case: Case, weights: Weights, rows: int) -> Product:
        """Return the function that runs the expert on inputs (rows, D), made of product kernels for `rows` rows."""
        case = case._replace(rows=rows)
        products = {
            name: self._product(case, weights.matrix(name)) for name in EXPERT_MATRICES if name in weights
        }
        return expert_of(products, weights, case.network.activation)


def _run(made_for: Callable[[int], Product], x_nD: Tensor, y_nD: Tensor) -> None:
    y_nD.copy_(made_for(len(x_nD))(x_nD))


def expert_of(
    products: Mapping[str, Product], biases: Mapping[str, Blocks], activation: Activation
) -> Product:
    """Make an expert: a function from inputs (n, D) to outputs (n, D).

    Args:
        products: the function that multiplies by each matrix, by the matrix's name, such as "gate".
        biases: the expert's biases by name, such as "down_bias"; a matrix may have none.
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
