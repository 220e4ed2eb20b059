"""The command line on a terminal of 80 columns: no name is broken, examples can be pasted, a run speaks at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesched
from command_options import app, commands, options_of
from every_command import COMMANDS, prepare
from moesched.cli.calibrate import print_calibration
from moesched.cli.check import print_grid
from moesched.cli.generation_options import GenerationArguments
from moesched.cli.main import EPILOGUE, main
from moesched.cli.output import say
from moesched.cli.report_tables import print_report
from moesched.cli.tables import print_table
from moesched.errors import BadInput
from moesched.jobs.report import JobReport
from moesched.machines.profiles import load_machine
from moesched.testing.grid.cells import cells_of
from moesched.testing.grid.check import check_on_grid
from terminals import COLUMNS, terminal

MORE = (
    "simulate --model mixtral-0.8b --machine t4 --policy expert_cache --workload mtbench --gen 2 --batch-size 1 "
    "--budget gpu=1GB --trace c.json",
    "explain c.json",
    "compare a.json c.json",
    "plan --model mixtral-0.8b --machine t4 --gen 2 --policy resident",
)
"""Other forms of the commands' outputs."""
APART = {
    "run": "is measured: the next test prints one result twice",
    "check": "stops after a time: the test after that prints one result twice",
    "machine": "prints a file",
    "keygen": "prints a line for a file",
    "launch": "prints commands to paste",
}
"""Commands whose outputs are not compared here, and the reason of each."""

MEASURED = re.compile(r"[0-9.]+(?:\s+[num]?s\b)?")
"""Figures, which differ from one call to the next, with their units of time."""

words = st.text("abcdefgh_->0123456789", min_size=1, max_size=30)
cells = st.lists(words, max_size=6).map(" ".join)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A folder for outputs to a file, and one for outputs to a terminal."""
    made = [tmp_path_factory.mktemp("runs") for _ in range(2)]
    for each in made:
        prepare(each)
    return made


@pytest.fixture(scope="module")
def measured(folders: list[Path]) -> JobReport:
    """The report of a run, whose trace is b.json in both folders."""
    first, second = (folder / "b.json" for folder in folders)
    report = moesched.run_model(
        folders[0] / "model", [[1, 2]], policy="resident", max_new_tokens=2, trace=first
    )
    second.write_bytes(first.read_bytes())
    return report


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("call", [call for call in (*COMMANDS, *MORE) if call.split()[0] not in APART])
def test_a_command_breaks_no_word_at_80_columns(
    call: str, folders: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The calls come in the order of their table: later ones read what earlier ones wrote."""

    def run(folder: Path) -> None:
        monkeypatch.chdir(folder)
        assert main(call.split()) == 0

    require_whole_words(capsys, *(partial(run, folder) for folder in folders))


def test_the_report_of_a_run_breaks_no_word_at_80_columns(
    measured: JobReport, capsys: pytest.CaptureFixture[str]
) -> None:
    show = partial(print_report, measured)
    require_whole_words(capsys, show, show)


def test_the_report_of_a_check_breaks_no_word_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    cells = cells_of(["mixtral-0.8b"], ["t4"], [1])
    show = partial(print_grid, check_on_grid("resident", {}, cells=cells, limit=1.0))
    require_whole_words(capsys, show, show)


