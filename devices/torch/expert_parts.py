"""One expert on rows of one or several micro-batches, with the bits that each micro-batch's rows have by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from moesched.models.footprint import EXPERT_TILE

from ..products.linear import Blocks, Tensor, Weights
from ..products.products import Products


class Part(NamedTuple):
    """The rows of an expert that a task has in one micro-batch.

    Attributes:
        x_nD, y_nD: the micro-batch's input and output rows, of all experts.
        rows: those of the expert.
        wanted: those of them that the task has.
    """

    x_nD: Tensor
    y_nD: Tensor
    rows: range
    wanted: range

    @property
    def input(self) -> Tensor:
        """The expert's input rows."""
        return self.x_nD[self.rows.start : self.rows.stop]


def tiles_of(rows: range, wanted: range) -> Iterator[tuple[slice, slice | None]]:
    """The tiles of an expert's rows that have wanted ones, and where in the tile these are; None for all of it.

    Tiles are computed whole: the last bits of a product depend on how many rows it has, and where.
    """
    for start in rows[::EXPERT_TILE]:
        stop = min(start + EXPERT_TILE, rows.stop)
        if wanted.start <= start and stop <= wanted.stop:
            yield slice(start, stop), None
        elif wanted.start < stop and start < wanted.stop:
            kept = slice(max(0, wanted.start - start), min(stop, wanted.stop) - start)
            yield slice(start, stop), kept


def expert_weights(weights: Weights, expert: int) -> Sequence[Blocks]:
    """The three matrices of one expert: gate, up, down."""
    return [weights[f"experts.{expert}.{part}"] for part in ("gate", "up", "down")]


def apply_expert(part: Part, expert: int, weights: Weights, products: Products) -> None:
    """Run an expert on the wanted rows of x, and write its outputs to the same rows of y."""
    x_nD, y_nD, rows, wanted = part
    gate, up, down = expert_weights(weights, expert)
    for tile, kept in tiles_of(rows, wanted):
        outputs_nD = y_nD[tile] if kept is None else y_nD[tile][kept]
        products.expert_into(outputs_nD, x_nD[tile], gate, up, down, kept)


def apply_to_each(
    parts: Sequence[Part],
    expert: int,
    weights: Weights,
    products: Products,
    use_cores_for: Callable[[int], object],
) -> None:
    """Run an expert on its parts of one micro-batch, or on all rows of several, each as if it ran alone.

    Rows that go to the kernel go there together: their bits depend on no other row, and the weights are read once.

    use_cores_for: sets the number of cores for a number of rows.
    """
    few: list[Part] = []
    for part in parts:
        fits = len(parts) > 1 and len(part.rows) <= EXPERT_TILE
        if fits and products.by_kernel(part.input, *expert_weights(weights, expert)):
            few.append(part)
        else:
            use_cores_for(len(part.rows))
            apply_expert(part, expert, weights, products)
    for group in _groups(few, min(products.most_rows, EXPERT_TILE)):
        if len(group) == 1:
            apply_expert(group[0], expert, weights, products)
            continue
        gate, up, down = expert_weights(weights, expert)
        y_nD = products.expert(torch.cat([part.input for part in group]), gate, up, down)
        for part, output_nD in zip(group, y_nD.split([len(part.rows) for part in group]), strict=True):
            part.y_nD[part.rows.start : part.rows.stop] = output_nD


def _groups(parts: Sequence[Part], most: int) -> Iterator[list[Part]]:
    """The parts in their order, in groups of at most that many rows."""
    group: list[Part] = []
    for part in parts:
        if group and sum(len(each.rows) for each in group) + len(part.rows) > most:
            yield group
            group = []
        group.append(part)
    if group:
        yield group
