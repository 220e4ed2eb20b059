"""Which nodes hold which experts, who of the holders runs a token's experts, and how busy the busiest node then is.

A node that holds more experts than its share has a choice to offer: where two nodes hold an expert, the one with less
to do runs it. How much that is worth depends on who holds what together, which the optimiser chooses.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, combinations
from math import comb, sqrt
from typing import NamedTuple

from moesched.errors import BadInput

Placement = tuple[frozenset[int], ...]
"""The experts that each node holds, the same in all layers."""

Holders = tuple[int, ...]
"""For each expert, the nodes that hold it, as a mask of bits; in ascending order where only their numbers matter."""

MOST_CASES = 50_000
"""Different ways in which experts may be chosen, up to which all are looked at."""
SAMPLES = 4_000
SEARCHED_CASES = 5_000
SEARCHED_SAMPLES = 500
"""The same for the optimiser, which looks at many placements."""
MOST_SPREAD = 8
"""Among how many nodes, those with the most room, a new expert's copies are spread."""
EFFORT = 6_000_000
"""What it spends on them: loads, each counted as the subsets of so many experts."""


ROWS_TO_READ = 64
"""About so many rows an expert takes no longer than for one, since its weights have to be read in any case."""


class Load(NamedTuple):
    """How many experts the busiest node runs for one token in one layer, on average under uniform routing.

    `error` is the standard error where choices were drawn; 0 where all were looked at.
    """

    experts: float
    error: float = 0.0