def test_the_result_of_a_calibration_breaks_no_word_and_is_one_json_object(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show = partial(print_calibration, load_machine("t4"), Path("mine.toml"), "")
    require_whole_words(capsys, *[partial(show, json=False)] * 2)
    show(json=True)
    assert json.loads(capsys.readouterr().out).keys() == {"file", "machine"}


def require_whole_words(
    capsys: pytest.CaptureFixture[str], to_file: Callable[[], object], to_terminal: Callable[[], object]
) -> None:
    """Require that a terminal of 80 columns gets whole words, those that a file gets, and no longer lines."""
    to_file()
    whole = words_of(capsys.readouterr().out)
    with terminal("stdout") as printed:
        to_terminal()
    lines = [line for line in printed.text.splitlines() if not line.startswith("left out at this width: ")]
    assert words_of("\n".join(lines)) <= whole
    assert max(map(len, lines), default=0) <= COLUMNS


def words_of(text: str) -> set[str]:
    """The words of a text, without figures."""
    return set(MEASURED.sub("", text).split())


@given(
    table=st.integers(2, 9).flatmap(
        lambda width: st.lists(st.lists(cells, min_size=width, max_size=width), min_size=2, max_size=5)
    ),
    figures=st.integers(0, 2),
)
def test_a_table_breaks_no_word(table: list[list[str]], figures: int) -> None:
    columns, *rows = table
    with terminal("stdout") as printed:
        print_table(columns, rows, figures=figures)
    known = {word for row in table for cell in row for word in cell.split()}
    assert set(printed.text.split()) <= known
    assert {word for row in rows for cell in row for word in cell.split()} <= set(printed.text.split())


def test_columns_that_are_spare_go_first_and_are_named() -> None:
    rows = [["expert_cache", "1" * 24, "2" * 24, "3" * 24]]
    with terminal("stdout") as printed:
        print_table(["policy", "first", "second", "third"], rows, spare=["second", "third"])
    assert [line.rstrip() for line in printed.text.splitlines()] == [
        f"policy        {'first':24}  third",
        f"expert_cache  {'1' * 24}  {'3' * 24}",
        "left out at this width: second",
    ]


def test_titles_are_wrapped_before_cells_stand_one_below_the_other() -> None:
    with terminal("stdout") as printed:
        print_table(["", *["a title of many words"] * 4], [["decode", *["1" * 16] * 4]], figures=4)
    assert printed.text.splitlines()[-1].split() == ["decode", *["1" * 16] * 4]


def test_cells_of_columns_without_a_title_name_the_row_in_a_narrow_terminal() -> None:
    with terminal("stdout", columns=28) as printed:
        print_table(["", "", "a.json (measured)"], [["decode step", "time", "1.5 ms"]], figures=1)
    assert printed.text.splitlines() == ["decode step time", "  a.json (measured)  1.5 ms"]


def test_sentences_end_their_lines_between_words() -> None:
    with terminal("stdout", columns=20) as printed:
        say("ok  memory: 24 GB of host->gpu")
    assert printed.text == "ok  memory: 24 GB of\nhost->gpu\n"


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("name", commands())
def test_the_examples_of_a_command_can_be_pasted_and_its_options_are_whole(name: str) -> None:
    with terminal("stdout") as printed:
        assert main([name, "--help"]) == 0
    example = app()[name].help_epilogue or ""
    assert re.search(rf"^  moesched {name}", example, re.MULTILINE)
    assert example.strip() in "\n".join(line.rstrip() for line in printed.text.splitlines())
    shown = printed.text.split()
    assert all(option.flag in shown for option in options_of(name) if option.flag)
    assert "False]" not in shown, "a switch that is off needs no default"


def test_the_first_screen_of_help_gives_each_command_two_lines_at_most() -> None:
    with terminal("stdout") as printed:
        assert main(["--help"]) == 0
    lines = printed.text.splitlines()
    assert not [
        below for above, below in pairwise(lines) if above.startswith("│   ") and below.startswith("│   ")
    ]


def test_the_first_examples_can_be_pasted() -> None:
    assert max(map(len, EPILOGUE.split("\n\n")[1].splitlines())) < COLUMNS


# ---------------------------------------------------------------- a run


def test_a_run_says_something_before_it_loads_anything(no_text: Path) -> None:
    def job(*_: object, **__: Any) -> Any:
        raise BadInput("nothing was loaded")

    given = GenerationArguments(no_text, policy="resident", prompt_ids="1")
    with terminal("stderr") as printed, pytest.raises(BadInput, match="nothing was loaded"):
        given.generate(job)
    assert "starting" in printed.text
