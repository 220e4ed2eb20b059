"""Native attention of a decode step: right, and a sequence's bits depend on nothing but the sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from exact_attention import exact_attention
from kernel_tables import logits_by
from moesched.devices.native.attention import LayerAddresses, NativeAttention, SequencesInBlocks
from moesched.devices.native.compiled import availability, instruction_sets
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.torch.kv_cache import BlockedKV
from small_models import SMALL

Tensor = torch.Tensor

BLOCK = 16
TINY = Path(__file__).parents[1] / "examples" / "tiny-mixtral"
TYPES = [torch.float32, torch.bfloat16]
LENGTHS = (1, 15, 16, 17, 32, 33, 255, 256, 257, 300)
SIZES = [(8, 2, 128), (4, 4, 32), (12, 1, 64), (9, 3, 80), (16, 2, 20), (5, 1, 33), (2, 1, 1)]
"""Numbers of heads and of key-value heads, and the size of a head."""


class Step(NamedTuple):
    """A decode step's new tokens, and the sequences that they continue."""

    q_SHd: Tensor
    k_SKd: Tensor
    v_SKd: Tensor
    past: list[tuple[Tensor, Tensor]]

    def of(self, sequence: int) -> Step:
        """The same of one sequence."""
        one = slice(sequence, sequence + 1)
        return Step(self.q_SHd[one], self.k_SKd[one], self.v_SKd[one], self.past[one])

    @property
    def lengths(self) -> list[int]:
        return [len(keys) + 1 for keys, _ in self.past]


def random_step(
    lengths: Sequence[int], heads: int, kv_heads: int, size: int, dtype: torch.dtype = torch.float32
) -> Step:
    generator = torch.Generator().manual_seed(heads * size)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, size, generator=generator).to(dtype)

    count = len(lengths)
    past = [(some(length - 1, kv_heads), some(length - 1, kv_heads)) for length in lengths]
    return Step(some(count, heads) * 2, some(count, kv_heads), some(count, kv_heads), past)


