"""The benchmarks' command lines: help without a run, the same options, and result files that say what they measured."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.exact import cluster_tokens
from benchmarks.pages._tried_table import doctors, tried
from benchmarks.record.benchmark import Benchmark
from benchmarks.record.claims import Claim, at_most
from benchmarks.record.code import by_folder, changed_since, hash_of, imported, older_than_the_code
from benchmarks.record.results import ROOT
from benchmarks.record.tables import markdown
from benchmarks.robustness.lagging_mutants import MUTANTS
from moesched import plugins

PURPOSES = ("exact", "fidelity", "gpu", "robustness", "speed")
SCRIPTS = [
    *(path for purpose in PURPOSES for path in sorted((ROOT / "benchmarks" / purpose).glob("[!_]*.py"))),
    ROOT / "benchmarks" / "peers" / "against_peers.py",
]
NAME = "python -m tests.test_benchmarks"
ENGINE = by_folder(["moesched/engine.py", "moesched/tasks.py"])


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the variables that a benchmark sets for its children when the test ends."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("MOESCHED_IMPORTS", "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help_is_printed_without_a_run_and_names_the_common_options(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(option in said for option in ("--only", "--rounds", "--out"))


def benchmark(*, keeps_parts: bool = False) -> Benchmark:
    return Benchmark(
        __file__,
        "A test.",
        parts=("red", "redder", "blue"),
        keeps_parts=keeps_parts,
    )


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [((), ["red", "redder", "blue"]), (("red",), ["red"]), (("e", "blue"), ["red", "redder", "blue"])],
)
def test_only_picks_parts_by_name_or_by_what_their_names_contain(
    wanted: tuple[str, ...], chosen: list[str]
) -> None:
    arguments = ["--only", *wanted] if wanted else []
    assert benchmark().parse(arguments).only == chosen


def test_a_part_that_there_is_not_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark().parse(["--only", "green"])
    assert "no part is named so; parts: red, redder, blue" in capsys.readouterr().err


def test_claims_and_tables_are_stored_and_a_missed_bar_is_printed_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = Benchmark(
        __file__,
        "A test.",
        parts=("all",),
        claims=lambda result: [at_most("time", result["seconds"], 2.0, "{:.0f} s")],
        tables=lambda result: {"times": markdown(["s"], [[result["seconds"]]])},
    )
    measured.parse(["--out", str(tmp_path / "result.json")])
    assert [measured.write({"seconds": seconds}) for seconds in (1.0, 3.0)] == [0, 1]
    assert capsys.readouterr().out.splitlines()[-1] == "MISSED time: 3 s"
    result = json.loads((tmp_path / "result.json").read_text())
    assert Claim(**result["claims"][0]) == at_most("time", 3.0, 2.0, "{:.0f} s")
    assert result["tables"] == {"times": ["| s |", "| --- |", "| 3 |"]}


def test_a_result_records_how_it_came_about(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    measured = benchmark()
    measured.parse(["--out", str(file)])
    measured.write({"figure": 1})
    result = json.loads(file.read_text())
    assert result["command"] == f"{NAME} --out {file.name}"
    assert result.keys() >= {"date", "commit", "machine"}
    assert result["other_cores"].keys() == {"before", "during"}
    assert result["code"] == hash_of(result["sources"][result["code"]])
    assert "tasks.py" in result["sources"][result["code"]]["moesched"].split()
    assert not older_than_the_code(result)
    assert result["figure"] == 1


def test_a_result_is_older_than_the_code_if_a_source_changed_or_none_was_recorded() -> None:
    assert older_than_the_code({})
    assert older_than_the_code({"code": "another", "sources": {"another": ENGINE}})
    assert not older_than_the_code({"code": hash_of(ENGINE), "sources": {hash_of(ENGINE): ENGINE}})
    assert changed_since(ENGINE, 0.0)
    assert not changed_since(ENGINE, time.time() + 60)


BEFORE = '"""Adds."""\n\nx = 1  # a number\ny = "#1"\n'


@pytest.mark.parametrize(
    ("after", "same"),
    [
        ('"""Adds two."""\n# "nothing\n\n\nx = 1\ny = "#1"\n', True),
        ('x = 2\ny = "#1"\n', False),
        ('x = 1\ny = "#2"\n', False),
        ('if x:\n    x = 1\ny = "#1"\n', False),
    ],
)
def test_comments_docstrings_and_blank_lines_are_no_code(tmp_path: Path, after: str, same: bool) -> None:
    hashes = set()
    for text in (BEFORE, after):
        (tmp_path / "a.py").write_text(text)
        hashes.add(hash_of({".": "a.py"}, tmp_path))
    assert (len(hashes) == 1) is same


def test_modules_that_child_processes_import_count_with_the_files_beside_them() -> None:
    files = imported(["moesched.machines", "moesched.devices.native", "moesched.no_such_module"])
    assert any(name.endswith(".toml") for name in " ".join(files.values()).split())
    assert any(name.endswith(".c") for name in files["devices/native"].split())
    measured = benchmark()
    measured.parse(["--out", "unused"])
    subprocess.run([sys.executable, "-c", "import moesched.reproduce"], check=True)
    assert {"moesched", "moesched.reproduce"} <= measured.imports.by_children()


def test_parts_measured_later_leave_the_age_of_the_others(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"date": "2026-01-01", "figure": 1}))
    measured = benchmark(keeps_parts=True)
    measured.parse(["--only", "red", "--out", str(file)])
    measured.write({"figure": 2})
    result = json.loads(file.read_text())
    assert (result["figure"], result["date"]) == (2, "2026-01-01")
    assert result["parts"]["blue"] == {"date": "2026-01-01"}
    assert result["parts"]["red"]["command"] == f"{NAME} --only red --out {file.name}"
    assert older_than_the_code(result)


def test_a_run_that_ends_between_parts_leaves_the_age_of_those_to_come(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"date": "2026-01-01"}))
    measured = benchmark(keeps_parts=True)
    measured.parse(["--out", str(file)])
    ages = []
    for part in ("red", "redder", "blue"):
        measured.done(part)
        measured.write({})
        result = json.loads(file.read_text())
        ages.append([each["date"] == "2026-01-01" for each in result.get("parts", {"": result}).values()])
    assert ages == [[False, True, True], [False, False, True], [False]]


@pytest.mark.parametrize("own", [None, ["red", "redder"]])
def test_a_first_result_of_some_parts_tells_of_no_others(tmp_path: Path, own: list[str] | None) -> None:
    """A file of all parts, and one of its own parts only."""
    file = tmp_path / "result.json"
    for part in ("red", "redder"):
        measured = benchmark(keeps_parts=True)
        measured.parse(["--only", part, *([] if own else ["--out", str(file)])])
        measured.write({}, file, own) if own else measured.write({})
    assert list(json.loads(file.read_text())["parts"]) == ["red", "redder"]


def test_a_result_is_of_the_code_of_today_once_each_of_its_parts_is(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text('{"date": "2026-01-01"}')
    for part in ("red", "redder", "blue"):
        assert older_than_the_code(json.loads(file.read_text()))
        measured = benchmark(keeps_parts=True)
        measured.parse(["--only", part, "--out", str(file)])
        measured.write({})
    assert not older_than_the_code(json.loads(file.read_text()))


def test_what_a_doctor_found_on_a_gpu_is_a_line_of_what_has_run_where() -> None:
    [(_, here), *_] = doctors()
    gpu = {"name": "T4", "capability": [7, 5]}
    facts = here["facts"] | {"device": "cuda", "cuda": here["facts"]["cuda"] | {"gpus": [gpu]}}
    ill = [
        {"about": about, "says": "", "remedy": "mend it"} for about in ("bits", "trace", "Ctrl-C", "driver")
    ]
    *_, sent, macs, hosts = tried(
        [("a.json", here), ("b.json", here | {"facts": facts, "trial": ill})]
    ).splitlines()
    assert sent.startswith("| [T4](docs/doctor/b.json) | cuda |")
    assert sent.endswith("| bits, trace, Ctrl-C and 1 more |")
    assert [macs, hosts] == [f"| {kind} |  | nothing yet |  |" for kind in ("Apple silicon", "several hosts")]


@pytest.mark.parametrize("device", cluster_tokens.LOGGED.values())
def test_the_benchmarks_own_devices_are_devices(device: str) -> None:
    assert plugins.find("devices", device).__name__ == device.partition(":")[2]


def test_every_fault_that_the_lagging_device_has_to_find_can_be_planted() -> None:
    missing = [
        name for name, mutant in MUTANTS.items() if mutant.text not in (ROOT / mutant.path).read_text()
    ]
    assert not missing, "edit benchmarks/robustness/lagging_mutants.toml"
