"""Places experts on nodes, assigns chosen experts to nodes that hold them, and computes the busiest node's load.

If nodes have room for more than their shares of the experts, some experts are on several nodes. Each of these experts
runs on the least loaded of its nodes. The gain depends on which experts share a node; `best_placement` optimises this.
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
"""For each node, the experts that it holds in every layer."""

Holders = tuple[int, ...]
"""For each expert, a bit mask of the nodes that hold it; sorted if it does not matter which expert is which."""

MOST_CASES = 50_000
"""Up to this number of distinct choices of experts, the load is computed from all; above it, from a sample."""
SAMPLES = 4_000
SEARCHED_CASES = 5_000
SEARCHED_SAMPLES = 500
"""The same two limits for the optimiser; they are smaller, since the optimiser evaluates many placements."""
MOST_SPREAD = 8
"""Copies of an expert are spread over at most this number of nodes."""
EFFORT = 6_000_000
"""Limit of the optimiser's work, in subsets: to evaluate a choice of `top_k` experts, it visits all subsets of it."""
ROWS_TO_READ = 64
"""Up to about this number of rows, an expert takes as long as for one row: reading its weights dominates."""


class Load(NamedTuple):
    """Mean number of experts that the busiest node runs per token and layer, if all experts are equally likely.

    `error` is the standard error if the mean was estimated from a random sample; 0 if the mean is exact.
    """

    experts: float
    error: float = 0.0


