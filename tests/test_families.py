"""Every verb has a family, whose colour pictures show."""

from __future__ import annotations

import pytest

from moesched.analysis.families import COLOURS, family_of
from moesched.steps.verbs.table import VERBS
from moesched.trace.recording import TaskInfo


@pytest.mark.parametrize("verb", [verb.name for verb in VERBS if verb.lane is not None] + ["partial_sum"])
def test_every_verb_that_submits_a_task_has_a_family(verb: str) -> None:
    assert family_of(TaskInfo(verb, verb, "Kernel", verb, "gpu")) != "other"


def test_transfers_of_pages_and_collectives_are_told_by_what_they_are() -> None:
    assert family_of(TaskInfo("a page", "fetch", "PageTransfer", "copy", "link", pages=1)) == "weights"
    assert family_of(TaskInfo("sum", "all_reduce", "Collective", "all_reduce", "network")) == "exchange"
    assert family_of(TaskInfo("mine", "mine", "Kernel", "mine", "gpu")) == "other"


def test_families_have_colours_of_their_own() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)
