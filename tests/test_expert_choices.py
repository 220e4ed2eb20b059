"""Seeded expert choices: as popular as they should be, the same for every schedule, and like the paper's."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.shapes import SHAPES
from moesched.requests.batch import split_batch
from moesched.routing import SeededRouting
from moesched.routing.choices import BatchRouting
from moesched.routing.generated import GeneratedChoices
from moesched.routing.popularity import GENERATORS, LikeMixtral, Uniform, Zipf, expected_profile, shares_of
from moesched.routing.sources import find_choices, find_profile
from moesched.routing.statistics import statistics_of

MIXTRAL = SHAPES["mixtral-8x7b"]
TOKENS = 20_000


def shaped(layers: int, experts: int, top_k: int) -> ModelConfig:
    return MIXTRAL.varied(layers=layers, experts=experts, top_k=top_k)


def tokens_of(requests: int, length: int) -> tuple[Any, Any]:
    """Requests and positions of all tokens of some requests of one length."""
    return np.repeat(np.arange(requests), length), np.tile(np.arange(length), requests)


def shares_drawn(choices: GeneratedChoices, layer: int, length: int = 100) -> Any:
    chosen = choices.of_tokens(layer, *tokens_of(TOKENS // length, length))
    return np.bincount(chosen.ravel(), minlength=choices.experts) / TOKENS


# -- popularity


@pytest.mark.parametrize("seed", [0, 1, 2, 77, -3])
def test_popularity_has_every_figure_of_the_paper(seed: int) -> None:
    profile = expected_profile(LikeMixtral(), MIXTRAL, seed, 1_000_000)
    found = statistics_of(profile, [56, 125])
    figures = (found.mean, found.deviation, found.minimum, found.lower_quartile, found.upper_quartile)
    assert [f"{figure:.2f}" for figure in figures] == ["0.71", "0.08", "0.22", "0.67", "0.76"]
    rates = [
        [f"{100 * rate:.1f}" for rate in (each.best, each.worst, each.random)] for each in found.hit_rates
    ]
    assert rates == [["25.2", "18.7", "21.9"], ["53.0", "44.6", "48.8"]]
    popularity = np.array(profile.counts) / np.max(profile.counts)
    assert (np.sum(popularity < 0.6), np.sum(popularity > 0.8)) == (15, 27)


@pytest.mark.parametrize("shape", ["mixtral-8x22b", "dbrx", "mixtral-0.8b"])
def test_another_shape_is_as_uneven(shape: str) -> None:
    found = statistics_of(expected_profile(LikeMixtral(), SHAPES[shape], 0, 1_000_000))
    assert found.mean == pytest.approx(0.71, abs=0.02)
    assert found.deviation == pytest.approx(0.08, abs=0.02)


def test_zipf_falls_with_the_rank() -> None:
    weights = np.sort(Zipf(exponent=2.0).weights(3, 4, seed=1), axis=1)[:, ::-1]
    assert weights == pytest.approx(np.tile([1, 1 / 4, 1 / 9, 1 / 16], (3, 1)))
    assert (Zipf(exponent=0.0).weights(3, 4, seed=1) == Uniform().weights(3, 4, seed=1)).all()
    first, same, other = (LikeMixtral().weights(4, 8, seed) for seed in (1, 1, 2))
    assert (first == same).all()
    assert (first != other).any(), "which experts are popular depends on the seed"


def test_an_expert_gets_at_most_every_token_and_the_others_share_the_rest() -> None:
    shares = shares_of(np.array([[100.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]), 2)
    assert shares == pytest.approx(np.array([[1, 0.5, 0.25, 0.25], [0.5, 0.5, 0.5, 0.5]]))
    with pytest.raises(BadInput, match="1 experts of layer 1 are ever chosen, but each token takes 2"):
        shares_of(np.array([[1.0, 1.0], [0.0, 3.0]]), 2)


# -- choices


@given(
    layers=st.integers(1, 3),
    experts=st.integers(1, 130),
    share=st.floats(0, 1),
    name=st.sampled_from(sorted(GENERATORS)),
    locality=st.sampled_from([0.0, 0.9]),
    seed=st.integers(-9, 2**64),
)
def test_every_token_takes_as_many_different_experts_as_it_should(
    layers: int, experts: int, share: float, name: str, locality: float, seed: int
) -> None:
    config = shaped(layers, experts, 1 + round(share * (experts - 1)))
    choices = GeneratedChoices(GENERATORS[name](locality=locality), config, seed)
    chosen = choices.of_tokens(layers - 1, *tokens_of(3, 40))
    assert chosen.shape == (120, config.routed.top_k)
    assert (np.diff(chosen, axis=1) > 0).all()
    assert chosen.min() >= 0
    assert chosen.max() < experts


@pytest.mark.parametrize("locality", [0.0, 0.8])
@pytest.mark.parametrize("generator", [Uniform, LikeMixtral, Zipf])
def test_experts_get_their_shares(generator: Any, locality: float) -> None:
    popularity = generator(locality=locality)
    shares = shares_of(popularity.weights(32, 8, 5), 2)
    drawn = shares_drawn(GeneratedChoices(popularity, MIXTRAL, 5), layer=7)
    assert drawn == pytest.approx(shares[7], abs=0.03)


def test_all_experts_go_together() -> None:
    chosen = GeneratedChoices(Uniform(), MIXTRAL).of_tokens(0, *tokens_of(200, 100))
    pairs = {tuple(pair) for pair in chosen.tolist()}
    assert len(pairs) == 8 * 7 // 2


@pytest.mark.parametrize("locality", [0.3, 0.8])
def test_a_token_repeats_the_experts_of_the_one_before_as_often_as_was_asked(locality: float) -> None:
    plain, local = (GeneratedChoices(Uniform(locality=each), MIXTRAL) for each in (0.0, locality))
    requests, positions = tokens_of(200, 100)
    follows = positions[1:] > 0

    def repeated(choices: GeneratedChoices) -> float:
        chosen = choices.of_tokens(3, requests, positions)
        return float((chosen[1:] == chosen[:-1]).all(axis=1)[follows].mean())

    chance = repeated(plain)
    assert repeated(local) == pytest.approx(locality + (1 - locality) * chance, abs=0.02)


def test_a_request_does_not_go_on_with_the_experts_of_another() -> None:
    choices = GeneratedChoices(Uniform(locality=0.99), MIXTRAL)
    first = choices.of_tokens(0, np.arange(500), np.zeros(500, int))
    assert len(np.unique(first, axis=0)) == 28


@pytest.mark.parametrize("locality", [0.0, 0.7])
def test_a_tokens_experts_depend_on_its_place_layer_and_seed_alone(locality: float) -> None:
    popularity = LikeMixtral(locality=locality)
    choices = GeneratedChoices(popularity, MIXTRAL, seed=3)
    requests, positions = tokens_of(5, 40)
    chosen = choices.of_tokens(2, requests, positions)
    order = np.random.default_rng(0).permutation(200)
    assert (choices.of_tokens(2, requests[order], positions[order]) == chosen[order]).all()
    assert (choices.of_tokens(2, requests[7:8], positions[7:8]) == chosen[7:8]).all()
    assert (choices.of_tokens(1, requests, positions) != chosen).any()
    assert (GeneratedChoices(popularity, MIXTRAL, seed=4).of_tokens(2, requests, positions) != chosen).any()


# -- as the routing of a batch


@pytest.mark.parametrize("step", [0, 1, 6])
def test_micro_batches_do_not_change_what_is_chosen(step: int) -> None:
    choices = GeneratedChoices(LikeMixtral(locality=0.5), MIXTRAL)
    prompts = [5, 1, 9, 4, 4]
    counted = []
    for size in (1, 2, 5):
        batch = split_batch(prompts, 8, size)
        routing = BatchRouting(choices, batch)
        total = np.zeros(8, int)
        for micro_batch, requests in enumerate(batch.micro_batches):
            tokens = sum(prompts[each] for each in requests) if step == 0 else len(requests)
            for expert, count in routing.choose(step, 3, micro_batch, tokens).items():
                total[expert] += count
        counted.append(total.tolist())
    assert counted[0] == counted[1] == counted[2]
    assert sum(counted[0]) == 2 * (sum(prompts) if step == 0 else len(prompts))


def test_a_later_batch_has_requests_of_its_own_and_a_step_of_other_tokens_is_refused() -> None:
    choices = GeneratedChoices(LikeMixtral(), MIXTRAL)
    first, second = (BatchRouting(choices, split_batch([50], 2, 1, begin)) for begin in (0, 1))
    assert first.choose(0, 0, 0, 50) != second.choose(0, 0, 0, 50)
    with pytest.raises(ValueError, match="step 1 of mb0 has 1 tokens, not 3"):
        first.choose(1, 0, 0, 3)
    counts = first.choose(1, 0, 0, 1)
    assert list(counts) == sorted(counts), "in ascending order, and only those chosen"
    assert list(counts.values()) == [1, 1]


def test_each_beam_takes_experts_of_its_own() -> None:
    choices = GeneratedChoices(Uniform(), MIXTRAL)
    batch = msgspec.structs.replace(split_batch([5, 3], 4, 2), beams=3)
    routing = BatchRouting(choices, batch)
    assert sum(routing.choose(0, 0, 0, 8).values()) == 8 * MIXTRAL.routed.top_k
    drawn = choices.of_tokens(1, np.arange(6), np.array([6, 6, 6, 4, 4, 4]))
    counts = np.bincount(drawn.ravel(), minlength=MIXTRAL.routed.experts)
    assert routing.choose(2, 1, 0, 6) == {expert: n for expert, n in enumerate(counts) if n}
    assert len({tuple(row) for row in drawn[:3]}) > 1


# -- by name


def test_a_generator_is_found_by_its_name_with_its_settings() -> None:
    choices = find_choices("zipf", MIXTRAL, {"exponent": 2, "locality": 0.5}, seed=1)
    assert isinstance(choices, GeneratedChoices)
    assert choices.locality == 0.5
    assert statistics_of(find_profile("uniform", MIXTRAL)).deviation == 0


# -- routing without a router ------------------------------------------------------------------------------------------


@given(experts=st.integers(1, 16), share=st.floats(0, 1), tokens=st.integers(1, 200), seed=st.integers(-9, 9))
def test_a_seeded_routing_gives_every_token_as_many_different_experts(
    experts: int, share: float, tokens: int, seed: int
) -> None:
    top_k = 1 + round(share * (experts - 1))
    chosen = SeededRouting(experts, top_k, seed).choose(0, 1, 2, tokens)
    assert sum(chosen.values()) == tokens * top_k
    assert max(chosen.values()) <= tokens
    assert list(chosen) == sorted(chosen)
    assert set(chosen) <= set(range(experts))


def test_the_choice_depends_on_the_place_and_the_seed_alone() -> None:
    routing = SeededRouting(8, 2, seed=3)
    first = routing.choose(1, 2, 3, 100)
    routing.choose(5, 5, 5, 7)
    assert routing.choose(1, 2, 3, 100) == first
    others = [(0, 2, 3), (1, 0, 3), (1, 2, 0)]
    assert all(routing.choose(*place, 100) != first for place in others)
    assert SeededRouting(8, 2, seed=4).choose(1, 2, 3, 100) != first


def test_experts_are_equally_popular() -> None:
    counts = SeededRouting(8, 2).choose(0, 0, 0, 40_000)
    assert all(abs(count - 10_000) < 500 for count in counts.values())