def attend(
    kernels: NativeKernels,
    step: Step,
    window: int | None = None,
    block_size: int = BLOCK,
    order: Sequence[int] | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Native attention; `order` are the places of the blocks."""
    needed = [-(-length // block_size) for length in step.lengths]
    places = list(order or range(sum(needed)))
    _, kv_heads, size = step.k_SKd.shape
    slots = torch.full(((max(places) + 1), block_size, kv_heads, size), torch.nan, dtype=step.k_SKd.dtype)
    cache = slots, slots.clone()
    start = 0
    for blocks, (keys, values) in zip(needed, step.past, strict=True):
        for half, tokens in zip(cache, (keys, values), strict=True):
            whole = half.new_full((blocks * block_size, kv_heads, size), torch.nan)
            whole[: len(tokens)] = tokens
            half[places[start : start + blocks]] = whole.view(blocks, block_size, kv_heads, size)
        start += blocks
    keys_at, values_at = (half.data_ptr() for half in cache)
    return NativeAttention(kernels).attend(
        step.q_SHd,
        step.k_SKd,
        step.v_SKd,
        LayerAddresses(keys_at, values_at, block_size, window),
        SequencesInBlocks.of(array("q", step.lengths), array("q", places)),
        sinks_H,
    )


def exact(step: Step, window: int | None = None, sinks_H: Tensor | None = None) -> Tensor:
    """Attention of each sequence's new token in float64."""
    rows = []
    for number, past in enumerate(step.past):
        q_SHd, *new = (each[number : number + 1] for each in (step.q_SHd, step.k_SKd, step.v_SKd))
        keys, values = (torch.cat(halves) for halves in zip(past, new, strict=True))
        rows.append(exact_attention(q_SHd, keys, values, window, sinks_H))
    return torch.cat(rows)


def assert_right(got: Tensor, expected: Tensor) -> None:
    relative = 2**-8 if got.dtype == torch.bfloat16 else 1e-5
    assert ((got.double() - expected).abs() <= expected.abs() * relative + 1e-5).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "size", "window"),
    [
        *((LENGTHS, *sizes, None) for sizes in SIZES),
        *(([1, 99, 100, 101, 400], 4, 2, 24, window) for window in (1, 16, 100, 257)),
        ([9000], 4, 1, 16, None),
    ],
)
def test_attention_is_right_for_any_sizes_windows_and_lengths(
    native: NativeKernels,
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    step = random_step(lengths, heads, kv_heads, size, dtype)
    assert_right(attend(native, step, window), exact(step, window))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_a_sink_takes_its_share_of_the_weights(
    native: NativeKernels, window: int | None, dtype: torch.dtype
) -> None:
    step = random_step([1, 99, 257, 400], 6, 2, 24, dtype)
    sinks_H = torch.tensor([-90.0, -1.0, 0.0, 2.0, 5.0, 90.0])
    found = attend(native, step, window, sinks_H=sinks_H)
    assert_right(found, exact(step, window, sinks_H))
    assert not found.equal(attend(native, step, window))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_other_sequences_the_blocks_and_the_threads_do_not_show_in_the_bits(
    variant: str, dtype: torch.dtype
) -> None:
    step = random_step([700, 3, 1500], 8, 2, 72, dtype)
    blocks = sum(-(-length // BLOCK) for length in step.lengths)
    shuffled = torch.randperm(blocks + 9, generator=torch.Generator().manual_seed(1))[:blocks].tolist()
    outcomes = []
    for threads in (1, 2, 5):
        with closing(NativeKernels(0, variant, threads)) as kernels:
            outcomes.append(attend(kernels, step))
            outcomes.append(attend(kernels, step, order=shuffled))
            outcomes.append(attend(kernels, step, block_size=5))
            outcomes.append(torch.cat([attend(kernels, step.of(i)) for i in range(3)]))
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)


def test_sequences_may_share_blocks(native: NativeKernels) -> None:
    first = random_step([50], 4, 2, 16)
    other = random_step([50], 8, 2, 16)
    forked = Step(
        torch.cat((first.q_SHd, other.q_SHd[:, :4])),
        torch.cat((first.k_SKd, other.k_SKd)),
        torch.cat((first.v_SKd, other.v_SKd)),
        first.past * 2,
    )
    keys, values = (torch.zeros(5 * BLOCK, 2, 16) for _ in range(2))
    for half, tokens in zip((keys, values), first.past[0], strict=True):
        half[: len(tokens)] = tokens
        half[4 * BLOCK : 4 * BLOCK + 1] = tokens[48:]  # the other one has a last block of its own
    blocks = SequencesInBlocks.of(array("q", [50, 50]), array("q", [0, 1, 2, 3, 0, 1, 2, 4]))
    cached = LayerAddresses(keys.data_ptr(), values.data_ptr(), BLOCK)
    got = NativeAttention(native).attend(forked.q_SHd, forked.k_SKd, forked.v_SKd, cached, blocks)
    assert torch.equal(got, attend(native, forked))


@pytest.mark.parametrize("dtype", TYPES)
def test_it_stores_the_new_tokens_where_the_cache_appends_them(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    config = SMALL.varied(layers=3, heads=4, kv_heads=2, head_dim=12)
    caches = [BlockedKV(config, 9, block_size=4, dtype=dtype) for _ in range(2)]
    for cache in caches:
        cache.slots.zero_()
        for sequence in range(2):
            cache.table.open(sequence)
        cache.extend([0, 1], [6, 4])
    step = random_step([7, 5], 4, 2, 12, dtype)
    appended, attended = caches
    appended.append(1, appended.extend([0, 1], [1, 1]), step.k_SKd, step.v_SKd)
    in_blocks = attended.extend([0, 1], [1, 1]).in_blocks
    NativeAttention(native).attend(step.q_SHd, step.k_SKd, step.v_SKd, attended.layer(1), in_blocks)
    assert torch.equal(attended.slots, appended.slots)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", [1e4, 1e-30])
def test_scores_far_out_give_no_nan(native: NativeKernels, scale: float, dtype: torch.dtype) -> None:
    step = random_step([400], 4, 1, 16, dtype)
    step = step._replace(q_SHd=step.q_SHd * scale)
    assert_right(attend(native, step), exact(step))


@pytest.mark.parametrize("rise", [0.02, 0.4, 3.0])
def test_scores_may_rise_from_token_to_token(native: NativeKernels, rise: float) -> None:
    step = random_step([400], 8, 1, 16, torch.bfloat16)
    keys, values = step.past[0]
    rising = torch.arange(len(keys))[:, None, None] * rise * 4 / step.q_SHd[0, 0, 0]
    step = step._replace(past=[(torch.cat((rising.bfloat16(), keys[..., 1:]), 2), values)])
    assert_right(attend(native, step), exact(step))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_nan_stays_in_its_sequence_and_head(native: NativeKernels, dtype: torch.dtype) -> None:
    step = random_step([400, 400], 4, 1, 16, dtype)
    step.q_SHd[1, 2] = torch.nan
    got = attend(native, step).view(2, 4, 16)
    assert got[1, 2].isnan().all()
    assert got.isnan().sum() == 16


@pytest.mark.skipif(not instruction_sets(), reason=availability())
def test_a_run_in_float32_attends_natively_and_says_what_it_says_with_torch() -> None:
    ours, theirs = (logits_by(kernel, "float32", new_tokens=4) for kernel in (instruction_sets()[0], "torch"))
    assert torch.equal(ours[:, 0], theirs[:, 0]), "prefill is torch's"
    assert not torch.equal(ours, theirs), "decode steps do not attend natively"
    assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3)
