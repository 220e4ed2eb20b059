"""Sections of MoE-Lightning's Tables 4 and 5: each cell predicted with the batch sizes that the paper prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

import msgspec

from moesched.reproduce.moe_lightning.calibration import predict_cell
from moesched.reproduce.moe_lightning.paper import Column, Paper, Row
from moesched.reproduce.moe_lightning.rate_factors import RateFactors
from moesched.reproduce.moe_lightning.systems import AS_DRAWN, Predicted
from moesched.reproduce.report import NEAR, Accuracy, Section, Value, rounded


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of the paper's tables, with our predictions.

    Attributes:
        predicted: the prediction with the system's published schedule.
        as_drawn: for FlexGen, the prediction with the schedule of the paper's Fig. 6; otherwise equal to `predicted`.
    """

    column: Column
    row: Row
    predicted: Predicted
    as_drawn: Predicted

    @property
    def error(self) -> float:
        """Relative error of the predicted throughput: 0 is exact, 0.1 is 10 % too fast."""
        return self.predicted.tokens_per_second / self.row.tokens_per_second - 1

    @property
    def name(self) -> str:
        """The cell's table, workload, setting and system as text."""
        column = self.column
        return f"{column.table}, {column.workload}, {column.setting}, {self.row.name}"


def cells_of(
    paper: Paper, table: str, factors: RateFactors, on_progress: Callable[[str], None]
) -> list[Cell]:
    """Predict all cells of a table.

    Args:
        table: the table's name, such as "Table 4".
        on_progress: called with a description of each prediction.
    """
    found = []
    for column in paper.cells:
        for row in column.rows if column.table == table else ():
            on_progress(f"{table}: {row.name} on {column.setting}")
            predicted = as_drawn = predict_cell(paper, column, row, factors)
            if row.system == "FlexGen":
                as_drawn = predict_cell(paper, column, row, factors, AS_DRAWN)
            found.append(Cell(column=column, row=row, predicted=predicted, as_drawn=as_drawn))
    return found


def table_section(paper: Paper, table: str, cells: Sequence[Cell]) -> Section:
    """Make the section of a table, with our predictions beside the printed cells."""
    return paper.section(table.lower().replace(" ", "-"), [_row(cell) for cell in cells])


def accuracy(cells: Sequence[Cell], *, as_drawn: bool = False) -> Accuracy:
    """Return the errors of the predicted cells, and the pairs of systems that the predictions put in the wrong order.

    Args:
        as_drawn: whether FlexGen's predictions are those with the schedule of the paper's Fig. 6.
    """

    def ours(cell: Cell) -> float:
        return (cell.as_drawn if as_drawn else cell.predicted).tokens_per_second

    return accuracy_of([Judged(cell.column, cell.row, ours(cell), not cell.row.fit) for cell in cells])


class Judged(NamedTuple):
    """A cell of the paper's tables, with the throughput that we predict for it.

    Attributes:
        ours: predicted tokens per second.
        counts: whether the cell's error counts; False if a rate was fitted to the cell.
    """

    column: Column
    row: Row
    ours: float
    counts: bool = True


def accuracy_of(cells: Sequence[Judged]) -> Accuracy:
    """Return the median error of the cells that count, and the pairs of systems in the wrong order.

    A pair counts if both systems are in one column, and their throughputs are more than 20 % apart in the paper.
    """
    errors = [abs(each.ours / each.row.tokens_per_second - 1) for each in cells if each.counts]
    pairs = [pair for pair in combinations(cells, 2) if _comparable(*pair)]
    wrong = [
        f"{first.column.table}, {first.column.workload}, {first.column.setting}, {first.row.name} "
        f"and {second.row.name}"
        for first, second in pairs
        if (first.row.tokens_per_second > second.row.tokens_per_second) != (first.ours > second.ours)
    ]
    return Accuracy(cells=len(errors), median_error=rounded(median(errors)), pairs=len(pairs), wrong=wrong)


def _comparable(first: Judged, second: Judged) -> bool:
    """Test whether two cells are of the same column and more than 20 % apart in the paper."""
    slow, fast = sorted(cell.row.tokens_per_second for cell in (first, second))
    return first.column is second.column and fast / slow > 1 + NEAR


def _row(cell: Cell) -> dict[str, Value]:
    column, row, predicted = cell.column, cell.row, cell.predicted
    return {
        "workload": column.workload,
        "setting": column.setting,
        "system": row.name,
        "micro_batch_size": row.micro_batch_size,
        "micro_batches": row.micro_batches,
        "paper": row.tokens_per_second,
        "ours": rounded(predicted.tokens_per_second),
        "error": round(cell.error, 4),
        "fitted": row.fit,
        "as_drawn": rounded(cell.as_drawn.tokens_per_second) if row.system == "FlexGen" else None,
        "prefill_seconds": rounded(predicted.prefill_seconds),
        "step_seconds": rounded(predicted.step_seconds),
        "bound_by": predicted.bound_by,
        "busy": round(predicted.busy, 3),
        "gpu_memory": round(predicted.gpu_budget, 3),
    }
