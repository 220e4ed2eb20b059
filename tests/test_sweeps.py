"""Sweeps run all points, keep them as they come, go on after any end, and lose none."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from commands import RUN_KEYS, in_one_line, refused
from moesched.sweeps.store import Store
from moesched.sweeps.sweep import TRIED_FIRST, missing_points, run_sweep
from moesched.sweeps.workers import KILLED, Workers
from patience import PATIENCE_SECONDS, wait_until
from sweeping import FAULTY, SHORT, lines_in, prepared
from traces import largest_file


def test_a_sweep_runs_each_point_once_and_goes_on_after_a_line_that_was_cut_off(
    command: Any, tmp_path: Path
) -> None:
    out, picture, parquet = (tmp_path / name for name in ("x.jsonl", "x.png", "x.parquet"))
    policies = f"cgopipe,{FAULTY}:RaisesAtFour"
    wanted = (*SHORT[:-1], "1,4", "--policy", policies, "--out", out, "--json", "--workers", "2")
    said = command(*wanted, "--plot", picture, "--parquet", parquet)
    assert (said.code, "a policy prints" in said.err) == (0, True)
    assert said.json["points"] == said.json["done"] == 4
    assert [each["case"] for each in said.json["best"]] == [{"batch_size": 1}, {"batch_size": 4}]
    assert said.json["best"][1]["policy"] == "cgopipe"
    [failure] = said.json["failures"]
    assert failure["inputs"]["batch_size"] == 4
    assert f"{FAULTY}:" in failure["failure"] and "ZeroDivisionError: four" in failure["failure"]
    lines = lines_in(out)
    assert len(lines) == 4
    assert all(line["code"] and line["inputs"]["gen"] == 1 for line in lines)
    assert all(line.keys() >= RUN_KEYS - {"tokens", "text"} for line in lines if not line["failure"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert parquet.read_bytes().startswith(b"PAR1")
    out.write_bytes(out.read_bytes()[:-100])
    again = command(*wanted[:-3])
    assert "4 of 4 points done, 3 of them from earlier" in again.out
    assert "1 points failed" in again.out
    assert lines_in(out) == lines


def test_a_process_that_is_killed_takes_no_other_point_with_it_and_its_own_has_a_second_try(
    tmp_path: Path,
) -> None:
    policies = f"{FAULTY}:DiesAtFour,{FAULTY}:DiesOnce"
    sweep = prepared(policy=policies, batch_size="4,1", settings=(f"mark={tmp_path / 'mark'}",))
    with Store(tmp_path / "x.jsonl") as store:
        result = run_sweep(sweep, store, workers=1)
        assert [line.failure for line in result.lines] == [KILLED, None, None, None]
        assert missing_points(sweep, store) == []
        assert missing_points(sweep, store, retry=True) == sweep.points[:1]


def test_a_policy_that_changes_before_a_process_loads_it_fails_its_points(tmp_path: Path) -> None:
    sweep = prepared()
    sweep.found.policies["resident"] = "an older one"
    with Store(tmp_path / "x.jsonl") as store:
        [line] = run_sweep(sweep, store, workers=1).lines
    assert line.failure == "policy resident changed while the sweep ran: run the sweep again"


def test_a_sweep_that_is_stopped_ends_its_processes_in_the_middle_of_a_point(tmp_path: Path) -> None:
    sweep = prepared(policy=f"resident,{FAULTY}:NeverPlans")
    with Workers(sweep.found, 2) as workers:
        lines = workers.lines(sweep.points)
        assert b"simulated_seconds" in next(lines)
        workers.stop()
        assert list(lines) == []


def test_a_full_disk_keeps_what_is_done(command: Any, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    out.write_text(kept := '{"key":"other","inputs":{}}\n')
    with largest_file(len(kept) + 2_000):
        said = command(*SHORT, "--policy", "resident", "--out", out, "--json")
    refused(
        said, rf"cannot write results to {out}: .*: all finished ones are in it; free some space, and run the"
    )
    assert out.read_text() == kept


def test_a_signal_ends_a_sweep_in_order_and_another_one_cannot_write_meanwhile(
    command: Any, tmp_path: Path
) -> None:
    out = tmp_path / "x.jsonl"
    wanted = (*SHORT, "--policy", f"resident,{FAULTY}:NeverPlans", "--out", out, "--workers", "1")
    arguments = [sys.executable, "-m", "moesched", *map(str, wanted)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: out.exists() and out.stat().st_size, "the first line")
        refused(
            command(*SHORT, "--policy", "resident", "--out", out),
            "another sweep writes to .*: wait until it ends, or name another file with --out",
        )
        process.send_signal(signal.SIGTERM)
        said, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 143
    assert err == "moesched: interrupted (SIGTERM) after 1 of 2 points: run the same command again to go on\n"
    assert "1 of 2 points done" in said
    assert [line["failure"] for line in lines_in(out)] == [None]


def test_a_sweep_whose_points_all_fail_has_failed(command: Any, tmp_path: Path) -> None:
    said = command(*SHORT, "--policy", "resident", "--budget", "gpu=100MB", "--out", tmp_path / "x.jsonl")
    assert said.code == 1
    assert "resident on t4: policy Resident does not fit" in said.out


def test_a_sweep_whose_points_all_fail_tells_the_first_reason_and_ends_early(
    command: Any, tmp_path: Path
) -> None:
    sizes = ",".join(map(str, range(1, 61)))
    wanted = (*SHORT[:-1], sizes, "--policy", "resident", "--budget", "gpu=100MB", "--workers", "1")
    said = command(*wanted, "--out", tmp_path / "x.jsonl")
    assert said.code == 1
    assert "a point failed, and the sweep goes on: resident on t4: policy Resident does not fit" in said.err
    assert f"all {TRIED_FIRST} points that ran failed: the sweep ended early" in said.err
    tried = [line["inputs"]["batch_size"] for line in lines_in(tmp_path / "x.jsonl")]
    assert len(tried) == TRIED_FIRST and max(tried) > 40, "points from all parts"


def test_an_unwritable_picture_is_refused_before_the_first_point(command: Any, tmp_path: Path) -> None:
    said = command(
        *SHORT, "--policy", "resident", "--out", tmp_path / "x.jsonl", "--plot", tmp_path / "no" / "x.png"
    )
    assert said.code == 2
    in_one_line(said, "cannot write picture .*: make its folder first")
    assert not (tmp_path / "x.jsonl").exists()