def mirrored(experts: int, nodes: int, parts: int = 2) -> Placement:
    """The cluster paper's placement: the experts in equal parts, each part on every so many-th node.

    Parts differ by one expert where their number does not divide; with nodes that it does not divide, the first parts
    are held once more than the others. There are no more parts than nodes.
    """
    parts = min(parts, nodes)
    bounds = [part * experts // parts for part in range(parts + 1)]
    return tuple(frozenset(range(bounds[n % parts], bounds[n % parts + 1])) for n in range(nodes))


def parts_for(experts: int, nodes: int, per_node: int) -> int:
    """Into how few parts the experts must be cut for a node to hold one.

    Raises:
        BadInput: the nodes together hold too few.
    """
    if per_node < 1 or nodes * per_node < experts:
        needed = -(-experts // nodes)
        raise BadInput(
            f"{nodes} nodes that hold {per_node} experts each cannot hold {experts}: "
            f"give memory for {needed}, or more nodes"
        )
    return min(nodes, -(-experts // per_node))


def assign(chosen: Iterable[int], placement: Placement) -> dict[int, int]:
    """Which holder runs each chosen expert, so that the busiest node runs as few as possible.

    The same on every node: experts find a place in ascending order, moving others on where that helps (a matching
    with capacities, found by augmenting paths).

    Raises:
        BadInput: nobody holds one of them.
    """
    experts = sorted(chosen)
    owners: dict[int, int] = {}
    running: list[set[int]] = [set() for _ in placement]
    capacity = -(-len(experts) // len(placement))
    holders = {expert: [n for n, held in enumerate(placement) if expert in held] for expert in experts}

    def found_place(expert: int, full: set[int]) -> bool:
        for node in sorted(holders[expert], key=lambda node: len(running[node])):
            if node in full:
                continue
            if len(running[node]) >= capacity:
                full.add(node)
                if not any(found_place(other, full) for other in sorted(running[node])):
                    continue
            if expert in owners:
                running[owners[expert]].discard(expert)
            owners[expert] = node
            running[node].add(expert)
            return True
        return False

    for expert in experts:
        if not holders[expert]:
            raise BadInput(f"no node holds expert {expert}: place every expert on one at least")
        while not found_place(expert, set()):
            capacity += 1
    return owners


def assign_by_rows(rows: Mapping[int, int], placement: Placement) -> dict[int, int]:
    """Which holder runs each expert, so that the busiest node has as few rows as possible; rows by expert.

    An expert counts as no fewer than `ROWS_TO_READ`. Where all count alike this is `assign`; otherwise experts go to
    the holder with the fewest rows, the largest first, and then from the busiest node on to others as long as that
    helps. The same on every node, whatever it is: machines' own figures may differ.
    """
    loads = {expert: max(count, ROWS_TO_READ) for expert, count in rows.items()}
    best = assign(loads, placement)
    if len(set(loads.values())) == 1:
        return best
    owners: dict[int, int] = {}
    busy = [0] * len(placement)
    for expert in sorted(loads, key=lambda each: (-loads[each], each)):
        holders = [node for node, held in enumerate(placement) if expert in held]
        owners[expert] = node = min(holders, key=busy.__getitem__)
        busy[node] += loads[expert]
    while move := _better_move(owners, busy, loads, placement):
        expert, node = move
        busy[owners[expert]] -= loads[expert]
        busy[node] += loads[expert]
        owners[expert] = node
    return min((best, owners), key=lambda each: _most_rows(each, loads))


def _better_move(
    owners: Mapping[int, int], busy: Sequence[int], loads: Mapping[int, int], placement: Placement
) -> tuple[int, int] | None:
    """An expert of the busiest node, and another holder that is less busy with it than that node was."""
    busiest_node = max(range(len(busy)), key=busy.__getitem__)
    for expert, owner in sorted(owners.items()):
        if owner == busiest_node:
            for node, held in enumerate(placement):
                if expert in held and busy[node] + loads[expert] < busy[busiest_node]:
                    return expert, node
    return None


def _most_rows(owners: Mapping[int, int], loads: Mapping[int, int]) -> int:
    rows: Counter[int] = Counter()
    for expert, node in owners.items():
        rows[node] += loads[expert]
    return max(rows.values())


def expected_load(placement: Placement, top_k: int, seed: int = 0) -> Load:
    """How many of a token's experts the busiest node runs, with the best assignment, under uniform routing.

    Exact: experts with the same holders are alike, and every way to choose among the sorts is looked at. Where these
    are too many, choices are drawn instead, and the error is stated.
    """
    holders = holders_of(placement)
    if cases(holders, top_k) <= MOST_CASES:
        return Load(_mean_load(holders, top_k))
    draw = random.Random(seed)
    loads = [busiest(draw.sample(holders, top_k)) for _ in range(SAMPLES)]
    mean = sum(loads) / SAMPLES
    variance = sum((load - mean) ** 2 for load in loads) / (SAMPLES - 1)
    return Load(mean, sqrt(variance / SAMPLES))


@lru_cache(maxsize=64)
def best_placement(experts: int, top_k: int, nodes: int, per_node: int) -> Placement:
    """The placement, as good as was found, with which the busiest node runs fewest experts for a token.

    A search from the authors' placement and from one that spreads copies evenly over groups of nodes: as long as there
    is one that is better, a copy on some node gives way to another expert's, or two nodes exchange two. Never worse
    than `mirrored`.

    Args:
        per_node: how many experts fit a node's memory.

    Raises:
        BadInput: the nodes together hold too few.
    """
    parts = parts_for(experts, nodes, per_node)
    per_node = min(per_node, experts)
    authors = holders_of(mirrored(experts, nodes, parts))
    starts = [_filled(authors, nodes, per_node), _spread(experts, nodes, per_node)]
    found = [*starts, *(_improved(tuple(sorted(start)), top_k, nodes) for start in starts)]
    placements = [_placement(holders, nodes) for holders in found]
    return min(placements, key=lambda placement: expected_load(placement, top_k))


def holders_of(placement: Placement) -> Holders:
    """For each expert, the mask of the nodes that hold it."""
    experts = max(chain.from_iterable(placement)) + 1
    return tuple(
        sum(1 << node for node, held in enumerate(placement) if expert in held) for expert in range(experts)
    )


def _placement(holders: Sequence[int], nodes: int) -> Placement:
    return tuple(
        frozenset(expert for expert, mask in enumerate(holders) if mask >> node & 1) for node in range(nodes)
    )


def busiest(chosen: Sequence[int]) -> int:
    """How many the busiest node runs at least of experts with these holders.

    Those that only so many nodes hold are shared out among these at best (Hall's theorem).
    """
    unions = [0]
    sizes = [0]
    most = 0
    for mask, count in Counter(chosen).items():
        for index in range(len(unions)):
            union, size = unions[index] | mask, sizes[index] + count
            unions.append(union)
            sizes.append(size)
            most = max(most, -(-size // union.bit_count()))
    return most


def cases(holders: Holders, top_k: int) -> int:
    """How many ways there are to choose among experts, if those with the same holders are alike."""
    ways = [1] + [0] * top_k
    for count in Counter(holders).values():
        ways = [sum(ways[k - taken] for taken in range(min(count, k) + 1)) for k in range(top_k + 1)]
    return ways[top_k]


_busiest = lru_cache(maxsize=1 << 18)(busiest)


def _mean_load(holders: Holders, top_k: int) -> float:
    alike = Counter(sorted(holders))
    total = sum(times * _busiest(chosen) for chosen, times in _choices(alike, top_k))
    return total / comb(len(holders), top_k)


def _choices(alike: Mapping[int, int], top_k: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every choice of holders, in order, and how many choices of experts it stands for."""
    found: list[tuple[tuple[int, ...], int]] = [((), 1)]
    left = sum(alike.values())
    for mask, count in alike.items():
        left -= count
        found = [
            (chosen + (mask,) * taken, times * comb(count, taken))
            for chosen, times in found
            for taken in range(max(0, top_k - len(chosen) - left), min(count, top_k - len(chosen)) + 1)
        ]
    return iter(found)


# -- the search ------------------------------------------------------------------------------------


def _searched_load(holders: Holders, top_k: int) -> float:
    """The load that the search compares: exact where that is quick, else of choices that are drawn alike for all."""
    if cases(holders, top_k) <= SEARCHED_CASES:
        return _mean_load(holders, top_k)
    draws = _draws(len(holders), top_k)
    return sum(_busiest(tuple(sorted(holders[e] for e in chosen))) for chosen in draws) / len(draws)


@lru_cache(maxsize=4)
def _draws(experts: int, top_k: int) -> list[list[int]]:
    draw = random.Random(0)
    return [draw.sample(range(experts), top_k) for _ in range(SEARCHED_SAMPLES)]


def _improved(holders: Holders, top_k: int, nodes: int) -> Holders:
    """The first better neighbour, again and again, until there is none."""
    least = -(-top_k // nodes)
    best, seen = _searched_load(holders, top_k), {holders}
    exact = cases(holders, top_k) <= SEARCHED_CASES
    most = EFFORT // (2**top_k * (cases(holders, top_k) if exact else SEARCHED_SAMPLES))
    improved = True
    while improved and best > least and len(seen) < most:
        improved = False
        for neighbour in _neighbours(holders):
            if neighbour in seen:
                continue
            seen.add(neighbour)
            load = _searched_load(neighbour, top_k)
            if load < best:
                holders, best, improved = neighbour, load, True
                break
            if len(seen) >= most:
                break
    return holders


def _neighbours(holders: Holders) -> Iterator[Holders]:
    """Placements that give each node as many experts, and differ in two experts' holders."""
    sorts = sorted(set(holders))
    for one, other in combinations(sorts, 2):
        only_one, only_other = one & ~other, other & ~one
        for first in _bits(only_one):
            if one != first:  # `first` gives up its copy of the one for a copy of the other
                yield _replaced(holders, one, one ^ first, other, other | first)
            for second in _bits(only_other):
                yield _replaced(holders, one, one ^ first | second, other, other ^ second | first)
        for second in _bits(only_other):
            if other != second:
                yield _replaced(holders, one, one | second, other, other ^ second)


def _replaced(holders: Holders, one: int, new_one: int, other: int, new_other: int) -> Holders:
    changed = list(holders)
    changed.remove(one)
    changed.remove(other)
    return tuple(sorted([*changed, new_one, new_other]))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest


def _filled(holders: Holders, nodes: int, per_node: int) -> list[int]:
    """The same, with the room that is left on the nodes used: for the experts with the fewest copies."""
    filled = list(holders)
    for node in range(nodes):
        held = sum(mask >> node & 1 for mask in filled)
        absent = sorted((m.bit_count(), e) for e, m in enumerate(filled) if not m >> node & 1)
        for _, expert in absent[: per_node - held]:
            filled[expert] |= 1 << node
    return filled


def _spread(experts: int, nodes: int, per_node: int) -> list[int]:
    """Copies shared out evenly: each expert's go to the nodes with the most room, among these to a new group."""
    room = [per_node] * nodes
    groups: Counter[int] = Counter()
    slots = nodes * per_node
    holders = []
    for expert in range(experts):
        copies = min(nodes, (expert + 1) * slots // experts - expert * slots // experts)
        roomy = sorted((n for n in range(nodes) if room[n]), key=lambda n: -room[n])
        candidates = combinations(sorted(roomy[:MOST_SPREAD]), min(copies, len(roomy), MOST_SPREAD))
        group = min(
            (sum(1 << node for node in candidate) for candidate in candidates),
            key=lambda mask: (groups[mask], -sum(room[n] for n in range(nodes) if mask >> n & 1)),
        )
        for node in range(nodes):
            room[node] -= group >> node & 1
        groups[group] += 1
        holders.append(group)
    return _filled(tuple(holders), nodes, per_node)
