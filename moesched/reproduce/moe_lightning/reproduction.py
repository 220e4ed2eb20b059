"""`moesched reproduce moe-lightning`: its tables and figures beside our schedules on the virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from moesched.reproduce.moe_lightning.artifact import artifact_section
from moesched.reproduce.moe_lightning.attention import attention_section
from moesched.reproduce.moe_lightning.calibration import calibrate, calibration_rows
from moesched.reproduce.moe_lightning.cpu_memory import memory_section
from moesched.reproduce.moe_lightning.paper import moe_lightning
from moesched.reproduce.moe_lightning.policy_map import policy_map
from moesched.reproduce.moe_lightning.scaling import scaling
from moesched.reproduce.moe_lightning.speedups import speedups
from moesched.reproduce.moe_lightning.sustained import sustained_section
from moesched.reproduce.moe_lightning.tables import Cell, accuracy, cells_of, table_section
from moesched.reproduce.report import Accuracy, Reproduction, Section

TABLES = {"table-4": "Table 4", "table-5": "Table 5"}
SECTIONS = (
    *TABLES,
    "sustained",
    "artifact",
    "speedups",
    "cpu-attention",
    "cpu-memory",
    "policy-map",
    "scaling",
)


def reproduce_moe_lightning(only: Sequence[str], on_progress: Callable[[str], None]) -> Reproduction:
    """Reproduce the named sections, or all."""
    started = time.perf_counter()
    figures = moe_lightning()
    rates = calibrate(figures, on_progress)
    cells: dict[str, list[Cell]] = {}

    def table(name: str) -> Section:
        cells[name] = cells_of(figures, TABLES[name], rates, on_progress)
        return table_section(TABLES[name], cells[name])

    sustained: list[Accuracy] = []

    def at_sustained_rates() -> Section:
        section, found = sustained_section(figures, on_progress)
        sustained.append(found)
        return section

    make: dict[str, Callable[[], Section]] = {
        **{name: partial(table, name) for name in TABLES},
        "sustained": at_sustained_rates,
        "artifact": lambda: artifact_section(figures, on_progress),
        "speedups": lambda: speedups(figures, rates, on_progress),
        "cpu-attention": lambda: attention_section(figures, rates),
        "cpu-memory": lambda: memory_section(figures, rates, on_progress),
        "policy-map": lambda: policy_map(on_progress),
        "scaling": lambda: scaling(figures, rates, on_progress),
    }
    sections = [make[name]() for name in SECTIONS if not only or name in only]
    shown = [cell for each in cells.values() for cell in each]
    return Reproduction(
        paper="moe-lightning",
        title=figures.title,
        calibration=calibration_rows(figures, rates),
        accuracy=accuracy(shown) if shown else None,
        accuracy_as_drawn=accuracy(shown, as_drawn=True) if shown else None,
        accuracy_sustained=sustained[0] if sustained else None,
        sections=sections,
        wall_seconds=round(time.perf_counter() - started, 1),
    )
