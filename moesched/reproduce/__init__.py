"""Figures of papers beside those of our schedules on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesched.errors import BadInput
from moesched.reproduce.mac_cluster.reproduction import SECTIONS as MAC_CLUSTER_SECTIONS
from moesched.reproduce.mac_cluster.reproduction import reproduce_mac_cluster
from moesched.reproduce.moe_lightning.reproduction import SECTIONS as MOE_LIGHTNING_SECTIONS
from moesched.reproduce.moe_lightning.reproduction import reproduce_moe_lightning
from moesched.reproduce.report import Accuracy, Claim, Reproduction, Section
from moesched.reproduce.twiddler.reproduction import SECTIONS as TWIDDLER_SECTIONS
from moesched.reproduce.twiddler.reproduction import reproduce_twiddler
from moesched.system.near_names import with_nearest
from moesched.system.own_loop import interruptible

__all__ = ["PAPERS", "SECTIONS", "Accuracy", "Claim", "Reproduction", "Section", "reproduce_paper"]

SECTIONS = {
    "moe-lightning": MOE_LIGHTNING_SECTIONS,
    "twiddler": TWIDDLER_SECTIONS,
    "mac-cluster": MAC_CLUSTER_SECTIONS,
}
"""By paper."""
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
    reproduced: dict[str, Callable[[Sequence[str], Callable[[str], None]], Reproduction]] = {
        "moe-lightning": reproduce_moe_lightning,
        "twiddler": reproduce_twiddler,
        "mac-cluster": reproduce_mac_cluster,
    }
    return reproduced[paper](only, on_progress)


def _require(name: str, known: Sequence[str], kind: str) -> None:
    if name not in known:
        remedy = with_nearest(name, known, f"name one of {', '.join(known)}")
        raise BadInput(f"no {kind} {name!r}: {remedy}")
