"""Sets each unknown rate so that the prediction meets one cell of the paper's tables, the one that names it."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import msgspec
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.machines import load_machine

from .figures import Column, Paper, Row
from .rates import Rates
from .systems import SYSTEMS, Predicted, predict, setting_of

ORDER = ("link", "kernels", "flexgen_attention")
ROUNDS = 6
MOST_TRIES = 30
CLOSE = 1e-4


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """A rate and the cell that it was set by."""

    rate: str
    share: float
    cell: str


def predict_cell(paper: Paper, column: Column, row: Row, rates: Rates) -> Predicted:
    """A cell of the paper's tables, with the sizes that it prints."""
    where = paper.settings[column.setting]
    setting = setting_of(
        SYSTEMS[row.system],
        where.model,
        load_machine(where.machine),
        column.workload,
        column.new_tokens,
        rates,
        row.micro_batch_size * row.micro_batches,
    )
    return predict(setting, row.micro_batches, row.micro_batch_size)


def calibrate(paper: Paper, on_progress: Callable[[str], None] = lambda what: None) -> Rates:
    """The rates with which each fitted cell is met, one after the other, until none of them moves the others.

    Raises:
        BadInput: a cell cannot be met.
    """
    cells = {row.fit: (column, row) for column in paper.cells for row in column.rows if row.fit}
    rates = Rates(link=0.9, kernels=0.25, flexgen_attention=0.03)
    for _ in range(ROUNDS):
        before = rates
        for name in ORDER:
            column, row = cells[name]
            on_progress(f"fitting {name} to {row.name}")
            rates = replace(rates, **{name: _meet(paper, column, row, rates, name)})
        if all(abs(log(getattr(rates, name) / getattr(before, name))) < CLOSE for name in ORDER):
            break
    return rates


def fitted(paper: Paper, rates: Rates) -> list[Fitted]:
    """Which rate was set by which cell."""
    return [
        Fitted(
            rate=row.fit,
            share=getattr(rates, row.fit),
            cell=f"{column.table}, {column.workload}, {column.setting}, {row.name}",
        )
        for column in paper.cells
        for row in column.rows
        if row.fit
    ]


def _meet(paper: Paper, column: Column, row: Row, rates: Rates, name: str) -> float:
    """The rate with which a cell is met, by secants on a scale of logarithms."""

    def miss(x: float) -> float:
        tried = replace(rates, **{name: 2.0**x})
        return log(predict_cell(paper, column, row, tried).tokens_per_second / row.tokens_per_second)

    x = log(getattr(rates, name), 2)
    last, missed = x, miss(x)
    x -= missed
    for _ in range(MOST_TRIES):
        now = miss(x)
        if abs(now) < CLOSE:
            return float(2.0**x)
        if now == missed:
            break
        last, x, missed = x, x - now * (x - last) / (now - missed), now
    raise BadInput(f"{row.name} on {column.setting} cannot be met by {name}: change its start or its cell")
