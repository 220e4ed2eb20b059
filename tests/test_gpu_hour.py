"""gpu_hour.py: its rows on an imitated GPU, what it leaves out and why, and what its figures and bars say."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import gpu_hour
from benchmarks.gpu._claims import claims as bars
from benchmarks.gpu._figures import of_run
from benchmarks.gpu._peers import llama_cpp
from benchmarks.gpu._policies import Case, in_turn
from benchmarks.gpu._preparations import Preparation, Preparations
from benchmarks.gpu._rows import IN_ORDER, PARTS, Bench, Places, Row, rows
from benchmarks.gpu._sizes import FULL, SMALL, Sizes
from benchmarks.record.results import RESULTS, stored
from benchmarks.shared.fresh_process import FreshProcess, RowFailed, in_fresh_process
from benchmarks.shared.kept_models import kept_model

OTHERS = "others"


# ---------------------------------------------------------------- on an imitated GPU


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    """The result of all parts but that of other programs."""
    folder = tmp_path
    out = folder / "hour.json"
    mine = [part for part in PARTS if part != OTHERS]
    models = folder / "models"
    assert gpu_hour.main(["--small", "--part", *mine, "--model-dir", str(models), "--out", str(out)]) == 0
    assert {each.name for each in models.iterdir()} == {"large-model", "model", "gpt-oss-20b"}
    return stored(out)


def test_every_row_that_needs_no_gpu_runs_on_an_imitated_one(small: dict[str, Any]) -> None:
    wanted = {row.name for row in rows(SMALL) if not row.on_gpus and row.part != OTHERS}
    assert small["rows"].keys() == wanted
    on_gpus = {row.name for row in rows(SMALL) if row.on_gpus and row.part != OTHERS}
    assert small["left_out"] == dict.fromkeys(on_gpus, "it needs a GPU")
    assert small["rows"]["limits"].keys() >= {"to_gpu", "gpu_memory", "host_memory", "gpu_flops"}
    choices = small["rows"]["choices of the device"]
    assert choices["attention"]["math"]["typical"] > 0
    assert choices.keys() >= {"launches", "alignment", "reads"}
    assert small["rows"]["gpt-oss-20b, resident"]["tokens_of_the_cpu"] is True
    for name in ("layer_streaming", "flexgen, staged", "large, cgopipe", "gpt-oss-20b, streamed"):
        streams = small["rows"][name]
        assert streams["plan"]["streamed_pages"] > 0
        assert streams["link_bytes_per_second"] > 0
        assert streams["expected"] is None and "calibration" in streams["no_expectation"]
    assert small["rows"]["cgopipe, staged"]["peak_bytes"]["pinned"] > 0
    ordered = small["rows"]["ten policies in order"]
    assert [case["policy"] for case in ordered["cases"]] == list(IN_ORDER)
    assert ordered["left_out"] == {}
    assert len({case["tokens"] for case in ordered["cases"]}) == 1
    assert all(case["peak_bytes"]["planned"] <= SMALL.gpu for case in ordered["cases"])
    assert (small["small"], small["claims"], small["gpu"]["name"]) == (True, [], "none"), (
        "no bars for tiny models"
    )


# ---------------------------------------------------------------- which rows are measured


def bench(folder: Path, sizes: Sizes = SMALL) -> Bench:
    return Bench(sizes, Places(folder, folder, None, None))


def measured(
    folder: Path,
    *given: Row,
    sizes: Sizes = SMALL,
    seconds: float = 60.0,
    making: dict[str, Preparation] | None = None,
) -> tuple[int, dict[str, Any]]:
    """The exit code and the result file of an hour of these rows."""
    out = folder / "hour.json"
    gpu_hour.BENCHMARK.parse(["--out", str(out)])
    with Preparations(making or {}) as made:
        code = gpu_hour.Hour(bench(folder, sizes), made, seconds).run(list(given))
    return code, stored(out)


def row(name: str, measure: Callable[[], dict[str, Any]] = dict, **needs: Any) -> Row:
    return Row(name, "limits", 1.0, lambda bench, seconds: measure(), **needs)


def test_a_row_that_fails_is_named_with_its_line_and_the_others_go_on_until_ctrl_c(tmp_path: Path) -> None:
    def fails() -> dict[str, Any]:
        raise RowFailed("out of memory")

    def pressed() -> dict[str, Any]:
        raise KeyboardInterrupt

    code, result = measured(tmp_path, row("one", fails), row("other", lambda: {"figure": 3}))
    assert code == 1
    assert result["left_out"] == {"one": "failed: out of memory"}
    assert result["rows"]["other"]["figure"] == 3
    code, result = measured(tmp_path, row("one"), row("other", pressed), row("last"))
    assert (code, [*result["rows"]]) == (130, ["one"])
    assert result["interrupted"] is True


def test_rows_that_time_a_package_or_memory_does_not_hold_are_left_out_by_name(tmp_path: Path) -> None:
    code, result = measured(
        tmp_path,
        row("quick"),
        row("package", packages=("no_such_package",)),
        row("memory", gpu_bytes=9e9),
        row("unasked", after=("llama.cpp",)),
        Row("long", "limits", 60.0, lambda bench, seconds: {}),
        sizes=FULL,
        seconds=30.0,
    )
    assert code == 0
    assert [*result["rows"]] == ["quick"]
    assert result["left_out"].pop("long").startswith("it takes 60 s, and ")
    assert result["left_out"] == {
        "package": "no_such_package is not installed",
        "memory": "it takes 9 GB of the GPU, which has 0",
        "unasked": "llama.cpp was not asked for",
    }


def test_rows_that_need_nothing_are_measured_while_others_wait_and_say_beside_what(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    _, result = measured(
        tmp_path,
        row("needs it", after=("model",)),
        row("lets it end", lambda: {"written": pipe.write_text("done")}),
        making={"model": Preparation(Path.read_text, (pipe,))},
    )
    assert [*result["rows"]] == ["lets it end", "needs it"]
    assert result["rows"]["lets it end"]["beside"] == ["model"]
    assert result["rows"]["needs it"]["beside"] == []
    making = {"model": Preparation(int, ("x",)), "file": Preparation(int, (1,), ("model",))}
    _, result = measured(
        tmp_path, row("needs it", after=("model",)), row("more", after=("file",)), making=making
    )
    assert result["left_out"]["needs it"].startswith("model: ValueError: invalid literal")
    assert result["left_out"]["more"].startswith("file: model: ValueError: invalid literal")


def test_the_bars_of_the_parts_that_were_measured_are_stored(tmp_path: Path) -> None:
    out = tmp_path / "hour.json"
    gpu_hour.BENCHMARK.parse(["--only", "streaming", "--out", str(out)])
    streams = {
        "part": "streaming",
        "policy": "layer_streaming",
        "decode_step_seconds": {"median": 0.5},
        "link_bytes_per_second": 9.5e9,
        "load_seconds": 1.0,
        "first_over_median": 1.0,
        "expected": None,
    }
    rows = {"limits": {"part": "limits", "to_gpu": 1e10}, "layer_streaming": streams}
    gpu_hour.BENCHMARK.write({"small": False, "rows": rows})
    found = stored(out)
    assert (found["claims"][0]["figure"], found["claims"][0]["reached"]) == ("0.95", True)
    assert any("layer_streaming" in line and "500.0" in line for line in found["tables"]["gpu-runs"])


def test_a_long_row_is_measured_after_all_that_wait_for_a_preparation(tmp_path: Path) -> None:
    pipe, written = tmp_path / "pipe", tmp_path / "written"
    os.mkfifo(pipe)
    _, result = measured(
        tmp_path,
        row("long", alone=True),
        row("lets it end", lambda: {"bytes": pipe.write_text("done")}),
        row("needs what follows", after=("file",)),
        making={
            "model": Preparation(Path.read_text, (pipe,)),
            "file": Preparation(Path.touch, (written,), ("model",)),
        },
    )
    assert next(iter(result["rows"])) == "lets it end"
    assert result["rows"]["long"]["beside"] == []
    assert written.exists()


# ---------------------------------------------------------------- processes and other programs


def test_a_call_that_is_not_done_in_time_ends_with_the_programs_that_it_started(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = FreshProcess(subprocess.check_call, ["sh", "-c", f"exec 3> {pipe}; sleep 600; true"])
    with pipe.open() as written:  # returns once the program has opened it, too
        with pytest.raises(RowFailed, match="not done within 0 s"):
            process.result(0.0)
        assert written.read() == ""  # which ends when nobody has it open any more


def test_a_call_that_kills_its_process_is_named_by_its_exit_code() -> None:
    with pytest.raises(RowFailed, match="ended with 3: no message"):
        in_fresh_process(os._exit, 3, seconds=60.0)


def program(folder: Path, script: str) -> Path:
    file = folder / "llama-batched-bench"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def test_llama_cpp_s_rates_are_read_batch_by_batch(tmp_path: Path) -> None:
    line = json.dumps({"pl": 16, "pp": 512, "tg": 32, "speed_pp": 20000.5, "speed_tg": 900.25})
    found = llama_cpp(program(tmp_path, f"echo loading; echo '{line}'"), tmp_path, (1, 16), 512, 32)
    assert found["batches"] == {
        "16": {"prefill_tokens_per_second": 20000.5, "decode_tokens_per_second": 900.25}
    }
    with pytest.raises(RowFailed, match="llama-batched-bench ended with 1: no such device"):
        llama_cpp(program(tmp_path, "echo no such device >&2; exit 1"), tmp_path, (1,), 512, 32)


# ---------------------------------------------------------------- figures and bars


def report(steps: list[float], new_tokens: int, **more: Any) -> dict[str, Any]:
    kinds = [
        {"kind": "load", "lane": "host->gpu", "tasks": 1, "seconds": 1.0, "bytes": 1e12},
        {"kind": "fetch", "lane": "host->gpu", "tasks": 4, "seconds": 2.0, "bytes": 60e9},
        {"kind": "cpu_attention", "lane": "host", "tasks": 4, "seconds": 0.5, "bytes": 10e9},
    ]
    return {
        **dict.fromkeys(("policy", "machine", "budget_bytes", "peak_bytes", "load_seconds", "wall_seconds")),
        "throughput_tokens_per_second": 10.0,
        "plan": {"new_tokens": new_tokens},
        "step_seconds": steps,
        "kinds": [{**kind, "gigabytes_per_second": 0.0} for kind in kinds],
        "lanes": {"host->gpu": {"busy_seconds": 2.0}},
        **more,
    }


def test_a_run_s_figures_are_those_of_its_decode_steps() -> None:
    found = of_run(report([3.0, 0.9, 0.5, 1.0, 0.4, 0.5], 3))
    assert found["total_seconds"] == pytest.approx(6.3)
    assert found["prefill_seconds"] == {"first": 3.0, "last": 1.0}
    assert found["decode_step_seconds"]["median"] == 0.5
    assert found["first_over_median"] == 3.0  # of the prompts of two batches; 1.8 of decode steps
    assert found["link_bytes_per_second"] == 60e9 / 6 / 0.5  # loading is no part of it
    assert found["host_attention_bytes_per_second"] == 20e9
    assert found["expected"] is None


@pytest.mark.parametrize(("low", "inside"), [(9.0, True), (10.5, False)])
def test_a_prediction_says_how_far_it_is_off_and_whether_the_run_is_in_its_band(
    low: float, inside: bool
) -> None:
    expected = {
        "step_seconds": [1.0, 1.1],
        "lanes": {},
        "band": {"throughput_tokens_per_second": (low, 11.0, 12.0)},
    }
    found = of_run(report([1.0, 1.0], 2, expected=expected))["expected"]
    assert found["over_measured"] == pytest.approx(1.05)
    assert found["inside_band"] is inside


def case(policy: str, measured: float, predicted: float, lane: float = 1.0) -> dict[str, Any]:
    return {
        "policy": policy,
        "total_seconds": measured,
        "lanes": {"accelerator": measured / 2, "host": 0.0},
        "expected": {
            "total_seconds": predicted,
            "over_measured": predicted / measured,
            "lanes": {"accelerator": lane * measured / 2},
        },
    }


def test_policies_count_as_ordered_where_their_times_are_apart() -> None:
    cases = [
        case("one", 1.0, 1.1),
        case("near it", 1.04, 1.0),
        case("slow", 2.0, 1.05),
        case("slower", 3.0, 3.1, 0.7),
    ]
    found = {bar.words.rpartition(", ")[2]: (bar.figure, bar.reached) for bar in bars(of_cases(cases))}
    assert found == {
        "pairs that are in the predicted order": ("4 of 5", False),
        "totals predicted within 15 %": ("3 of 4", False),
        "busy lanes predicted within 20 %": ("3 of 4", False),
    }
    right = [case("one", 1.0, 1.1), case("two", 2.0, 2.0), case("three", 3.0, 3.1)]
    assert all(bar.reached for bar in bars(of_cases(right)))
    assert [*bars({"small": False, "models": {}, "rows": {}})] == [], "only what was measured has bars"


def of_cases(cases: list[dict[str, Any]]) -> dict[str, Any]:
    return {"small": False, "models": {}, "rows": {"ten policies in order": {"cases": cases}}}


def test_a_case_that_there_is_no_time_for_or_that_does_not_fit_is_named(tmp_path: Path) -> None:
    kept_model(SMALL.model, tmp_path / "model")
    cases = [
        Case("flexgen", SMALL.ordered, gpu=1000),
        Case("layer_streaming", SMALL.ordered, SMALL.gpu),
        Case("cgopipe", SMALL.ordered, SMALL.gpu),
    ]
    found = in_turn(tmp_path / "model", SMALL.device, "auto", cases, seconds=1e-3)
    assert found["cases"] == []
    assert "does not fit" in found["left_out"]["flexgen"]
    assert found["left_out"]["cgopipe"].endswith("s were left")


def test_the_first_gpu_missed_its_bars_and_a_faster_link_would_reach_one() -> None:
    result = stored(RESULTS / "gpu_hour-h100.json")
    assert all(bar.reached is False for bar in bars(result))
    result["rows"]["cgopipe"]["link_bytes_per_second"] *= 6.5
    [reached] = [bar for bar in bars(result) if bar.reached]
    assert "`cgopipe`: the link's rate" in reached.words and reached.figure == "0.97"
