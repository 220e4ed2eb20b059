"""A paper's figures beside what our schedules come to on the virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from moesched.errors import BadInput
from moesched.reproduce.mac_cluster.sections import SECTIONS as MAC_CLUSTER_SECTIONS
from moesched.reproduce.mac_cluster.sections import reproduce_mac_cluster
from moesched.reproduce.moe_lightning.attention import attention_section
from moesched.reproduce.moe_lightning.calibration import calibrate, calibration_rows
from moesched.reproduce.moe_lightning.cpu_memory import memory_section
from moesched.reproduce.moe_lightning.paper import moe_lightning
from moesched.reproduce.moe_lightning.policy_map import policy_map
from moesched.reproduce.moe_lightning.scaling import scaling
from moesched.reproduce.moe_lightning.speedups import speedups
from moesched.reproduce.moe_lightning.tables import Cell, accuracy, cells_of, table_section
from moesched.reproduce.report import Accuracy, Claim, Reproduction, Section
from moesched.reproduce.twiddler.sections import SECTIONS as TWIDDLER_SECTIONS
from moesched.reproduce.twiddler.sections import reproduce_twiddler

__all__ = ["PAPERS", "SECTIONS", "Accuracy", "Claim", "Reproduction", "Section", "reproduce"]

TABLES = {"table-4": "Table 4", "table-5": "Table 5"}
SECTIONS = {
    "moe-lightning": (*TABLES, "speedups", "cpu-attention", "cpu-memory", "policy-map", "scaling"),
    "twiddler": TWIDDLER_SECTIONS,
    "mac-cluster": MAC_CLUSTER_SECTIONS,
}
"""By paper."""
PAPERS = tuple(SECTIONS)


def reproduce(
    paper: str, only: Sequence[str] = (), on_progress: Callable[[str], None] = lambda what: None
) -> Reproduction:
    """Put a paper's figures beside our predictions of them; needs no weights and no GPU.

    Args:
        paper: one of `PAPERS`.
        only: sections, of `SECTIONS` of the paper; by default all.
        on_progress: told what is predicted.

    Raises:
        BadInput: there is no such paper or section.
    """
    _require(paper, PAPERS, "paper")
    for section in only:
        _require(section, SECTIONS[paper], "section")
    reproduced: dict[str, Callable[[Sequence[str], Callable[[str], None]], Reproduction]] = {
        "moe-lightning": _moe_lightning,
        "twiddler": reproduce_twiddler,
        "mac-cluster": reproduce_mac_cluster,
    }
    return reproduced[paper](only, on_progress)


def _moe_lightning(only: Sequence[str], on_progress: Callable[[str], None]) -> Reproduction:
    started = time.perf_counter()
    figures = moe_lightning()
    rates = calibrate(figures, on_progress)
    cells: dict[str, list[Cell]] = {}

    def table(name: str) -> Section:
        cells[name] = cells_of(figures, TABLES[name], rates, on_progress)
        return table_section(TABLES[name], cells[name])

    make: dict[str, Callable[[], Section]] = {
        **{name: partial(table, name) for name in TABLES},
        "speedups": lambda: speedups(figures, rates, on_progress),
        "cpu-attention": lambda: attention_section(figures, rates),
        "cpu-memory": lambda: memory_section(figures, rates, on_progress),
        "policy-map": lambda: policy_map(on_progress),
        "scaling": lambda: scaling(figures, rates, on_progress),
    }
    sections = [make[name]() for name in SECTIONS["moe-lightning"] if not only or name in only]
    shown = [cell for each in cells.values() for cell in each]
    return Reproduction(
        paper="moe-lightning",
        title=figures.title,
        calibration=calibration_rows(figures, rates),
        accuracy=accuracy(shown) if shown else None,
        accuracy_as_drawn=accuracy(shown, as_drawn=True) if shown else None,
        sections=sections,
        wall_seconds=round(time.perf_counter() - started, 1),
    )


def _require(name: str, known: Sequence[str], what: str) -> None:
    if name not in known:
        raise BadInput(f"no {what} {name!r}: name one of {', '.join(known)}")
