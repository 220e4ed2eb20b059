"""The benchmarks' command lines: help without a run, the same options, and result files that say what they measured."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import cluster_tokens
import pytest
import reproduce
from _options import Benchmark
from _results import older_than_the_code, source_hash
from _tried_table import doctors, tried

from moesched import plugins

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("[!_]*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_printed_without_a_run_and_names_the_common_options(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(option in said for option in ("--only", "--rounds", "--out"))


def benchmark(*, keeps_parts: bool = False) -> Benchmark:
    return Benchmark(
        "A test.",
        "test",
        measures=("moesched/tasks.py",),
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


def test_a_result_records_how_it_came_about(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    measured = benchmark()
    measured.parse(["--out", str(file)])
    measured.write({"figure": 1})
    result = json.loads(file.read_text())
    assert result["command"] == f"python benchmarks/test.py --out {file}"
    assert result.keys() >= {"date", "commit", "machine"}
    assert result["other_cores"].keys() == {"before", "during"}
    assert result["measures"]["hash"] == source_hash(["benchmarks/test.py", "moesched/tasks.py"])
    assert not older_than_the_code(result)
    assert result["figure"] == 1


def test_a_result_is_older_than_the_code_if_a_source_changed_or_none_was_recorded() -> None:
    assert older_than_the_code({})
    assert older_than_the_code({"measures": {"paths": ["moesched/tasks.py"], "hash": "another"}})


def test_parts_measured_later_leave_the_age_of_the_others(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"date": "2026-01-01", "figure": 1}))
    measured = benchmark(keeps_parts=True)
    measured.parse(["--only", "red", "--out", str(file)])
    measured.write({"figure": 2})
    result = json.loads(file.read_text())
    assert (result["figure"], result["date"]) == (2, "2026-01-01")
    assert result["parts"]["blue"] == {"date": "2026-01-01"}
    assert result["parts"]["red"]["command"] == f"python benchmarks/test.py --only red --out {file}"
    assert older_than_the_code(result)


def test_a_first_result_of_some_parts_tells_of_no_others(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    for part in ("red", "blue"):
        measured = benchmark(keeps_parts=True)
        measured.parse(["--only", part, "--out", str(file)])
        measured.write({})
    assert list(json.loads(file.read_text())["parts"]) == ["red", "blue"]


def test_a_file_of_several_keeps_its_own_parts_only(tmp_path: Path) -> None:
    for part in ("red", "redder"):
        measured = benchmark(keeps_parts=True)
        measured.parse(["--only", part])
        measured.write({}, tmp_path / "reds.json", ["red", "redder"])
    assert list(json.loads((tmp_path / "reds.json").read_text())["parts"]) == ["red", "redder"]


def test_a_section_made_anew_leaves_the_others_of_its_paper() -> None:
    older = of_paper(
        [{"name": "b", "rows": [1]}, {"name": "c", "rows": [1]}], accuracy=0.1, wall_seconds=90.0
    )
    found = of_paper(
        [{"name": "b", "rows": [2]}, {"name": "a", "rows": [2]}], accuracy=None, wall_seconds=1.0
    )
    kept = reproduce.within({"commit": "of the whole", **older}, found, ["a", "b", "c"])
    assert [(each["name"], each["rows"]) for each in kept["sections"]] == [("a", [2]), ("b", [2]), ("c", [1])]
    assert (kept["accuracy"], kept["wall_seconds"]) == (0.1, 90.0)
    assert "commit" not in kept, "the benchmark writes it"
    with pytest.raises(SystemExit, match="its rates changed; choose all of its sections"):
        reproduce.within(older | {"calibration": ["another"]}, found, ["a", "b", "c"])


def of_paper(sections: list[dict[str, Any]], **figures: float | None) -> dict[str, Any]:
    return {"paper": "moe-lightning", "calibration": ["a rate"], "sections": sections, **figures}


def test_a_result_is_of_the_code_of_today_once_each_of_its_parts_is(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text('{"date": "2026-01-01"}')
    for part in ("red", "redder", "blue"):
        assert older_than_the_code(json.loads(file.read_text()))
        measured = benchmark(keeps_parts=True)
        measured.parse(["--only", part, "--out", str(file)])
        measured.write({})
    assert not older_than_the_code(json.loads(file.read_text()))


def test_a_result_that_is_only_summed_up_anew_keeps_its_machine_and_its_date(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"date": "2026-01-01", "machine": {"processor": "another"}, "figure": 1}))
    measured = benchmark(keeps_parts=True)
    measured.parse(["--rounds", "0", "--out", str(file)])
    measured.write({"figure": 2})
    assert json.loads(file.read_text()) == {
        "date": "2026-01-01",
        "machine": {"processor": "another"},
        "figure": 2,
    }


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
