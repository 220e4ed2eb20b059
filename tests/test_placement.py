"""Placements of experts over nodes: the authors', the best assignment, the busiest node's load, and the optimiser."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.dispatch.node_placement import (
    Placement,
    assign,
    best_placement,
    busiest,
    expected_load,
    holders_of,
    mirrored,
    parts_for,
)
from moesched.errors import BadInput


def held_by_all(placement: Placement) -> set[int]:
    return set(itertools.chain.from_iterable(placement))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Up to 10 experts on up to 5 nodes, each held somewhere."""
    nodes = draw(st.integers(1, 5))
    masks = draw(st.lists(st.integers(1, 2**nodes - 1), min_size=1, max_size=10))
    return tuple(frozenset(e for e, mask in enumerate(masks) if mask >> node & 1) for node in range(nodes))


def least_busiest(chosen: list[int], placement: Placement) -> int:
    """By trying every assignment."""
    holders = [[n for n, held in enumerate(placement) if expert in held] for expert in chosen]
    return min(max(Counter(owners).values()) for owners in itertools.product(*holders))


def test_two_nodes_hold_a_half_each() -> None:
    assert mirrored(16, 2) == (frozenset(range(8)), frozenset(range(8, 16)))


def test_three_nodes_hold_one_half_twice() -> None:
    first, second, third = mirrored(16, 3)
    assert first == third
    assert not first & second


@pytest.mark.parametrize(
    ("experts", "nodes", "parts"), [(7, 2, 2), (7, 3, 3), (5, 4, 2), (3, 5, 5), (9, 1, 2)]
)
def test_parts_that_do_not_divide_differ_by_one_expert(experts: int, nodes: int, parts: int) -> None:
    placement = mirrored(experts, nodes, parts)
    assert len(placement) == nodes
    assert held_by_all(placement) == set(range(experts))
    sizes = [len(held) for held in placement]
    assert max(sizes) - min(sizes) <= 1


@given(placements(), st.randoms(use_true_random=False))
def test_the_best_assignment_is_found(placement: Placement, draw: random.Random) -> None:
    experts = sorted(held_by_all(placement))
    chosen = draw.sample(experts, min(len(experts), 5))
    owners = assign(chosen, placement)
    assert owners.keys() == set(chosen)
    assert all(expert in placement[node] for expert, node in owners.items())
    least = least_busiest(chosen, placement)
    assert max(Counter(owners.values()).values()) == least
    assert busiest([holders_of(placement)[expert] for expert in chosen]) == least


@given(placements())
def test_the_order_of_the_chosen_experts_changes_nothing(placement: Placement) -> None:
    chosen = sorted(held_by_all(placement))
    assert assign(chosen, placement) == assign(chosen[::-1], placement)


def test_an_expert_that_nobody_holds_is_refused() -> None:
    with pytest.raises(BadInput, match="no node holds expert 3: place every expert on one at least"):
        assign([0, 3], mirrored(2, 2))


@pytest.mark.parametrize(
    ("nodes", "load"), [(1, 4), (2, 2.646), (3, 2.323), (4, 1.569), (6, 1.077), (8, 1.0)]
)
def test_loads_of_the_authors_placement_are_the_papers(nodes: int, load: float) -> None:
    assert expected_load(mirrored(16, nodes), 4).experts == pytest.approx(load, abs=5e-4)


@given(placements(), st.integers(1, 4))
def test_the_load_is_the_mean_over_all_choices(placement: Placement, top_k: int) -> None:
    experts = sorted(held_by_all(placement))
    top_k = min(top_k, len(experts))
    loads = [least_busiest(list(chosen), placement) for chosen in itertools.combinations(experts, top_k)]
    assert expected_load(placement, top_k).experts == pytest.approx(sum(loads) / len(loads))


def test_where_there_are_too_many_choices_the_load_is_drawn_and_states_its_error() -> None:
    draw = random.Random(0)
    nodes = [frozenset(draw.sample(range(64), 32)) for _ in range(8)]
    placement = (*nodes, frozenset(range(64)) - frozenset().union(*nodes) | {0})
    drawn = expected_load(placement, 6)
    again = expected_load(placement, 6, seed=1)
    assert 0 < drawn.error < 0.02
    assert drawn != again
    assert drawn.experts == pytest.approx(again.experts, abs=5 * (drawn.error + again.error))


@pytest.mark.parametrize(("nodes", "bar"), [(4, 1.1605), (3, 2.02)])
def test_the_optimiser_reaches_the_best_known_loads(nodes: int, bar: float) -> None:
    placement = best_placement(16, 4, nodes, 8)
    assert [len(held) for held in placement] == [8] * nodes
    assert expected_load(placement, 4).experts <= bar


def test_the_best_pairs_of_four_nodes_share_three_experts_and_two_on_complementary_pairs() -> None:
    placement = best_placement(16, 4, 4, 8)
    shared = {
        pair: len(placement[pair[0]] & placement[pair[1]]) for pair in itertools.combinations(range(4), 2)
    }
    assert sorted(shared.values()) == [2, 2, 3, 3, 3, 3]
    [one, other] = [set(pair) for pair, count in shared.items() if count == 2]
    assert not one & other


@pytest.mark.parametrize(
    ("experts", "top_k", "nodes", "per_node"),
    [(16, 4, 2, 8), (16, 4, 3, 6), (8, 2, 3, 4), (7, 2, 3, 5), (8, 2, 2, 8), (8, 2, 4, 2), (64, 8, 4, 24)],
)  # fmt: skip
def test_the_optimiser_is_never_worse_than_the_authors(
    experts: int, top_k: int, nodes: int, per_node: int
) -> None:
    placement = best_placement(experts, top_k, nodes, per_node)
    assert held_by_all(placement) == set(range(experts))
    assert max(map(len, placement)) <= per_node
    authors = mirrored(experts, nodes, parts_for(experts, nodes, per_node))
    assert expected_load(placement, top_k) <= expected_load(authors, top_k)


def test_too_little_memory_for_all_experts_is_refused_with_what_it_takes() -> None:
    with pytest.raises(BadInput, match="3 nodes that hold 5 experts each cannot hold 16: give memory for 6"):
        best_placement(16, 4, 3, 5)
