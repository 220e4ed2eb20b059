"""The KV cache: sequences get room, keep what is theirs, and give it back."""

from __future__ import annotations

import random

import pytest
import torch

from moesched.devices.torch.block_table import OutOfBlocks
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.errors import BadInput, OverBudget
from moesched.models.shapes import SHAPES

Tensor = torch.Tensor

CONFIG = SHAPES["mixtral-0.8b"].varied(layers=2, kv_heads=3, head_dim=4)


def small_cache(blocks: int = 8, block_size: int = 4) -> BlockedKV:
    return BlockedKV(CONFIG, blocks, block_size=block_size)


def fill(cache: BlockedKV, sequences: list[int], new: list[int]) -> None:
    """Extend the sequences with keys that say whose they are, which token and layer; values are 100 more."""
    step = cache.extend(sequences, new)
    owners = [sequence for sequence, tokens in zip(sequences, new, strict=True) for _ in range(tokens)]
    for layer in range(2):
        marks = torch.tensor(owners) * 1000.0 + torch.tensor(step.positions) + layer / 2
        keys = marks[:, None, None].expand(-1, 3, 4)
        cache.append(layer, step, keys, keys + 100)


def contents(cache: BlockedKV, sequence: int, layer: int = 0) -> list[float]:
    """The marks of the sequence's keys, after checking its values."""
    (view,) = cache.views(layer, cache.extend([sequence], [0]))
    assert torch.equal(view.values_SLKd, view.keys_SLKd + 100)
    return view.keys_SLKd[0, :, 0, 0].tolist()


def marks(sequence: int, tokens: int, layer: int = 0) -> list[float]:
    return [sequence * 1000.0 + position + layer / 2 for position in range(tokens)]


