"""Places: every request gets all of its rows in order, and blocks are given on only when nothing can write to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.errors import BadInput
from moesched.models.kv_blocks import cached_tokens, tokens_beside
from moesched.requests.batch import Batch
from moesched.requests.batching import BatchSizes
from moesched.requests.logprobs import WantedLogprobs
from moesched.requests.rows import Row, Rows
from moesched.serving.admission import MOST_USERS, FairAmongUsers, FirstCome, ShortestPrompt
from moesched.serving.arrivals import ListedArrivals
from moesched.serving.capacity import Capacity, capacity_for
from moesched.serving.places import Places
from moesched.serving.request import Request
from moesched.tasks import Phase

CAPACITIES = st.builds(
    lambda places, sequences, blocks, prompt, chunk: Capacity(
        places,
        sequences,
        16 * (2 * sequences + blocks),
        prompt,
        16 * (2 * sequences + blocks),
        min(prompt, chunk),
    ),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 8),
    st.integers(1, 40),
    st.integers(0, 20),
)


class Blocks:
    """The tokens of the KV cache that a device would have taken, with two steps in flight."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.held: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self.in_flight: list[set[int]] = []
        self.lengths: defaultdict[int, int] = defaultdict(int)

    def embed(self, rows: dict[int, Rows]) -> None:
        under_way = set().union(*self.in_flight)
        for number, place in rows.items():
            for request in place.departed:
                assert request not in under_way, "its blocks are freed while a step may write to them"
                del self.held[number][request]
            for row in place.rows:
                if row.start == 0:
                    self.held[number][row.request] = row.cache_tokens
                assert row.start == self.lengths[row.request]
                self.lengths[row.request] += row.tokens
                assert cached_tokens(self.lengths[row.request]) <= self.held[number][row.request]
            assert len(self.held[number]) <= self.capacity.sequences
            assert sum(self.held[number].values()) <= self.capacity.cache_tokens
        self.in_flight.append({row.request for place in rows.values() for row in place.rows})


def assert_takes_no_more(rows: Sequence[Row], fullest: Batch) -> None:
    """Assert that parts of prompts need no more memory than is reserved for the fullest batch."""
    starts, tokens = [row.start for row in rows], [row.tokens for row in rows]
    most = fullest.chunks()[0]
    assert sum(tokens) <= sum(most.tokens)
    assert sum(starts) <= sum(most.starts)
    assert max(map(add, starts, tokens)) <= fullest.longest
    assert tokens_beside(starts, tokens, 16) <= tokens_beside(most.starts, most.tokens, 16)


@given(CAPACITIES, st.data())
def test_any_program_of_entries_steps_and_departures_serves_everyone_within_the_capacity(
    capacity: Capacity, data: st.DataObject
) -> None:
    places, blocks, fullest = Places(capacity), Blocks(capacity), capacity.fullest()
    most = min(capacity.prompt_tokens, capacity.cache_tokens - 1)
    waiting = [
        Request(
            number=number,
            prompt=prompt,
            new_tokens=data.draw(st.integers(1, min(6, room))),
            ids=range(1000 * number, 1000 * number + prompt),
            logprobs=data.draw(st.sampled_from([None, WantedLogprobs(1), WantedLogprobs(1, prompt=True)])),
        )
        for number, prompt in enumerate(data.draw(st.lists(st.integers(1, most), max_size=8)))
        if (room := capacity.cache_tokens - prompt) > 0
    ]
    asked = {request.number: request for request in waiting}
    sampled: defaultdict[int, int] = defaultdict(int)
    seen: defaultdict[int, list[int]] = defaultdict(list)
    scored: defaultdict[int, list[int]] = defaultdict(list)
    left: set[int] = set()
    step, collected, phase = 0, 0, "decode"
    while waiting or len(places):
        while waiting and places.enter(waiting[0]):
            waiting.pop(0)
        if data.draw(st.booleans()) and asked:
            number = data.draw(st.sampled_from(sorted(asked)))
            left |= {number} if number in places else set()
            places.leave(number)
        turns: tuple[Phase, Phase] = ("prefill", "decode") if phase == "decode" else ("decode", "prefill")
        rows = places.rows(turns[0], step) or places.rows(turns[1], step)
        if rows:
            phase = next(iter(rows.values())).phase
            blocks.embed(rows)
            for place in rows.values():
                if capacity.chunk and place.phase == "prefill":
                    assert_takes_no_more(place.rows, fullest)
                limit = capacity.chunk or capacity.prompt_tokens
                tokens = sum(row.tokens for row in place.rows)
                assert place.phase == "decode" or tokens <= limit <= capacity.prompt_tokens
                for row in place.rows:
                    sampled[row.request] += row.samples
                    seen[row.request] += row.ids or ()
                    known = [*(row.ids or ()), *([] if row.following is None else [row.following])]
                    scored[row.request] += known[1:] if row.ends else []
            step += 1
        if collected < step and (not rows or step - collected == 2):
            blocks.in_flight.pop(0)
            places.collected(collected)
            collected += 1
    assert places.held == 0
    for number, request in asked.items():
        if number not in left:
            assert sampled[number] == request.new_tokens
            assert seen[number] == list(request.ids or ())
            if request.scores_prompt:
                assert scored[number] == seen[number][1:], "each of them follows from those before it"


