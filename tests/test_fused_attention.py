"""Attention on GPUs: which have a fused kernel, and that the way without one holds few scores at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moesched.devices.kernels import attention_functions
from moesched.devices.kernels.attention_functions import KVView
from moesched.devices.kernels.fused_attention import (
    PIECE_BYTES,
    has_fused_attention,
    prefer_kernels_without_plans,
    queries_in_a_piece,
)
from scores import Scores

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "fused"),
    [
        (BF16, 128, (9, 0), True),
        (BF16, 18, (8, 0), True),
        (F16, 128, (7, 5), True),
        (BF16, 128, (7, 5), False),
        (F16, 18, (7, 5), False),
        (F32, 128, (9, 0), True),
        (F32, 18, (9, 0), False),
        (F16, 300, (9, 0), False),
    ],
)
def test_fused_kernels_are_known(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int], fused: bool
) -> None:
    assert has_fused_attention(dtype, head_dim, capability) is fused


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("past", [0, 33])
def test_attention_without_a_fused_kernel_is_the_same_in_pieces(past: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tokens, length = 700, 700 + past
    q_THd = numbers(2 * tokens, 4, 24)
    view = KVView(numbers(2, length, 2, 24), numbers(2, length, 2, 24), tokens)
    whole, pieces = (
        attention_functions.attention(q_THd, [view], window, fused=fused) for fused in (True, False)
    )
    torch.testing.assert_close(whole, pieces, rtol=1e-4, atol=1e-5)


def test_attention_without_a_fused_kernel_holds_few_scores_of_a_long_prompt() -> None:
    q_THd = torch.zeros(3000, 8, 8)
    view = KVView(torch.zeros(1, 3000, 2, 8), torch.zeros(1, 3000, 2, 8), 3000)
    with Scores() as whole:
        attention_functions.attention(q_THd, [view])
    with Scores() as pieces:
        attention_functions.attention(q_THd, [view], fused=False)
    assert pieces.most <= PIECE_BYTES < whole.most


@pytest.mark.parametrize(("heads", "length"), [(8, 100), (8, 4096), (32, 131_072), (64, 10**7)])
def test_scores_of_a_piece_are_few(heads: int, length: int) -> None:
    queries = queries_in_a_piece(heads, length)
    assert queries == 1 or 4 * queries * heads * length <= PIECE_BYTES


@pytest.fixture
def as_it_was() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_attention_by_cudnn_is_left_out(as_it_was: None) -> None:
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    prefer_kernels_without_plans()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
