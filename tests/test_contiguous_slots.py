"""Contiguous slots: requests that come and go keep what they have, and never overlap."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.devices.mlx.slots import ContiguousSlots, OutOfSlots

COUNT = 24


@given(st.lists(st.integers(1, 12), max_size=30), st.randoms(use_true_random=False))
def test_requests_keep_their_slots_wherever_others_come_and_go(
    sizes: list[int], chosen: random.Random
) -> None:
    slots = ContiguousSlots(COUNT)
    marks: list[int | None] = [None] * COUNT
    held: dict[int, int] = {}
    for request, size in enumerate(sizes):
        while held and sum(held.values()) + size > COUNT:
            gone = chosen.choice(sorted(held))
            slots.close(gone)
            del held[gone]
        for other, before, after in slots.open(request, size):
            marks[after : after + held[other]] = marks[before : before + held[other]]
        held[request] = size
        for slot in slots[request]:
            marks[slot] = request
        for each, room in held.items():
            assert [marks[slot] for slot in slots[each]] == [each] * room


def test_the_first_gap_that_is_wide_enough_is_taken_and_nobody_moves() -> None:
    slots = ContiguousSlots(COUNT)
    for request, size in enumerate((2, 4, 2, 6, 2)):
        assert slots.open(request, size) == []
    slots.close(1)
    slots.close(3)
    assert slots.open(5, 5) == []
    assert slots[5] == range(8, 13)


def test_too_few_free_slots_are_named_and_nothing_changes() -> None:
    slots = ContiguousSlots(COUNT)
    slots.open(0, 20)
    with pytest.raises(OutOfSlots, match="has 4 free slots, and request 1 needs 5"):
        slots.open(1, 5)
    assert slots.open(2, 4) == []
