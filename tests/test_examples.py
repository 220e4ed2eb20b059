"""The examples run, and print what they are said to print."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import moesched
from moesched.machines.local import unified_machine
from moesched.machines.toml_text import machine_toml

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_users_run")]

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example in this process, in its folder; returns what it prints."""

    def run(script: str, *arguments: object) -> str:
        monkeypatch.chdir(EXAMPLES)
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capfd.readouterr().out

    return run


@pytest.mark.parametrize("name", sorted(file.stem for file in EXAMPLES.glob("*.out")))
def test_an_example_prints_what_its_output_file_says(
    name: str, run: Callable[..., str], tmp_path: Path
) -> None:
    options = ["--out", tmp_path] if name == "two_nodes" else []
    assert run(f"{name}.py", *options) == (EXAMPLES / f"{name}.out").read_text()


def test_every_example_is_in_the_index() -> None:
    named = set(re.findall(r"examples/(\w+\.py)|`(on_demand\.py)`", (EXAMPLES / "README.md").read_text()))
    assert {first or second for first, second in named} == {file.name for file in EXAMPLES.glob("*.py")}


def test_the_main_job_shows_text_a_table_and_traces_that_hold(
    run: Callable[..., str], tmp_path: Path
) -> None:
    machine = tmp_path / "machine.toml"
    rates = {"bfloat16": 1e11, "float32": 1e11}
    machine.write_text(
        machine_toml(
            unified_machine(
                "test", memory=10**10, disk=10**12, flops=rates, memory_bandwidth=2e10, disk_bandwidth=1e9
            )
        )
    )
    sizes = ("--layers", 3, "--share", 0.9, "--rounds", 1)
    output = run("first_run.py", "--out", tmp_path / "out", *sizes, "--machine", machine)
    assert "Return a new" in output
    for policy in ("resident", "layer_streaming", "cgopipe"):
        assert policy in output
        for clock in ("measured", "predicted"):
            assert moesched.check_trace(tmp_path / "out" / "traces" / f"{policy}-{clock}.json") == []


def test_a_plan_is_run_and_its_error_explained(run: Callable[..., str], tmp_path: Path) -> None:
    output = run("plan_run_compare.py", "--out", tmp_path)
    for said in (
        "bound by",
        "What makes the difference",
        "part of the gap",
        "accelerator",
        "Longest waits on the critical path",
    ):
        assert said in output
    for name in ("predicted", "measured", "side-by-side"):
        assert moesched.check_trace(tmp_path / f"{name}.json") == []


def test_one_request_is_answered_alike_by_four_policies(run: Callable[..., str], tmp_path: Path) -> None:
    output = run("one_request.py", "--out", tmp_path)
    assert "All texts are equal: Return a new" in output
    for policy in ("twiddler", "twiddler_makespan", "lru_offload", "layer_split"):
        assert policy in output
        assert moesched.check_trace(tmp_path / f"one-request-{policy}.json") == []