def test_its_bytes_are_known_beforehand() -> None:
    lengths = [1, 4, 5]
    blocks = sum(-(-length // 4) for length in lengths)
    cache = BlockedKV(CONFIG, blocks, block_size=4, dtype=torch.bfloat16)
    assert cache.nbytes == blocks * 4 * 2 * sum(layer.attention.cache_width for layer in CONFIG.pattern)


def test_a_reserved_sequence_is_seen_without_a_copy_and_a_scattered_one_with() -> None:
    cache = small_cache()
    cache.open(0, 8)
    cache.open(1)
    cache.open(2)
    fill(cache, [0, 1, 2], [8, 4, 4])
    fill(cache, [1], [4])  # its second block cannot follow its first
    views = [cache.views(0, cache.extend([sequence], [0]))[0] for sequence in (0, 1)]
    arena = range(cache.slots.data_ptr(), cache.slots.data_ptr() + cache.nbytes)
    assert [view.keys_SLKd.data_ptr() in arena for view in views] == [True, False]
    assert contents(cache, 1) == marks(1, 8)


def test_sequences_of_equal_length_that_decode_together_are_one_view() -> None:
    cache = small_cache()
    for sequence in range(3):
        cache.open(sequence, 8)
    fill(cache, [0, 1, 2], [5, 5, 5])
    step = cache.extend([0, 1, 2], [1, 1, 1])
    (view,) = cache.views(1, step)
    assert view.keys_SLKd.shape == (3, 6, 3, 4)
    assert view.keys_SLKd[:, :5, 0, 0].tolist() == [marks(s, 5, layer=1) for s in range(3)]


def test_views_follow_the_order_of_the_step_whatever_the_lengths() -> None:
    cache = small_cache(blocks=20)
    for sequence, length in enumerate([3, 7, 7, 2, 2]):
        cache.open(sequence, length + 1)
    fill(cache, [0, 1, 2, 3, 4], [3, 7, 7, 2, 2])
    step = cache.extend([4, 0, 2, 1, 3], [1, 1, 1, 1, 1])
    found = [keys[0, 0, 0].item() // 1000 for view in cache.views(0, step) for keys in view.keys_SLKd]
    assert found == [4, 0, 2, 1, 3]
    assert step.past == (2, 3, 7, 7, 2)
    assert step.positions == [2, 3, 7, 7, 2]
    step = cache.extend([1, 0], [3, 2])
    assert step.last == [2, 4], "the last token of each sequence"
    assert step.positions == [8, 9, 10, 4, 5]


def test_when_blocks_run_out_the_error_says_so_and_nothing_changes() -> None:
    cache = small_cache(blocks=4)
    cache.open(0)
    cache.open(1)
    fill(cache, [0, 1], [4, 4])
    with pytest.raises(OutOfBlocks, match="2 free blocks of 4, 3 are needed; make it larger"):
        cache.extend([0, 1], [1, 5])
    assert (cache.table[0].length, cache.table[1].length, cache.table.free_blocks) == (4, 4, 2)
    fill(cache, [0, 1], [4, 4])
    assert contents(cache, 0) == marks(0, 8)
    with pytest.raises(OverBudget):
        small_cache(blocks=1).open(0, 5)
    with pytest.raises(BadInput, match="0 blocks of 4 tokens"):
        small_cache(blocks=0)


@pytest.mark.parametrize("seed", range(20))
def test_no_sequence_ever_sees_or_harms_another(seed: int) -> None:
    chance = random.Random(seed)
    cache = small_cache(blocks=12, block_size=3)
    lengths: dict[int, int] = {}
    for request in range(60):
        if lengths and chance.random() < 0.2:
            gone = chance.choice(sorted(lengths))
            cache.close(gone)
            del lengths[gone]
        try:
            if len(lengths) < 5 and chance.random() < 0.5:
                cache.open(request, chance.choice([0, 0, 4, 9]))
                lengths[request] = 0
            chosen = chance.sample(sorted(lengths), chance.randint(0, len(lengths)))
            new = [chance.randint(0, 4) for _ in chosen]
            fill(cache, chosen, new)
            for sequence, tokens in zip(chosen, new, strict=True):
                lengths[sequence] += tokens
        except OutOfBlocks:
            pass
        for sequence, length in lengths.items():
            assert cache.table[sequence].length == length
            assert contents(cache, sequence) == marks(sequence, length)
    for sequence in lengths:
        cache.close(sequence)
    assert cache.table.free_blocks == 12


def test_heirs_share_full_blocks_and_copy_a_partly_filled_one() -> None:
    cache = small_cache(blocks=12)
    cache.open(0)
    fill(cache, [0], [10])
    cache.reorder([0], [0, 0, 0], [0, 1, 2])
    assert cache.table.free_blocks == 12 - 3 - 2
    fill(cache, [0, 1, 2], [3, 3, 3])
    views = cache.views(0, cache.extend([1, 2], [0, 0]))
    assert [view.keys_SLKd.shape for view in views] == [(2, 13, 3, 4)], "scattered, and of one length"
    assert views[0].keys_SLKd[1, 10:, 0, 0].tolist() == [2010.0, 2011.0, 2012.0]
    for heir in (0, 1, 2):
        cache.close(heir)
    assert cache.table.free_blocks == 12


def test_blocks_that_nobody_goes_on_with_are_free_before_copies_are_made() -> None:
    cache = small_cache(blocks=4)
    for sequence in (0, 1):
        cache.open(sequence)
    fill(cache, [0, 1], [6, 6])
    assert cache.table.free_blocks == 0
    cache.reorder([0, 1], [1, 1], [0, 1])
    assert cache.table.free_blocks == 1
    assert contents(cache, 0) == contents(cache, 1) == marks(1, 6)
    full = small_cache(blocks=2)
    full.open(0)
    fill(full, [0], [6])
    with pytest.raises(OutOfBlocks, match="0 free blocks of 2, 1 are needed"):
        full.reorder([0], [0, 0], [0, 1])


def test_random_reorders_keep_what_each_sequence_has() -> None:
    chosen = random.Random(5)
    cache = small_cache(blocks=40)
    cache.open(0)
    expected: dict[int, list[float]] = {0: []}
    for _ in range(60):
        sequences = list(expected)
        new = [chosen.randint(1, 2)] * len(sequences)
        before = {sequence: len(expected[sequence]) for sequence in sequences}
        fill(cache, sequences, new)
        for sequence in sequences:
            fresh = range(before[sequence], before[sequence] + new[0])
            expected[sequence] = expected[sequence] + [sequence * 1000.0 + position for position in fresh]
        if before[sequences[0]] > 20:
            for sequence in sequences:
                cache.close(sequence)
            assert cache.table.free_blocks == 40
            cache.open(0)
            expected = {0: []}
            continue
        parents = [chosen.randrange(len(sequences)) for _ in range(4)]
        cache.reorder(sequences, parents, range(4))
        expected = {heir: expected[sequences[parent]] for heir, parent in enumerate(parents)}
        assert all(contents(cache, heir) == held for heir, held in expected.items())
