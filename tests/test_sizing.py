"""Sizes that nobody gave: the largest batch that fits, and micro-batches that suit the machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.batching import Sizes, batches_of
from moesched.errors import BadInput
from moesched.machines import load_machine
from moesched.machines.local import unified_machine
from moesched.plan import Batch
from moesched.sizing import choose_sizes, default_micro_batch

T4 = load_machine("t4")
LAPTOP = unified_machine(
    "laptop", memory=10**9, disk=10**12, flops={"float32": 1e11}, memory_bandwidth=1e10, disk_bandwidth=1e9
)


class Room:
    """Plans that fit where all tokens together, and those of a micro-batch, do."""

    def __init__(self, tokens: int, micro_batch_tokens: int = 10**9) -> None:
        self.tokens = tokens
        self.micro_batch_tokens = micro_batch_tokens
        self.tried: list[Batch] = []

    def plan(self, batch: Batch) -> None:
        self.tried.append(batch)
        if batch.cache_tokens > self.tokens or batch.largest > self.micro_batch_tokens:
            raise BadInput(f"{len(batch.prompts)} requests do not fit")


def test_all_prompts_run_together_where_they_fit() -> None:
    assert choose_sizes([4] * 10, 4, LAPTOP, Room(10**6).plan) == Sizes(10, 10)


def test_the_batch_is_the_largest_that_fits() -> None:
    room = Room(tokens=16 * 7)  # a prompt of 10 tokens and 5 new ones take one block of 16
    assert choose_sizes([10] * 1000, 5, LAPTOP, room.plan) == Sizes(7, 7)
    assert len(room.tried) < 400


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(16 * 8, 3000))
def test_every_batch_of_the_chosen_size_fits(prompts: list[int], tokens: int) -> None:
    room = Room(tokens)
    size = choose_sizes(prompts, 4, LAPTOP, room.plan).batch_size
    for start in range(0, len(prompts), size):
        part = tuple(prompts[start : start + size])
        assert Batch(part, 4, (tuple(range(len(part))),)).cache_tokens <= tokens


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(30, 200), st.integers(16 * 4, 600))
def test_every_micro_batch_of_the_chosen_sizes_fits(prompts: list[int], most: int, tokens: int) -> None:
    room = Room(tokens, micro_batch_tokens=most)
    for batch in batches_of(prompts, 4, choose_sizes(prompts, 4, T4, room.plan)):
        room.plan(batch)


def test_a_batch_that_needs_more_than_the_longest_prompts_did_makes_all_batches_smaller() -> None:
    def plan(batch: Batch) -> None:
        if len(batch.prompts) > 2 or batch.prompts == (3, 3):
            raise BadInput("does not fit")

    assert choose_sizes([9, 9, 3, 5], 4, LAPTOP, plan) == Sizes(2, 2)
    assert choose_sizes([9, 9, 3, 3], 4, LAPTOP, plan) == Sizes(1, 1)


def test_micro_batches_are_halved_twice_for_a_larger_batch_and_not_further() -> None:
    tight = Room(16 * 40, micro_batch_tokens=20)
    assert choose_sizes([10] * 1000, 4, T4, tight.plan) == Sizes(32, 2)


def test_given_sizes_stay_as_they_are() -> None:
    given = choose_sizes([4] * 10, 4, LAPTOP, Room(10**6).plan, batch_size=6, micro_batch_size=2)
    assert given == Sizes(6, 2)
    assert choose_sizes([4] * 3, 4, LAPTOP, Room(10**6).plan, batch_size=6) == Sizes(3, 3)


def test_micro_batches_are_halved_until_a_given_batch_fits() -> None:
    room = Room(10**6, micro_batch_tokens=25)
    assert choose_sizes([10] * 8, 4, LAPTOP, room.plan, batch_size=8) == Sizes(8, 2)


def test_where_memories_are_apart_there_are_several_micro_batches_to_overlap() -> None:
    assert default_micro_batch(T4, 40) == 10
    assert default_micro_batch(T4, 1000) == 32
    assert default_micro_batch(T4, 1) == 1
    assert default_micro_batch(LAPTOP, 40) == 40


def test_where_nothing_fits_one_request_is_left_to_be_refused() -> None:
    assert choose_sizes([10] * 8, 4, T4, Room(1).plan) == Sizes(1, 1)


def test_a_size_below_one_is_told() -> None:
    with pytest.raises(BadInput, match="--batch-size is 0: give 1 or more"):
        choose_sizes([4], 4, T4, Room(100).plan, batch_size=0)
    with pytest.raises(BadInput, match="--micro-batch-size is -1: give 1 or more"):
        choose_sizes([4], 4, T4, Room(100).plan, micro_batch_size=-1)
