"""Predicts Tables 4 and 5 of MoE-Lightning from our profiles' sustained rates; nothing is fitted to the paper."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

from moesched.planner.setting import Setting
from moesched.planner.uncertainty import Figures, Uncertainty, uncertainty
from moesched.reproduce.moe_lightning.calibration import cell_setting
from moesched.reproduce.moe_lightning.paper import Column, Paper, Row
from moesched.reproduce.moe_lightning.systems import Predicted, fitting, predict
from moesched.reproduce.moe_lightning.tables import Judged, accuracy_of
from moesched.reproduce.report import Accuracy, Section, Value, rounded
from moesched.runs.ranks import Rank

THROUGHPUT = "throughput_tokens_per_second"


def sustained_section(paper: Paper, on_progress: Callable[[str], None]) -> tuple[Section, Accuracy]:
    """Predict all cells of Tables 4 and 5 by rates that kernels and copies sustain; return a section and the errors."""
    rows: list[dict[str, Value]] = []
    judged = []
    for column in paper.cells:
        for row in column.rows:
            on_progress(f"sustained rates: {row.name} on {column.setting}, {column.workload}")
            setting = cell_setting(paper, column, row, None)
            predicted = predict(setting, row.micro_batches, row.micro_batch_size)
            judged.append(Judged(column, row, predicted.tokens_per_second))
            rows.append(_row(column, row, predicted, _band(setting, row, predicted)))
    section = paper.section("sustained", rows, notes=[_coverage(rows)])
    return section, accuracy_of(judged)


def _band(setting: Setting, row: Row, predicted: Predicted) -> Uncertainty:
    def ranks(setting: Setting, row: Row) -> list[Rank]:
        plan, policy, _ = fitting(setting, row.micro_batches, row.micro_batch_size)
        return [Rank(plan, policy)]

    expected = Figures(predicted.tokens_per_second, predicted.step_seconds, predicted.prefill_seconds)
    return uncertainty(partial(ranks, setting, row), expected)


def _row(column: Column, row: Row, predicted: Predicted, found: Uncertainty) -> dict[str, Value]:
    low, ours, high = found.band[THROUGHPUT]
    peak = found.at_peak
    return {
        "table": column.table,
        "workload": column.workload,
        "setting": column.setting,
        "system": row.name,
        "paper": row.tokens_per_second,
        "ours": rounded(ours),
        "low": rounded(low),
        "high": rounded(high),
        "error": round(ours / row.tokens_per_second - 1, 4),
        "inside": low <= row.tokens_per_second <= high,
        "at_peak": None if peak is None else rounded(peak.throughput_tokens_per_second),
        "prefill_seconds": rounded(predicted.prefill_seconds),
        "step_seconds": rounded(predicted.step_seconds),
        "bound_by": predicted.bound_by,
    }


def _coverage(rows: list[dict[str, Value]]) -> str:
    inside = sum(row["inside"] is True for row in rows)
    width = median(float(row["high"] or 0) / float(row["low"] or 1) for row in rows)
    return f"The band holds {inside} of {len(rows)} cells; its ends are {width:.2f}x apart at the median."
