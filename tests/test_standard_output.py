"""Standard output belongs to the command: whatever else prints reaches standard error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_options import commands, options_of
from every_command import COMMANDS, OTHERS, prepare

TESTS = Path(__file__).parent
POLICY = f"""
import sys
from moesched.policies.resident import Resident

sys.path.append({str(TESTS)!r})
from every_command import print_in_every_way

print_in_every_way()

class Noisy(Resident):
    pass
"""
SIMULATE = (
    "simulate --model mixtral-0.8b --machine t4 --workload mtbench --gen 2 --batch-size 2 "
    "--policy noisy.py:Noisy"
)


@pytest.mark.slow
def test_each_command_prints_one_json_object_whatever_libraries_print_and_without_docstrings(
    tmp_path: Path,
) -> None:
    prepare(tmp_path)
    command = [sys.executable, "-OO", str(TESTS / "every_command.py")]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    codes = [line for line in said.stderr.splitlines() if line.startswith("exit code ")]
    done = [line for line in codes if not line.endswith(": doctor")]  # it has code 1 where it finds troubles
    assert done == [f"exit code 0: {name}" for name in COMMANDS if name != "doctor"], said.stderr
    objects = said.stdout.splitlines()
    assert len(objects) == len(COMMANDS)
    assert all(isinstance(json.loads(each), dict) for each in objects)
    assert said.stderr.split().count("puts") == len(COMMANDS)


def test_no_command_is_left_out() -> None:
    called = {command.split()[0] for command in COMMANDS}
    assert not called & OTHERS.keys()
    assert called | OTHERS.keys() == set(commands())


def test_every_command_that_has_a_result_prints_it_as_json() -> None:
    assert {name for name in commands() if "--json" not in {each.flag for each in options_of(name)}} == {
        "node"
    }


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_what_a_policys_module_prints_is_no_result(tmp_path: Path, option: list[str]) -> None:
    (tmp_path / "noisy.py").write_text(POLICY)
    command = [sys.executable, "-m", "moesched", *SIMULATE.split(), *option]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(said.stderr.split()) == {"print", "write", "puts", "echo"}
    assert not {"print", "write", "puts", "echo"} & set(said.stdout.split())
    assert "noisy.py:Noisy" in said.stdout


def test_results_arrive_where_standard_error_is_closed(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(POLICY)
    command = ["sh", "-c", '"$@" 2>&-', "sh", sys.executable, "-m", "moesched", *SIMULATE.split(), "--json"]
    said = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, check=True, env=os.environ)
    assert json.loads(said.stdout)["policy"] == "noisy.py:Noisy"
