"""Sampling: what is chosen, what can be chosen, and what the choice may depend on."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.errors import MoeschedError
from moesched.requests.next_token import logprobs_of, probabilities, sample, uniform
from moesched.requests.sampling import Sampling

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05], dtype=np.float32))


def draw_many(sampling: Sampling, count: int = 4000) -> Counter[int]:
    rows = np.tile(LOGITS, (count, 1))
    return Counter(sample(rows, sampling, requests=[0] * count, positions=range(count)))


def random_logits(rows: int, vocabulary: int = 50) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(rows, vocabulary)).astype(np.float32)


def test_temperature_zero_takes_the_likeliest_token_and_the_first_of_equals() -> None:
    rows = np.array([[0, 3, 1], [2, 2, 1]], dtype=np.float32)
    assert sample(rows, Sampling(), requests=[0, 1], positions=[0, 0]) == [1, 0]


def test_tokens_come_as_often_as_their_probability_says() -> None:
    counts = draw_many(Sampling(temperature=1.0))
    for token, share in enumerate([0.1, 0.4, 0.2, 0.25, 0.05]):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    shares = [probabilities(LOGITS, Sampling(temperature=t))[1] for t in (0.1, 1.0, 10.0)]
    assert shares == [pytest.approx(0.99, abs=0.01), pytest.approx(0.4), pytest.approx(0.22, abs=0.02)]


def test_a_temperature_close_to_zero_is_as_good_as_greedy() -> None:
    assert set(draw_many(Sampling(temperature=1e-300), count=100)) == {1}


def test_top_k_leaves_only_the_k_likeliest_tokens() -> None:
    assert set(draw_many(Sampling(temperature=1.0, top_k=2))) == {1, 3}
    assert set(draw_many(Sampling(temperature=1.0, top_k=99))) == {0, 1, 2, 3, 4}


def test_top_p_leaves_the_fewest_tokens_that_reach_it() -> None:
    kept = {
        p: set(np.flatnonzero(probabilities(LOGITS, Sampling(temperature=1.0, top_p=p))))
        for p in (0.3, 0.6, 0.8)
    }
    assert kept == {0.3: {1}, 0.6: {1, 3}, 0.8: {1, 2, 3}}


def test_top_p_counts_what_top_k_has_left() -> None:
    left = probabilities(LOGITS, Sampling(temperature=1.0, top_k=2, top_p=0.6))
    assert set(np.flatnonzero(left)) == {1}


@given(p=st.floats(0.01, 0.999), seed=st.integers(0, 1000), size=st.integers(1, 300))
def test_top_p_agrees_with_sorting_everything(p: float, seed: int, size: int) -> None:
    logits = np.random.default_rng(seed).normal(scale=4, size=size)
    everything = probabilities(logits, Sampling(temperature=1.0))
    ordered = np.sort(everything)[::-1]
    expected = int((np.cumsum(ordered) < p).sum()) + 1
    kept = np.flatnonzero(probabilities(logits, Sampling(temperature=1.0, top_p=p)))
    assert kept.size == min(expected, size)
    assert everything[kept].min() == pytest.approx(ordered[kept.size - 1])


def test_a_choice_depends_on_seed_request_and_position_and_on_nothing_else() -> None:
    rows = random_logits(6)
    sampling = Sampling(temperature=1.0, seed=7)
    requests, positions = [3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]
    together = sample(rows, sampling, requests, positions)
    order = [4, 0, 5, 2, 1, 3]
    shuffled = sample(rows[order], sampling, [requests[i] for i in order], [positions[i] for i in order])
    alone = [sample(rows[i : i + 1], sampling, [requests[i]], [positions[i]])[0] for i in range(6)]
    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_every_seed_request_and_position_has_a_number_of_its_own() -> None:
    numbers = {uniform(s, r, p) for s in (0, 1, 2**64 - 1) for r in range(20) for p in range(20)}
    assert len(numbers) == 3 * 20 * 20
    assert 0.45 < sum(numbers) / len(numbers) < 0.55
    assert all(0 <= number < 1 for number in numbers)


def test_numbers_stay_the_same_from_version_to_version() -> None:
    assert uniform(1, 2, 3) == 0.360468362910245


def test_logits_that_are_no_numbers_are_an_error_and_never_a_token() -> None:
    rows = random_logits(3)
    rows[1, 5] = np.nan
    with pytest.raises(MoeschedError, match="request 8 at position 4"):
        sample(rows, Sampling(), requests=[7, 8, 9], positions=[4, 4, 4])


def test_log_probabilities_are_those_of_the_softmax_and_equal_ones_are_named_by_the_lowest_id() -> None:
    logits = np.array([[1.0, 3.0, 3.0, -2.0], [0.0, 0.0, 0.0, 1000.0]], dtype=np.float32)
    first, second = logprobs_of(logits, [0, 3], likeliest=2)
    normal = np.log(np.exp([1.0, 3.0, 3.0, -2.0]).sum())
    assert first.logprob == pytest.approx(1.0 - normal)
    assert [token for token, _ in first.likeliest] == [1, 2]
    assert [value for _, value in first.likeliest] == pytest.approx([3.0 - normal] * 2)
    assert second.logprob == 0.0
    assert second.likeliest == ((3, 0.0), (0, -1000.0))
    assert logprobs_of(logits[:1], [1], likeliest=0)[0].likeliest == ()
    assert len(logprobs_of(logits[:1], [1], likeliest=9)[0].likeliest) == 4
