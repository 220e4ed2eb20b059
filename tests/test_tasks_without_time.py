"""Traces whose tasks, all or those of a kind, last nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from commands import refused
from traces import rewritten, slices_of

NOTHING = msgspec.Raw(b"0.000")


@pytest.fixture
def other(streamed_trace: Path) -> Path:
    """A copy of a trace, to change."""
    return Path(shutil.copy(streamed_trace, streamed_trace.with_name("other.json")))


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "{other}"),
        ("explain", "{other}", "--report", "{folder}/report.html"),
        ("compare", "{other}", "{trace}"),
        ("compare", "{trace}", "{other}"),
        ("compare", "{other}", "--replayed"),
        ("timeline", "{other}", "--out", "{folder}/picture.svg"),
    ],
)
def test_a_trace_whose_tasks_all_last_nothing_is_refused(
    command: Any, streamed_trace: Path, other: Path, arguments: tuple[str, ...]
) -> None:
    with rewritten(other) as events:
        for each in slices_of(events):
            each["ts"] = each["dur"] = NOTHING
    places = {"trace": streamed_trace, "other": other, "folder": other.parent}
    said = command(*(each.format(**places) for each in arguments))
    refused(said, "the trace is damaged: all of its tasks last nothing; record it again")


@pytest.mark.parametrize("name", ["load", "post_attention", "attention", "sample"])
def test_a_kind_of_tasks_may_last_nothing(command: Any, streamed_trace: Path, other: Path, name: str) -> None:
    with rewritten(other) as events:
        for each in slices_of(events):
            if each["name"].split()[0] == name:
                each["dur"] = NOTHING
    assert command("explain", other).code == 0
    for pair in ((streamed_trace, other), (other, streamed_trace)):
        assert command("compare", *pair).code == 0
