"""`moesched new-policy` writes a policy that runs, and a test that passes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from commands import refused


def test_the_policy_runs_and_its_test_passes(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = command("new-policy", "ahead_of_time", "--dir", tmp_path / "mine", "--json")
    folder = tmp_path / "mine"
    assert said.json == {
        "policy": f"{folder}/ahead_of_time.py:AheadOfTime",
        "files": [f"{folder}/ahead_of_time.py", f"{folder}/test_ahead_of_time.py"],
    }
    monkeypatch.syspath_prepend(folder)
    written = importlib.import_module("test_ahead_of_time")
    tests = [value for name, value in vars(written).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()
    assert "NewPolicy" not in "".join(file.read_text() for file in folder.glob("*.py"))


def test_the_commands_that_it_prints_work(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = command("new-policy", "mine")
    lines = said.out.replace("\\\n", "").splitlines()
    (simulate,) = [line.split() for line in lines if "moesched simulate" in line]
    assert command(*simulate[1:], "--batch-size", 8).code == 0


@pytest.mark.parametrize("name", ["MyPolicy", "my-policy", "2nd", "../mine", "mine.py", ""])
def test_a_name_that_no_module_has_is_refused(command: Any, name: str) -> None:
    refused(command("new-policy", name), "is no name of a file: give small letters")


def test_files_that_exist_are_not_replaced(command: Any, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("mine")
    refused(command("new-policy", "mine", "--dir", tmp_path), "test_mine.py exists: choose another name")
    assert [file.name for file in tmp_path.iterdir()] == ["test_mine.py"]
