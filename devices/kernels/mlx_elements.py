"""Element-wise functions on MLX arrays, each compiled to one kernel where there is Metal.

A GPU takes longer to start most of these operations than to run them, so joined operations are faster. On a CPU, MLX
needs a C++ compiler to join operations, so there each operation runs as a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add

import mlx.core as mx

Array = mx.array


Kernel = Callable[..., Array]
"""An element-wise function: each element of its result depends only on the same elements of its arguments."""

ONE_BY_ONE: list[Kernel] = []
"""The functions of this module as they are written, not joined: MLX runs a kernel for each operation in them."""


def joined(function: Kernel) -> Kernel:
    """Compile a function to one kernel that takes arrays of any shapes."""
    compiled: Kernel = mx.compile(function, shapeless=True)
    return compiled


def on_elements(function: Kernel) -> Kernel:
    """Decorate an element-wise function of this module: compile it to one kernel where there is Metal."""
    ONE_BY_ONE.append(function)
    return joined(function) if mx.metal.is_available() else function


@on_elements
def swiglu(gate: Array, up: Array) -> Array:
    """Return silu(gate) * up, elementwise."""
    return gate * mx.sigmoid(gate) * up


@on_elements
def turned(x: Array, swapped: Array, cos: Array, sin: Array) -> Array:
    """Rotate pairs of elements by angles, given as cosines and sines; `swapped` has each element's partner."""
    return (x * cos + swapped * sin).astype(x.dtype)


@on_elements
def clipped(x: Array, limit: float) -> Array:
    """Limit x to the range from -limit to limit."""
    return mx.clip(x, -limit, limit)


@on_elements
def weighted(x: Array, weights: Array) -> Array:
    """Return x * weights, elementwise, in float32."""
    return x.astype(mx.float32) * weights


@on_elements
def added(*parts: Array) -> Array:
    """Add up all parts in their order."""
    return reduce(add, parts)


@on_elements
def added_to(residual: Array, *parts: Array) -> Array:
    """Add up all parts in their order, then the residual; rounded once to the residual's dtype."""
    return (reduce(add, parts) + residual).astype(residual.dtype)


@on_elements
def probability(logits: Array, log_sum: Array) -> Array:
    """Return exp(logits - log_sum), elementwise; `log_sum` is the logarithm of the sum of the logits' exponentials."""
    return mx.exp(logits - log_sum)
