"""Arenas: aligned slots, apart from each other, whose views are their own bytes."""

from __future__ import annotations

import pytest
import torch

from moesched.devices.shared.arena import ALIGNMENT, Arena


def test_arena_slots_are_aligned_apart_and_as_large_as_was_said() -> None:
    arena = Arena(3, 5000)
    assert arena.nbytes == Arena.nbytes_for(3, 5000) == 3 * 8192
    slots = [arena.slot(i) for i in range(len(arena))]
    assert [slot.data_ptr() % ALIGNMENT for slot in slots] == [0, 0, 0]
    for i, slot in enumerate(slots):
        assert slot.dtype == torch.uint8
        slot.fill_(i)
    assert [(int(slot.min()), int(slot.max())) for slot in slots] == [(0, 0), (1, 1), (2, 2)]
    assert [slot.numel() for slot in slots] == [8192, 8192, 8192]
    with pytest.raises(IndexError, match="slot 3 of an arena of 3"):
        arena.slot(3)


def test_arena_views_are_the_slot_s_own_bytes() -> None:
    arena = Arena(2, ALIGNMENT)
    arena.view(1, 128, (2, 3), torch.float32).fill_(1.0)
    expected = torch.zeros(ALIGNMENT // 4)
    expected[32:38] = 1.0
    assert torch.equal(arena.slot(1).view(torch.float32), expected)
    assert not arena.slot(0).any()
