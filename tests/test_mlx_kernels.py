"""MLX's kernels on single elements: joined into one, as on Metal, they have the bits of those that run one by one."""

# ruff: noqa: E402  # what needs MLX is imported after the check that it is there
from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="there is no MLX for this platform")

from moesched.devices.mlx import fused
from moesched.devices.mlx.fused import Fused

needs_compiler = pytest.mark.skipif(
    not mx.metal.is_available() and shutil.which("g++") is None,
    reason="MLX joins kernels on a processor with g++",
)

SHORTEST, LONGEST = 1, 70


def drawn(*shape: int, dtype: Any = mx.float32) -> Any:
    array = (3 * mx.random.normal(shape)).astype(dtype)
    mx.eval(array)
    return array


def arguments(function: Fused, tokens: int) -> tuple[Any, ...]:
    """Those that a layer gives a function for a number of tokens."""
    dtype = mx.bfloat16
    heads, pair = (tokens, 6, 8), (tokens, 1, 8)
    row, float32s = (tokens, 1, 9), [drawn(tokens, 1, 9) for _ in range(8)]
    return {
        fused.swiglu: (drawn(*row, dtype=dtype), drawn(*row, dtype=dtype)),
        fused.turned: (drawn(*heads, dtype=dtype), drawn(*heads, dtype=dtype), drawn(*pair), drawn(*pair)),
        fused.clipped: (drawn(*row, dtype=dtype), 0.5),
        fused.weighted: (drawn(tokens, 4, 9, dtype=dtype), drawn(tokens, 4, 1)),
        fused.added: (*float32s,),
        fused.added_to: (drawn(*row, dtype=dtype), *float32s),
        fused.probability: (drawn(tokens, 4), drawn(tokens, 1)),
    }[function]


ALL = [each for each in vars(fused).values() if isinstance(each, Fused)]


@needs_compiler
@pytest.mark.parametrize("function", ALL, ids=lambda each: each.apart.__name__)
def test_a_joined_kernel_has_the_bits_of_the_operations_one_by_one_and_is_fewer_kernels(
    tmp_path: Path, function: Fused
) -> None:
    for tokens in (SHORTEST, LONGEST, 5):  # one kernel for all shapes
        given = arguments(function, tokens)
        apart, joined = function.apart(*given), function.joined(*given)
        assert kernels(tmp_path, joined) < kernels(tmp_path, apart)
        assert apart.dtype == joined.dtype
        assert mx.array_equal(apart, joined)


def kernels(folder: Path, array: Any) -> int:
    """The operations that an array still waits for."""
    mx.export_to_dot(str(folder / "graph.dot"), array)
    return len(re.findall(r'label ?="[A-Za-z]', (folder / "graph.dot").read_text()))
