"""Runs an expert on rows of several micro-batches; results have the same bits as for each micro-batch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from moesched.models.config import ModelConfig
from moesched.models.footprint import EXPERT_TILE

from ..kernels.binder import Binder
from ..kernels.layer_weights import Weights
from ..kernels.seam import Bound, Kernel
from ..products.linear import Tensor


class ExpertPart(NamedTuple):
    """The rows of one micro-batch that a task computes with an expert.

    Attributes:
        x_nD, y_nD: the micro-batch's input and output rows of all experts; the task writes to y_nD.
        rows: the range of this expert's rows in x_nD and y_nD.
        wanted: the part of `rows` that the task computes.
    """

    x_nD: Tensor
    y_nD: Tensor
    rows: range
    wanted: range

    @property
    def input(self) -> Tensor:
        """All input rows that the micro-batch has for the expert; the task may compute only some of them."""
        return self.x_nD[self.rows.start : self.rows.stop]


def tiles_of(rows: range, wanted: range) -> Iterator[tuple[slice, slice | None]]:
    """Yield the tiles of an expert's rows that contain wanted rows.

    Tiles are computed whole, because the last bits of a product may depend on its number of rows.

    Args:
        rows: range of the expert's rows.
        wanted: the part of `rows` whose outputs are needed.

    Returns:
        pairs: the tile, as a slice of the rows of all experts; and the wanted rows, as a slice of the tile, or None if
        all rows of the tile are wanted.
    """
    for start in rows[::EXPERT_TILE]:
        stop = min(start + EXPERT_TILE, rows.stop)
        if wanted.start <= start and stop <= wanted.stop:
            yield slice(start, stop), None
        elif wanted.start < stop and start < wanted.stop:
            kept = slice(max(0, wanted.start - start), min(stop, wanted.stop) - start)
            yield slice(start, stop), kept


class ExpertRunner:
    """Runs experts on rows of micro-batches.

    Args:
        kernels: binds the kernel for an expert to its weights.
        use_cores_for: a function that sets torch's number of cores for a product, given the number of rows and the
            number of entries of the matrix.
        on_host: whether the rows are in the host's memory although the accelerator has a memory of its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Binder,
        use_cores_for: Callable[[int, int], object],
        *,
        on_host: bool = False,
    ) -> None:
        self._hidden = config.hidden
        self._use_cores_for = use_cores_for
        self._kernels = kernels
        self._on_host = on_host

    def apply(self, parts: Sequence[ExpertPart], expert: int | None, weights: Weights) -> None:
        """Run an expert on rows of one or several micro-batches, and write the outputs to each part's `y_nD`.

        Each micro-batch's outputs have the same bits as if the expert ran on this micro-batch alone. A kernel that
        computes each row independently of others computes several parts in one call, which reads the weights once.

        Args:
            parts: the rows of each micro-batch.
            expert: the expert's number; None for the shared expert.
            weights: the weights of the layer.
        """
        few: list[ExpertPart] = []
        for part in parts:
            if (
                len(parts) > 1
                and len(part.rows) <= EXPERT_TILE
                and self._kernel(expert, len(part.rows), weights).independent
            ):
                few.append(part)
            else:
                self._use_cores_for(len(part.rows), self._size(expert, weights))
                self.apply_part(part, expert, weights)
        for group in self._groups(few, expert, weights):
            if len(group) == 1:
                self.apply_part(group[0], expert, weights)
                continue
            x_nD = torch.cat([part.input for part in group])
            y_nD = torch.empty_like(x_nD)
            self._bound(expert, len(x_nD), weights)[1](x_nD, y_nD)
            for part, output_nD in zip(group, y_nD.split([len(part.rows) for part in group]), strict=True):
                part.y_nD[part.rows.start : part.rows.stop] = output_nD

    def apply_part(self, part: ExpertPart, expert: int | None, weights: Weights) -> None:
        """Run an expert of a layer on the wanted rows of `part.x_nD`; outputs go to the same rows of `part.y_nD`."""
        x_nD, y_nD, rows, wanted = part
        for tile, kept in tiles_of(rows, wanted):
            kernel, run = self._bound(expert, tile.stop - tile.start, weights)
            if kept is None:
                run(x_nD[tile], y_nD[tile])
            elif kernel.independent:
                run(x_nD[tile][kept], y_nD[tile][kept])
            else:
                whole_nD = torch.empty_like(x_nD[tile])
                run(x_nD[tile], whole_nD)
                y_nD[tile][kept] = whole_nD[kept]

    def _size(self, expert: int | None, weights: Weights) -> int:
        """Return the number of entries of one of an expert's matrices; `expert` None stands for the shared expert."""
        assert weights.layer is not None, "an expert is in a layer"
        network = weights.layer.feed_forward
        return self._hidden * (network.shared if expert is None else network.intermediate)

    def _bound(self, expert: int | None, rows: int, weights: Weights) -> tuple[Kernel, Bound]:
        return self._kernels.expert(weights, expert, rows, on_host=self._on_host)

    def _kernel(self, expert: int | None, rows: int, weights: Weights) -> Kernel:
        return self._bound(expert, rows, weights)[0]

    def _groups(
        self, parts: Sequence[ExpertPart], expert: int | None, weights: Weights
    ) -> Iterator[list[ExpertPart]]:
        """Yield groups of neighbouring parts for which one call gives the same bits as a call for each part.

        Args:
            expert: the expert's number; None for the shared expert.
            weights: the weights of the layer.
        """
        group: list[ExpertPart] = []
        for part in parts:
            rows = sum(len(each.rows) for each in [*group, part])
            together = rows <= EXPERT_TILE and self._kernel(expert, rows, weights).independent
            if group and not together:
                yield group
                group = []
            group.append(part)
        if group:
            yield group
