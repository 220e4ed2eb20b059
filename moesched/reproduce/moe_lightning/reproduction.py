"""`moesched reproduce moe-lightning`: makes the sections that compare the paper's figures with our predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from moesched.reproduce.printed import Made
from moesched.reproduce.report import Accuracy, Section


@contextmanager
def moe_lightning_made(on_progress: Callable[[str], None]) -> Iterator[Made]:
    """Fit the hardware rates that the paper lacks, and yield functions that make the report's sections with them."""
    paper = moe_lightning()
    factors = calibrate(paper, on_progress)
    cells: list[Cell] = []
    found: dict[str, Accuracy] = {}

    def table(name: str) -> Section:
        mine = cells_of(paper, name, factors, on_progress)
        cells.extend(mine)
        return table_section(paper, name, mine)

    def sustained() -> Section:
        section, found["sustained"] = sustained_section(paper, on_progress)
        return section

    def accuracies() -> dict[str, Accuracy]:
        if cells:
            found.update(accuracy=accuracy(cells), as_drawn=accuracy(cells, as_drawn=True))
        return found

    yield Made(
        {
            "table-4": partial(table, "Table 4"),
            "table-5": partial(table, "Table 5"),
            "sustained": sustained,
            "artifact": lambda: artifact_section(paper, on_progress),
            "speedups": lambda: speedups(paper, factors, on_progress),
            "cpu-attention": lambda: attention_section(paper, factors),
            "cpu-memory": lambda: memory_section(paper, factors, on_progress),
            "policy-map": lambda: policy_map(paper, on_progress),
            "scaling": lambda: scaling(paper, factors, on_progress),
        },
        lambda: calibration_rows(paper, factors),
        accuracies,
    )
