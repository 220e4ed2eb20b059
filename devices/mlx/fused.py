"""Kernels on single elements, joined into one where there is Metal: a GPU takes longer to start most than to run them.

MLX joins kernels on a processor too, but needs a C++ compiler there while it runs, so elsewhere they run one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import mlx.core as mx

Array = mx.array


class Fused:
    """A function of arrays, each of whose results depends on the same element of its arguments only.

    Attributes:
        apart: the function, each of whose operations is a kernel.
        joined: the same as one kernel, for arrays of any shapes.
    """

    def __init__(self, function: Callable[..., Array]) -> None:
        self.apart = function
        self.joined: Callable[..., Array] = mx.compile(function, shapeless=True)

    def __call__(self, *arguments: Any) -> Array:
        """The function's result."""
        return (self.joined if mx.metal.is_available() else self.apart)(*arguments)


@Fused
def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up."""
    return gate * mx.sigmoid(gate) * up


@Fused
def turned(x: Array, swapped: Array, cos: Array, sin: Array) -> Array:
    """Elements and those that they make a pair with, turned by their angles, in the elements' dtype."""
    return (x * cos + swapped * sin).astype(x.dtype)


@Fused
def clipped(x: Array, limit: float) -> Array:
    """x between -limit and limit."""
    return mx.clip(x, -limit, limit)


@Fused
def weighted(x: Array, weights: Array) -> Array:
    """x times weights, float32."""
    return x.astype(mx.float32) * weights


@Fused
def added(*parts: Array) -> Array:
    """The sum of all parts in their order."""
    return reduce(add, parts)


@Fused
def added_to(residual: Array, *parts: Array) -> Array:
    """The sum of all parts in their order, and the residual, rounded once to the residual's dtype."""
    return (reduce(add, parts) + residual).astype(residual.dtype)


@Fused
def probability(logits: Array, log_sum: Array) -> Array:
    """The probabilities of logits, whose exponentials add up to a sum with this logarithm."""
    return mx.exp(logits - log_sum)
