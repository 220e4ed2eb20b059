"""Native attention of prompts: right, and a token's bits depend on nothing but the tokens that it sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import pytest
import torch

from exact_attention import exact_attention
from kernel_tables import kernels_of
from moesched.devices.kernels.seam import Case
from moesched.devices.native.attention import NativeAttention
from moesched.devices.native.compiled import instruction_sets
from moesched.devices.native.kernels import NativeKernels
from small_models import SMALL

Tensor = torch.Tensor

SET = "avx512_bf16"
needs_the_set = pytest.mark.skipif(SET not in instruction_sets(), reason=f"this processor has no {SET}")


@pytest.fixture
def kernels() -> Iterator[NativeKernels]:
    with closing(NativeKernels(0, SET, threads=2)) as kernels:
        yield kernels


class Prompts(NamedTuple):
    """Sequences of one length whose last tokens are new."""

    q_SNHd: Tensor
    keys_SLKd: Tensor
    values_SLKd: Tensor

    def cut(self, first: int, last: int) -> Prompts:
        """New tokens first .. last-1 of each sequence, when the later ones have not come yet."""
        length = self.keys_SLKd.shape[1] - self.q_SNHd.shape[1] + last
        return Prompts(self.q_SNHd[:, first:last], self.keys_SLKd[:, :length], self.values_SLKd[:, :length])


def random_prompts(sequences: int, new: int, length: int, heads: int, kv_heads: int, size: int) -> Prompts:
    generator = torch.Generator().manual_seed(length * size)

    def some(*shape: int) -> Tensor:
        return torch.randn(sequences, *shape, size, generator=generator).bfloat16()

    return Prompts(some(new, heads) * 2, some(length, kv_heads), some(length, kv_heads))


def attend(
    kernels: NativeKernels, prompts: Prompts, window: int | None = None, sinks_H: Tensor | None = None
) -> Tensor:
    """Native attention: (S, N, H * d)."""
    q_SNHd, keys, values = prompts
    sequences, new, _, _ = q_SNHd.shape
    out_TX = NativeAttention(kernels).attend_prompts(
        q_SNHd.flatten(0, 1).contiguous(), [(keys, values, new)], window, sinks_H
    )
    return out_TX.view(sequences, new, -1)


def exact(prompts: Prompts, window: int | None = None, sinks_H: Tensor | None = None) -> Tensor:
    """Attention of each sequence's new tokens in float64."""
    return torch.stack([exact_attention(*each, window, sinks_H) for each in zip(*prompts, strict=True)])


def assert_right(got: Tensor, expected: Tensor) -> None:
    """Weights are rounded to bfloat16, and so are outputs."""
    assert got.dtype == torch.bfloat16
    assert ((got.double() - expected).abs() <= expected.abs() * 2**-8 + 2**-7).all()
    assert (got.double() - expected).square().mean().sqrt() <= expected.square().mean().sqrt() * 2**-8


@needs_the_set
@pytest.mark.parametrize(
    ("sequences", "new", "length", "heads", "kv_heads", "size"),
    [
        (1, 7, 7, 4, 2, 64),
        (2, 130, 130, 8, 2, 64),
        (2, 70, 200, 8, 2, 32),
        (1, 300, 301, 16, 2, 128),
        (3, 1, 65, 6, 6, 96),
        (2, 9, 64, 3, 1, 256),
        (1, 3, 3, 246, 1, 32),
    ],
)
def test_attention_of_prompts_is_right(
    kernels: NativeKernels, sequences: int, new: int, length: int, heads: int, kv_heads: int, size: int
) -> None:
    prompts = random_prompts(sequences, new, length, heads, kv_heads, size)
    assert_right(attend(kernels, prompts), exact(prompts))


@needs_the_set
@pytest.mark.parametrize("window", [1, 16, 64, 100, 257])
def test_a_window_hides_earlier_tokens(kernels: NativeKernels, window: int) -> None:
    prompts = random_prompts(2, 200, 300, 4, 2, 64)
    assert_right(attend(kernels, prompts, window), exact(prompts, window))


