"""Batches of requests with prompts of different lengths: nobody is lost, nobody waits too long, the load is even."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.errors import BadInput
from moesched.models.kv_blocks import cached_tokens
from moesched.requests.batching import BatchSizes, assign_requests, batch_of, batches_of

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=60)
SIZES = st.builds(
    BatchSizes,
    st.integers(1, 20),
    st.integers(1, 8),
    st.none() | st.integers(336, 800),
    beams=st.integers(1, 3),
)


def test_the_longest_prompt_goes_to_the_micro_batch_with_the_fewest_tokens() -> None:
    placed = assign_requests([4, 9, 1, 7, 3], 1, micro_batches=2, micro_batch_size=5)
    assert placed.micro_batches == [[1, 4], [0, 2, 3]]  # 9 + 3 and 7 + 4 + 1
    assert placed.deferred == []


def test_micro_batches_that_are_not_full_come_out_too() -> None:
    assert assign_requests([5, 5, 5], 1, micro_batches=2, micro_batch_size=4).micro_batches == [[0, 2], [1]]
    assert assign_requests([5], 1, micro_batches=4, micro_batch_size=4).micro_batches == [[0]]


def test_where_all_micro_batches_are_full_the_shortest_prompts_are_left() -> None:
    placed = assign_requests([1, 8, 6, 2, 7], 1, micro_batches=1, micro_batch_size=3)
    assert placed.micro_batches == [[1, 2, 4]]
    assert placed.deferred == [0, 3]


def test_the_cache_is_counted_in_blocks_with_what_will_be_generated() -> None:
    room_for_two = 2 * cached_tokens(10 + 8)
    placed = assign_requests([10] * 3, 8, micro_batches=1, micro_batch_size=9, cache_tokens=room_for_two)
    assert (placed.micro_batches, placed.deferred) == ([[0, 1]], [2])
    placed = assign_requests([10] * 3, 8, micro_batches=1, micro_batch_size=9, cache_tokens=room_for_two - 1)
    assert (placed.micro_batches, placed.deferred) == ([[0]], [1, 2])


@given(prompts=LENGTHS, new_tokens=st.integers(1, 20), sizes=SIZES)
def test_every_request_runs_once_within_the_limits(
    prompts: list[int], new_tokens: int, sizes: BatchSizes
) -> None:
    ran: list[int] = []
    for batch in batches_of(prompts, new_tokens, sizes):
        assert batch.first_request == len(ran)
        assert len(batch.prompts) <= sizes.batch_size
        assert len(batch.micro_batches) <= sizes.micro_batches
        for requests in batch.micro_batches:
            assert 1 <= len(requests) <= sizes.micro_batch_size
            assert sizes.cache_tokens is None or batch.tokens_at_end(requests) <= sizes.cache_tokens
        placed = [request for requests in batch.micro_batches for request in requests]
        assert sorted(placed) == list(range(len(batch.prompts)))
        ran += batch.prompts
    assert ran == prompts


@given(prompts=LENGTHS)
def test_no_micro_batch_is_ahead_of_another_by_more_than_one_prompt(prompts: list[int]) -> None:
    placed = assign_requests(prompts, 4, micro_batches=4, micro_batch_size=len(prompts)).micro_batches
    tokens = [sum(prompts[request] for request in requests) for requests in placed]
    assert max(tokens) - min(tokens) <= max(prompts)


def test_a_batch_is_full_where_only_the_sizes_limit_it() -> None:
    sizes = BatchSizes(6, 2)
    assert [len(batch.prompts) for batch in batches_of(list(range(1, 16)), 4, sizes)] == [6, 6, 3]
    assert len(batch_of([5] * 3, 4, sizes).micro_batches) == 3


def test_who_finds_no_place_in_the_cache_begins_the_next_batch() -> None:
    sizes = BatchSizes(4, 2, cache_tokens=64)
    batches = list(batches_of([20, 20, 40, 40, 5, 5], 8, sizes))
    assert [batch.prompts for batch in batches] == [(20, 20, 40), (40, 5, 5)]


def test_a_request_that_no_micro_batch_holds_is_told() -> None:
    with pytest.raises(BadInput, match="a prompt of 70 tokens and 8 new ones are more than the 64 tokens"):
        list(batches_of([5, 70, 5], 8, BatchSizes(3, 3, cache_tokens=64)))
