"""Comparison of figures that papers print with our predictions for them on the virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from moesched.errors import BadInput
from moesched.reproduce.mac_cluster.paper import mac_paper
from moesched.reproduce.mac_cluster.reproduction import mac_cluster_made
from moesched.reproduce.moe_lightning.paper import moe_lightning
from moesched.reproduce.moe_lightning.reproduction import moe_lightning_made
from moesched.reproduce.printed import PrintedPaper
from moesched.reproduce.report import Accuracy, Claim, Reproduction, Section
from moesched.reproduce.twiddler.paper import twiddler_paper
from moesched.reproduce.twiddler.reproduction import twiddler_made
from moesched.system.near_names import with_nearest
from moesched.system.own_loop import interruptible

__all__ = ["PAPERS", "PRINTED", "SECTIONS", "Accuracy", "Claim", "Reproduction", "Section", "reproduce_paper"]

PRINTED: dict[str, PrintedPaper] = {
    "moe-lightning": moe_lightning(),
    "twiddler": twiddler_paper(),
    "mac-cluster": mac_paper(),
}
"""The printed figures, sections and claims of each paper, by its name."""
_MAKE = {"moe-lightning": moe_lightning_made, "twiddler": twiddler_made, "mac-cluster": mac_cluster_made}
SECTIONS = {name: tuple(paper.sections) for name, paper in PRINTED.items()}
"""Names of the sections of each paper's reproduction, in order, by the paper's name."""
PAPERS = tuple(SECTIONS)


@interruptible()
def reproduce_paper(
    paper: str, only: Sequence[str] = (), on_progress: Callable[[str], None] = lambda what: None
) -> Reproduction:
    """Compare a paper's figures with our predictions; needs no weights and no GPU.

    Args:
        paper: one of `PAPERS`.
        only: names of sections, from the paper's `SECTIONS`; by default all.
        on_progress: called with a description of each prediction.

    Raises:
        BadInput: there is no such paper or section.
    """
    _require(paper, PAPERS, "paper")
    for section in only:
        _require(section, SECTIONS[paper], "section")
    started = time.perf_counter()
    with _MAKE[paper](on_progress) as made:
        sections = [made.sections[name]() for name in SECTIONS[paper] if not only or name in only]
        accuracies = made.accuracies()
        calibration = made.calibration()
    return Reproduction(
        paper=paper,
        title=PRINTED[paper].title,
        calibration=calibration,
        accuracy=accuracies.get("accuracy"),
        accuracy_as_drawn=accuracies.get("as_drawn"),
        accuracy_sustained=accuracies.get("sustained"),
        sections=sections,
        wall_seconds=round(time.perf_counter() - started, 1),
    )


def _require(name: str, known: Sequence[str], kind: str) -> None:
    if name not in known:
        remedy = with_nearest(name, known, f"name one of {', '.join(known)}")
        raise BadInput(f"no {kind} {name!r}: {remedy}")