def test_a_request_takes_the_place_with_the_fewest_tokens() -> None:
    places = Places(Capacity(2, 2, 96, 40, 96))
    for number, prompt in enumerate((30, 10, 10)):
        assert places.enter(Request(number=number, prompt=prompt, new_tokens=1))
    rows = places.rows("prefill", 0)
    assert {place: [row.request for row in each.rows] for place, each in rows.items()} == {0: [0], 1: [1, 2]}


def test_a_long_prompt_is_cut_over_steps_and_the_next_one_takes_the_room_that_is_left() -> None:
    places = Places(Capacity(1, 2, 96, 40, 96, chunk=16))
    first, second = (Request(number=number, prompt=24, new_tokens=1) for number in range(2))

    def spans(step: int) -> list[tuple[int, int, int, bool]]:
        rows = places.rows("prefill", step)[0].rows
        return [(row.request, row.start, row.tokens, row.samples) for row in rows]

    assert (places.enter(first), places.enter(second)) == (True, False)
    assert spans(0) == [(0, 0, 16, False)]
    assert places.enter(second)
    assert spans(1) == [(0, 16, 8, True), (1, 0, 8, False)]
    assert spans(2) == [(1, 8, 16, True)]


def test_the_blocks_of_one_who_leaves_before_its_first_step_are_free_at_once() -> None:
    places = Places(Capacity(1, 1, 32, 20, 32))
    places.enter(Request(number=0, prompt=4, new_tokens=1))
    places.leave(0)
    assert (len(places), places.held, places.rows("prefill", 0)) == (0, 0, {})


def test_the_fullest_batch_takes_all_blocks_of_every_place_and_all_prompt_tokens_of_a_step() -> None:
    batch = Capacity(3, 5, 16 * 23, 64, 200).fullest()
    assert len(batch.micro_batches) == 3
    for place in batch.micro_batches:
        assert batch.tokens_at_end(place) == 16 * 23
        assert sum(batch.prompts[request] for request in place) >= 64


@given(CAPACITIES)
def test_no_capacity_has_a_fullest_batch_that_takes_less(capacity: Capacity) -> None:
    batch = capacity.fullest()
    for place in batch.micro_batches:
        assert len(place) == capacity.sequences
        assert batch.tokens_at_end(place) == capacity.cache_tokens
        prompts = sum(batch.prompts[request] for request in place)
        assert prompts >= min(capacity.prompt_tokens, capacity.cache_tokens - capacity.sequences * 16)


