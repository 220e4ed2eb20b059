"""`moesched compare`: a run beside its replay, and files that are none of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commands import SIMULATE, refused
from moesched.analysis.published import PREFILL_ERROR
from moesched.trace import check_trace


def test_compare_says_why_and_shows_a_run_beside_its_replay(command: Any, tmp_path: Path) -> None:
    trace, both = tmp_path / "trace.json", tmp_path / "both.json"
    command(*SIMULATE, "--policy", "cgopipe", "--batch-size", 4, "--gen", 3, "--trace", trace)
    said = command("compare", trace, "--replayed", "--trace", both)
    assert "trace.json replayed (predicted)" in said.out
    assert "explain" in said.out
    [published] = [line.split() for line in said.out.splitlines() if line.startswith("published prefills")]
    assert published == ["published", "prefills", "error", f"{PREFILL_ERROR:.0%}"], (
        "a replay predicts no prefill"
    )
    assert check_trace(both) == []
    told = command("compare", trace, "--replayed", "--json").json["difference"]
    assert told["run_seconds"][0] == pytest.approx(told["run_seconds"][1])


def test_compare_wants_two_files_of_ours(command: Any, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    refused(command("compare", tmp_path / "other.json"), "1 run given: name two")
    refused(
        command("compare", tmp_path / "other.json", tmp_path / "other.json"),
        r"other\.json is not the report of a run",
    )
