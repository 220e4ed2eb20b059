"""Calibration of the rates that the paper does not give: each is fitted to one cell of the paper's tables."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.planner.setting import Setting
from moesched.reproduce.moe_lightning.paper import Column, Paper, Row
from moesched.reproduce.moe_lightning.rate_factors import RateFactors
from moesched.reproduce.moe_lightning.systems import SYSTEMS, Predicted, System, predict, setting_of
from moesched.reproduce.report import Value, rounded

OF = {
    "link": "the profile's links to and from the GPU",
    "kernels": "the GPU's memory bandwidth and FLOP/s",
    "flexgen_attention": "the host's bandwidth and FLOP/s, for FlexGen's CPU attention",
}
ORDER = ("link", "kernels", "flexgen_attention")
START = RateFactors(link=0.97, kernels=0.26, flexgen_attention=0.027)
"""Rates at which the search begins; its result does not depend on them."""
ROUNDS = 6
CLOSE = 1e-4
LEAST, MOST = 1e-3, 10.0
"""Bounds of the search, as shares of the profile's rate."""


def predict_cell(
    paper: Paper, column: Column, row: Row, factors: RateFactors | None, system: System | None = None
) -> Predicted:
    """Predict the throughput of one cell with the sizes that the paper prints; arguments as for `cell_setting`."""
    setting = cell_setting(paper, column, row, factors, system)
    return predict(setting, row.micro_batches, row.micro_batch_size)


def cell_setting(
    paper: Paper, column: Column, row: Row, factors: RateFactors | None, system: System | None = None
) -> Setting:
    """Return the machine, model and requests of one cell of the paper's tables, in the form that the planner takes.

    Args:
        column, row: the cell.
        factors: shares of the peak rates that the machine's profile states; None for the profile's sustained rates,
            which kernels and copies are expected to reach.
        system: the way in which we simulate the cell; None for the way that `SYSTEMS` has for the row's system.
    """
    return setting_of(
        system or SYSTEMS[row.system],
        paper.settings[column.setting],
        column.workload,
        column.new_tokens,
        factors,
        requests=row.micro_batch_size * row.micro_batches,
    )


def calibrate(paper: Paper, on_progress: Callable[[str], None] = lambda what: None) -> RateFactors:
    """Fit each rate in turn to the cell whose `Row.fit` names it, and repeat this until the rates hardly change.

    Raises:
        BadInput: a rate cannot be fitted to its cell.
    """
    cells = {row.fit: (column, row) for column in paper.cells for row in column.rows if row.fit}
    factors = START
    for _ in range(ROUNDS):
        before = factors
        for name in ORDER:
            column, row = cells[name]
            on_progress(f"fitting {name} to {row.name}")
            factors = replace(factors, **{name: _meet(paper, column, row, factors, name)})
        if all(abs(log(getattr(factors, name) / getattr(before, name))) < CLOSE for name in ORDER):
            break
    return factors


def calibration_rows(paper: Paper, factors: RateFactors) -> list[dict[str, Value]]:
    """Return a row for each fitted rate: the rate as a share of the profile's and in GB/s, and the cell that set it."""
    rows: list[dict[str, Value]] = []
    for column in paper.cells:
        for row in column.rows:
            if row.fit:
                machine = paper.settings[column.setting].described()
                share = getattr(factors, row.fit)
                rows.append(
                    {
                        "rate": row.fit,
                        "of": OF[row.fit],
                        "share": rounded(share),
                        "gb_per_second": rounded(share * _bandwidth(machine, row.fit) / 1e9),
                        "set_by": f"{column.table}, {column.workload}, {column.setting}, {row.name}",
                    }
                )
    return rows


def _bandwidth(machine: Machine, rate: str) -> float:
    """Return the bytes per second that a machine's profile states for a link or memory.

    Args:
        rate: the field of `RateFactors` that multiplies this bandwidth.
    """
    fast, slow = machine.accelerator.memory, machine.host.memory
    if rate == "link":
        return machine.link(slow, fast).bandwidth
    return machine.memories[fast if rate == "kernels" else slow].bandwidth


def _meet(paper: Paper, column: Column, row: Row, factors: RateFactors, name: str) -> float:
    """Return the value of one rate with which the prediction of a cell equals the printed throughput.

    The secant method finds the rate, on a logarithmic scale.

    Args:
        factors: all factors; the search begins at the one named `name`.
        name: the field of `RateFactors` to fit.
    """

    def miss(share: float) -> float:
        predicted = predict_cell(paper, column, row, replace(factors, **{name: share}))
        return log(predicted.tokens_per_second / row.tokens_per_second)

    share = getattr(factors, name)
    missed, slope = miss(share), 1.0
    while abs(missed) > CLOSE:
        tried = share * exp(-missed / slope)
        if not LEAST < tried < MOST:
            raise BadInput(
                f"{row.name} on {column.setting} cannot be met by its rate of {name}: correct the cell"
            )
        now = miss(tried)
        slope = (now - missed) / log(tried / share)
        share, missed = tried, now
    return float(share)