@needs_the_set
@pytest.mark.parametrize("window", [None, 16])
def test_a_sink_takes_its_share_of_the_weights(kernels: NativeKernels, window: int | None) -> None:
    prompts = random_prompts(2, 40, 70, 4, 2, 64)
    sinks_H = torch.tensor([-90.0, -1.0, 2.0, 90.0])
    found = attend(kernels, prompts, window, sinks_H)
    assert_right(found, exact(prompts, window, sinks_H))
    assert not found.equal(attend(kernels, prompts, window))


@needs_the_set
@pytest.mark.parametrize("window", [None, 50])
def test_how_prompts_are_cut_and_the_threads_do_not_show_in_the_bits(window: int | None) -> None:
    prompts = random_prompts(2, 260, 300, 8, 2, 64)
    outcomes = []
    for threads in (1, 2, 5):
        with closing(NativeKernels(0, SET, threads)) as kernels:
            outcomes.append(attend(kernels, prompts, window))
            for size in (1, 7, 130):
                parts = [
                    attend(kernels, prompts.cut(first, min(first + size, 260)), window)
                    for first in range(0, 260, size)
                ]
                outcomes.append(torch.cat(parts, dim=1))
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)


@needs_the_set
def test_views_are_attended_to_one_after_the_other_where_they_are(kernels: NativeKernels) -> None:
    first, second = random_prompts(2, 5, 20, 4, 2, 32), random_prompts(1, 9, 9, 4, 2, 32)
    wide = torch.full((2, 33, 2, 2, 32), torch.nan, dtype=torch.bfloat16)
    wide[:, :20, 0], wide[:, :20, 1] = first.keys_SLKd, first.values_SLKd
    q_THd = torch.cat((first.q_SNHd.flatten(0, 1), second.q_SNHd.flatten(0, 1)))
    views = [(wide[:, :20, 0], wide[:, :20, 1], 5), (second.keys_SLKd, second.values_SLKd, 9)]
    got = NativeAttention(kernels).attend_prompts(q_THd, views)
    assert torch.equal(got, torch.cat([attend(kernels, each).flatten(0, 1) for each in (first, second)]))


@needs_the_set
@pytest.mark.parametrize("scale", [1e4, 1e-30])
def test_scores_far_out_give_no_nan(kernels: NativeKernels, scale: float) -> None:
    prompts = random_prompts(1, 100, 100, 4, 1, 32)
    prompts = prompts._replace(q_SNHd=prompts.q_SNHd * scale)
    assert_right(attend(kernels, prompts), exact(prompts))


@needs_the_set
def test_a_value_that_is_not_a_number_shows_in_the_tokens_that_see_it(kernels: NativeKernels) -> None:
    prompts = random_prompts(1, 100, 100, 4, 1, 32)
    prompts.values_SLKd[0, 70] = torch.nan
    got = attend(kernels, prompts)
    assert got[0, :64].isfinite().all()
    assert got[0, 70:].isnan().all()


@pytest.mark.parametrize(
    ("changed", "dtype"),
    [
        ({"head_dim": 16}, torch.bfloat16),
        ({"head_dim": 48}, torch.bfloat16),
        ({"head_dim": 288}, torch.bfloat16),
        ({"heads": 494, "kv_heads": 2}, torch.bfloat16),
        ({}, torch.float32),
        ({}, torch.bfloat16),
    ],
)
def test_torch_does_other_heads_other_numbers_and_other_instruction_sets(
    variant: str, changed: dict[str, int], dtype: torch.dtype
) -> None:
    config = SMALL.varied(**{"heads": 2, "kv_heads": 1, "head_dim": 64, **changed})
    name = str(dtype).removeprefix("torch.")
    case = Case("prompt_attention", 4, frozenset(), name, "cpu", config.layer(0))
    with closing(NativeKernels(0, variant, threads=1)) as kernels:
        found = kernels_of(config, kernels, dtype).table.require(case)
    taken = variant == SET and not changed and dtype == torch.bfloat16
    assert found.name == (f"native {variant}" if taken else "torch")