def test_a_capacity_for_a_context_has_room_for_a_request_of_that_length_in_each_seat() -> None:
    capacity = capacity_for(BatchSizes(8, 4), 100)
    assert capacity == Capacity(2, 4, 4 * 112, 4 * 111, 100)
    capacity.require(Request(number=0, prompt=99, new_tokens=1))


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "places", "sequences"),
    [(16, 6, 4, 4), (16, 8, 2, 8), (17, 6, 4, 4), (3, 2, 3, 1), (5, 5, 1, 5), (7, 1, 7, 1)],
)
def test_a_capacity_has_equal_places_for_as_many_requests_of_the_batch_as_can_be(
    batch_size: int, micro_batch_size: int, places: int, sequences: int
) -> None:
    capacity = capacity_for(BatchSizes(batch_size, micro_batch_size), 100)
    assert (capacity.places, capacity.sequences) == (places, sequences)


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "message"),
    [
        (0, 1, "a prompt of 0 tokens: a request may have 1 to 99"),
        (100, 1, "a prompt of 100 tokens"),
        (50, 0, "0 tokens to generate: give 1 or more"),
        (50, 51, "a prompt of 50 tokens and 51 new ones: a request may have 100 tokens in all"),
    ],
)
def test_a_request_that_could_never_run_is_refused(prompt: int, new_tokens: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        capacity_for(BatchSizes(8, 4), 100).require(Request(number=0, prompt=prompt, new_tokens=new_tokens))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((0, 1, 32, 1, 1), "places is 0"), ((1, 2, 48, 1, 1), "cache_tokens is 48: give a multiple of 16")],
)
def test_a_capacity_without_room_is_refused(sizes: tuple[int, int, int, int, int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Capacity(*sizes)


def asked(*of: tuple[str, int]) -> list[Request]:
    return [
        Request(number=number, prompt=prompt, new_tokens=1, user=user)
        for number, (user, prompt) in enumerate(of)
    ]


def test_those_who_came_first_run_first() -> None:
    waiting = asked(("a", 9), ("b", 1))
    assert list(FirstCome().order(waiting)) == waiting


def test_short_prompts_run_first_and_equal_ones_in_the_order_of_arrival() -> None:
    waiting = asked(("a", 9), ("b", 1), ("c", 4), ("d", 4))
    assert [each.number for each in ShortestPrompt().order(waiting)] == [1, 2, 3, 0]


def test_users_take_turns_and_one_who_was_given_much_comes_later() -> None:
    rule = FairAmongUsers()
    waiting = asked(("a", 9), ("a", 9), ("a", 9), ("b", 9))
    assert [each.number for each in rule.order(waiting)] == [0, 3, 1, 2]
    rule.entered(waiting[0])
    assert [each.number for each in rule.order(waiting[1:])] == [3, 1, 2]


def test_a_user_who_comes_later_joins_where_the_others_are() -> None:
    rule = FairAmongUsers()
    for request in asked(("a", 9), ("a", 9), ("a", 9)):
        rule.entered(request)
    waiting = asked(("a", 9), ("b", 9), ("b", 9), ("a", 9), ("b", 9))
    assert [each.user for each in rule.order(waiting)] == ["b", "a", "b", "a", "b"]


def test_of_more_users_than_are_counted_some_who_had_little_are_taken_for_new_ones() -> None:
    rule = FairAmongUsers()
    for request in asked(("much", 99), *((f"user {number}", 9) for number in range(MOST_USERS))):
        rule.entered(request)
    waiting = asked(("much", 9), ("user 1", 9), ("new", 9))
    assert [each.user for each in rule.order(waiting)] == ["user 1", "new", "much"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=16),
    st.lists(st.integers(1, 50), min_size=8, max_size=16),
    st.lists(st.integers(1, 50), min_size=8, max_size=16),
)
def test_two_users_who_always_wait_are_given_as_much_whatever_was_before(
    before: list[tuple[str, int]], ones: list[int], others: list[int]
) -> None:
    rule = FairAmongUsers()
    for request in asked(*before):
        rule.entered(request)
    waiting = asked(*(("a", prompt) for prompt in ones), *(("new", prompt) for prompt in others))
    given_to = {"a": 0, "new": 0}
    while {each.user for each in waiting} == set(given_to):
        first = rule.order(waiting)[0]
        rule.entered(first)
        waiting.remove(first)
        given_to[first.user] += first.most_tokens
        assert abs(given_to["a"] - given_to["new"]) <= 2 * (50 + 1), "no more than a request of each"


def test_listed_requests_arrive_in_the_order_of_their_times_and_are_told_once() -> None:
    early, late = (Request(number=n, prompt=1, new_tokens=1, arrives=at) for n, at in ((1, 5), (0, 9)))
    arrivals = ListedArrivals([late, early], [(1, 7)])
    assert arrivals.news(4) == ([], [])
    assert arrivals.until_next(4) == 1
    assert arrivals.news(5) == ([early], [])
    assert not arrivals.over
    assert arrivals.news(100) == ([late], [1])
    assert arrivals.over
