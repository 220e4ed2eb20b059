"""The documentation's tables are those of the result files, but for marks of results that are older than the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pages.write import DOCS, OLDER, Result, pages
from benchmarks.record.claims import Claim, at_least, at_most, none_of
from benchmarks.record.results import ROOT
from benchmarks.record.tables import across, filled, markdown, plain, table_of


@pytest.fixture(scope="module")
def written() -> dict[Path, str]:
    """The pages as the result files have them."""
    return pages()


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_a_page_has_the_tables_of_its_results(page: Path, written: dict[Path, str]) -> None:
    assert page.read_text().replace(OLDER, "") == written[page].replace(OLDER, "")


def test_the_results_page_has_missed_bars_first_in_each_table() -> None:
    tables = (DOCS / "results.md").read_text().split("<!-- table")[1:]
    assert len(tables) == 3
    for table in tables:
        missed = ["**" in line for line in table.splitlines() if line.startswith("| ")][2:]
        assert missed == sorted(missed, reverse=True)


def test_a_figure_has_the_day_of_the_part_that_was_measured_first() -> None:
    parts = {"a": {"date": "2026-03-02"}, "b": {"date": "2026-03-01"}}
    assert Result(Path("some.json"), {"date": "2026-01-01", "parts": parts}).date == "2026-03-01"
    assert Result(Path("some.json"), {"date": "2026-01-01"}).date == "2026-01-01"


def test_only_tables_that_are_known_are_written_anew() -> None:
    page = "a\n<!-- table one -->\nold\n<!-- end -->\nb\n<!-- table two -->\nkept\n<!-- end -->\n"
    assert filled(page, {"one": "new"}.get) == page.replace("old", "\nnew\n")


def test_cells_are_short_and_say_yes_or_no() -> None:
    written = markdown(["a", "b", "c"], [[1.50, False, None]])
    assert written.splitlines() == ["| a | b | c |", "| --- | --- | --- |", "| 1.5 | **no** |  |"]
    assert plain([{"of_a": 1, "error": -0.25}]).splitlines()[-1] == "| 1 | -25.0% |"
    assert table_of([{"x": 1.234}], {"X": "{x:.1f} s"}).splitlines()[-1] == "| 1.2 s |"


def test_rows_are_turned_into_columns() -> None:
    rows = [{"machine": "m", "nodes": nodes, "rate": nodes / 2} for nodes in (2, 4)]
    written = across(rows, ["machine"], "{nodes} nodes", "{rate:g}").splitlines()
    assert written == ["| machine | 2 nodes | 4 nodes |", "| --- | --- | --- |", "| m | 1 | 2 |"]


def test_a_claim_says_whether_its_bar_is_reached() -> None:
    assert at_most("time", 3.0, 2.0, "{:.0f} s") == Claim("time", "3 s", "≤ 2 s", reached=False)
    assert at_least("ratio", 3.0, 2.0).reached
    assert [none_of("wrong", count, 9).reached for count in (0, 1)] == [True, False]