def mirrored(experts: int, nodes: int, parts: int = 2) -> Placement:
    """Return the experts of each node in the placement of the Apple silicon cluster paper.

    Expert ids are cut into `parts` ranges, or into one range per node if there are fewer nodes. Node n holds range n
    modulo the number of ranges. If experts do not divide evenly, some ranges have one expert more than others. If nodes
    do not divide evenly, each of the first ranges is on one node more than each of the others.
    """
    parts = min(parts, nodes)
    bounds = [part * experts // parts for part in range(parts + 1)]
    return tuple(frozenset(range(bounds[n % parts], bounds[n % parts + 1])) for n in range(nodes))


def parts_for(experts: int, nodes: int, per_node: int) -> int:
    """Return the smallest number of `parts` for `mirrored` with which one part fits on a node.

    per_node: number of experts per layer that fit on a node.

    Raises:
        BadInput: the nodes together cannot hold all experts.
    """
    if per_node < 1 or nodes * per_node < experts:
        needed = -(-experts // nodes)
        raise BadInput(
            f"{nodes} nodes that hold {per_node} experts each cannot hold {experts}: "
            f"give memory for {needed}, or more nodes"
        )
    return min(nodes, -(-experts // per_node))


def assign(chosen: Iterable[int], placement: Placement) -> dict[int, int]:
    """Return the node that runs each chosen expert, such that the busiest node runs as few experts as possible.

    The assignment is a bipartite matching with capacities, found by augmenting paths in ascending order of experts, so
    that every node computes the same assignment.

    placement: the experts that each node holds.

    Raises:
        BadInput: no node holds one of the experts.
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
    """Return the node that runs each expert, such that the busiest node has few rows (tokens) to compute.

    An expert counts as at least `ROWS_TO_READ` rows, since with fewer rows it takes just as long. If all experts count
    as equally many rows, the result is that of `assign`, which counts experts. Otherwise each expert, those with the
    most rows first, goes to the node that holds it and has the fewest rows; then experts move off the busiest node
    while that helps. The result of `assign` is kept if its busiest node has no more rows. The result depends on routing
    and placement alone, so every node computes the same one.

    Args:
        rows: number of rows of each expert.
        placement: the experts that each node holds.
    """
    loads = {expert: max(count, ROWS_TO_READ) for expert, count in rows.items()}
    best = assign(loads, placement)
    if len(set(loads.values())) <= 1:
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
    """Return an expert to move off the busiest node, and the node to move it to; None if no move helps.

    The new node holds the expert, and afterwards has less load than the busiest node had before.

    Args:
        owners: the node that runs each expert.
        busy: load of each node, in rows.
        loads: load of each expert, in rows.
        placement: the experts that each node holds.
    """
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
    """Return the mean number of experts that the busiest node runs per token, if all experts are equally likely.

    Chosen experts are assigned to nodes in the best way. The mean is exact if there are at most `MOST_CASES` distinct
    choices of experts, where experts on the same nodes count as equal. Otherwise the mean is over `SAMPLES` random
    choices.

    Args:
        placement: the experts that each node holds.
        top_k: number of experts that a token chooses.
        seed: seed of the random choices.
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
    """Search for the placement of experts on nodes that minimises `expected_load`.

    Two local searches start from the placement `mirrored`, and from one that spreads copies evenly over groups of
    nodes. A move replaces one copy on a node by a copy of another expert, or swaps two copies between nodes. The result
    is never worse than `mirrored`.

    Args:
        top_k: number of experts that a token chooses.
        per_node: number of experts per layer that fit on a node.

    Raises:
        BadInput: the nodes together cannot hold all experts.
    """
    parts = parts_for(experts, nodes, per_node)
    per_node = min(per_node, experts)
    authors = holders_of(mirrored(experts, nodes, parts))
    starts = [_filled(authors, nodes, per_node), _spread(experts, nodes, per_node)]
    found = [*starts, *(_improved(tuple(sorted(start)), top_k, nodes) for start in starts)]
    placements = [_placement(holders, nodes) for holders in found]
    return min(placements, key=lambda placement: expected_load(placement, top_k))


def holders_of(placement: Placement) -> Holders:
    """Return, for each expert of a placement, the bit mask of the nodes that hold the expert."""
    experts = max(chain.from_iterable(placement)) + 1
    return tuple(
        sum(1 << node for node, held in enumerate(placement) if expert in held) for expert in range(experts)
    )


def _placement(holders: Sequence[int], nodes: int) -> Placement:
    return tuple(
        frozenset(expert for expert, mask in enumerate(holders) if mask >> node & 1) for node in range(nodes)
    )


def busiest(chosen: Sequence[int]) -> int:
    """Return the load of the busiest node, in experts, if chosen experts are assigned to nodes in the best way.

    Take any set of the chosen experts: only the nodes that hold an expert of the set can run experts of the set. So one
    of these nodes runs at least the set's size divided by the number of these nodes, rounded up. By Hall's theorem, the
    load of the busiest node is the largest such quotient over all sets.

    chosen: for each chosen expert, a bit mask of the nodes that hold the expert.
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
    """Return the number of distinct choices of `top_k` experts, where experts on the same nodes count as equal.

    holders: for each expert, a bit mask of the nodes that hold the expert.
    """
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
    """Yield every distinct choice of `top_k` experts, where experts on the same nodes count as equal.

    alike: for each bit mask of nodes, the number of experts that exactly these nodes hold.

    Yields:
        (bit masks of the chosen experts, number of choices of experts that have these masks).
    """
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
    """Return the mean number of experts that the busiest node runs per token, for the search to compare placements.

    The mean is exact if there are few distinct choices of experts, else over a fixed random sample of choices.

    holders: the placement: for each expert, a bit mask of the nodes that hold the expert.
    """
    if cases(holders, top_k) <= SEARCHED_CASES:
        return _mean_load(holders, top_k)
    draws = _draws(len(holders), top_k)
    return sum(_busiest(tuple(sorted(holders[e] for e in chosen))) for chosen in draws) / len(draws)


@lru_cache(maxsize=4)
def _draws(experts: int, top_k: int) -> list[list[int]]:
    draw = random.Random(0)
    return [draw.sample(range(experts), top_k) for _ in range(SEARCHED_SAMPLES)]


def _improved(holders: Holders, top_k: int, nodes: int) -> Holders:
    """Improve a placement by a local search, and return the result.

    Each step makes the first move that lowers the expected load of the busiest node. The search ends if no move does,
    or if its work exceeds `EFFORT`.
    """
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
    """Yield the placements one move away from `holders`; a move keeps each node's number of experts.

    In a move, one node replaces a copy of an expert by a copy of another expert, or two nodes swap two of their copies.

    holders: for each expert, a bit mask of the nodes that hold the expert.
    """
    for one, other in combinations(sorted(set(holders)), 2):
        only_one, only_other = one & ~other, other & ~one
        for first in _bits(only_one):
            if one != first:  # node `first` replaces its copy of the one expert by a copy of the other
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
    """Return `holders` with each node's free room filled by copies of the experts that have the fewest copies.

    Placements are given as a bit mask of nodes for each expert.
    """
    filled = list(holders)
    for node in range(nodes):
        held = sum(mask >> node & 1 for mask in filled)
        absent = sorted((m.bit_count(), e) for e, m in enumerate(filled) if not m >> node & 1)
        for _, expert in absent[: per_node - held]:
            filled[expert] |= 1 << node
    return filled


def _spread(experts: int, nodes: int, per_node: int) -> list[int]:
    """Return a placement whose copies are spread evenly, as a bit mask of the nodes that hold each expert.

    Each expert in turn gets a group of nodes, one node for each of its copies, out of the `MOST_SPREAD` nodes with the
    most free room. Of all such groups, it gets the one that the fewest earlier experts got; if several are equal in
    this, the one with the most free room.
    """
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
