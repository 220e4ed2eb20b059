"""Comparison of the figures in papers with our own predictions of them, made on the virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Annotated

from moesched.errors import BadInput
from moesched.keywords import takes
from moesched.options import Option, Options
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
from moesched.system.plain_text import shown

__all__ = ["PAPERS", "PRINTED", "SECTIONS", "Accuracy", "Claim", "Reproduction", "Section", "reproduce_paper"]

PRINTED: dict[str, PrintedPaper] = {
    "moe-lightning": moe_lightning(),
    "twiddler": twiddler_paper(),
    "mac-cluster": mac_paper(),
}
"""The printed figures, sections and claims of each paper, by the paper's name."""
_MAKE = {"moe-lightning": moe_lightning_made, "twiddler": twiddler_made, "mac-cluster": mac_cluster_made}
SECTIONS = {name: tuple(paper.sections) for name, paper in PRINTED.items()}
"""Names of the sections of each paper's reproduction, in order, by the paper's name."""
PAPERS = tuple(SECTIONS)


class ReproduceOptions(Options):
    """The options of `reproduce_paper`."""

    paper: Annotated[str, Option("One of `PAPERS`.")] = field(kw_only=False)
    only: Annotated[
        Sequence[str], Option("Names of sections, from the paper's `SECTIONS`; by default all.")
    ] = field(default=(), kw_only=False)
    on_progress: Annotated[Callable[[str], None], Option("Called with a description of each prediction.")] = (
        field(default=lambda what: None, kw_only=False)
    )


@takes(ReproduceOptions)
@interruptible()
def reproduce_paper(given: ReproduceOptions) -> Reproduction:
    """Compare a paper's figures with our predictions; needs no weights and no GPU.

    Raises:
        BadInput: there is no such paper or section.
    """
    paper, only = given.paper, given.only
    _require(paper, PAPERS, "paper")
    for section in only:
        _require(section, SECTIONS[paper], "section")
    started = time.perf_counter()
    with _MAKE[paper](given.on_progress) as made:
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
        remedy = with_nearest(str(name), known, f"name one of {', '.join(known)}")
        raise BadInput(f"no {kind} {shown(name)}: {remedy}")
