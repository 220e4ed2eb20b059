"""The command line on a terminal of 80 columns: no name is broken, examples can be pasted, a run speaks at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_options import app, commands, options_of
from moesched.cli.generation_options import GenerationArguments
from moesched.cli.main import EPILOGUE, main
from moesched.cli.output import say
from moesched.cli.tables import print_table
from moesched.errors import BadInput
from terminals import COLUMNS, terminal

COMMANDS = (
    "simulate --model mixtral-0.8b --machine t4 --policy cgopipe --workload mtbench --gen 2 --batch-size 2 "
    "--trace {folder}/a.json",
    "simulate --model mixtral-0.8b --machine t4 --policy expert_cache --workload mtbench --gen 2 --batch-size 1 "
    "--budget gpu=1GB --trace {folder}/b.json",
    "explain {folder}/b.json",
    "compare {folder}/a.json {folder}/b.json",
    "plan --model mixtral-0.8b --machine t4 --gen 2 --policy resident",
    "plan --model dbrx --machine m2-ultra --nodes 2 --network 10gbe",
    "list policies",
    "list models",
    "list machines",
    "list parts",
    "list networks",
    "list workloads",
    "roofline --model mixtral-8x7b --machine t4",
    "latencies --model mixtral-8x7b --machine rtx6000",
    "profile-routing mixtral-8x7b --routing zipf",
)
MEASURED = re.compile(r"[0-9.]+")
"""Figures, which differ from one call to the next."""

words = st.text("abcdefgh_->0123456789", min_size=1, max_size=30)
cells = st.lists(words, max_size=6).map(" ".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("call", COMMANDS)
def test_a_command_breaks_no_word_at_80_columns(
    call: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = call.format(folder=folder).split()
    assert main(arguments) == 0
    whole = set(MEASURED.sub("", capsys.readouterr().out).split())
    with terminal("stdout") as printed:
        assert main(arguments) == 0
    lines = [line for line in printed.text.splitlines() if not line.startswith("left out at this width: ")]
    assert set(MEASURED.sub("", "\n".join(lines)).split()) <= whole
    assert max(map(len, lines)) <= COLUMNS


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


def test_the_first_examples_can_be_pasted() -> None:
    assert max(map(len, EPILOGUE.split("\n\n")[1].splitlines())) < COLUMNS


# ---------------------------------------------------------------- a run


def test_a_run_says_something_before_it_loads_anything(no_text: Path) -> None:
    def job(*_: object, **__: Any) -> Any:
        raise BadInput("nothing was loaded")

    given = GenerationArguments(policy="resident", prompt_ids="1")
    with terminal("stderr") as printed, pytest.raises(BadInput, match="nothing was loaded"):
        given.generate(no_text, job)
    assert "starting" in printed.text
