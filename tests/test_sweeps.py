"""Sweeps: axes, points and keys; all points run and are kept, whatever ends; figures and pictures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from commands import RUN_KEYS, refused
from moesched.errors import BadInput
from moesched.jobs.report import JobReport
from moesched.jobs.simulate_model import simulate_model, simulate_scenario
from moesched.sweeps.axes import Axes, merged, read_sweep, sweep_of_options
from moesched.sweeps.figures import METRICS, MachineFacts, best_by_case, pareto_front
from moesched.sweeps.found import Finder, options_of
from moesched.sweeps.line import Line, Sizes
from moesched.sweeps.plots import Picture, default_x, draw_sweep
from moesched.sweeps.store import Store
from moesched.sweeps.sweep import TRIED_FIRST, missing_points, run_sweep
from moesched.sweeps.workers import KILLED
from patience import PATIENCE_SECONDS, wait_until
from sweeping import FAULTY, SHORT, lines_in, prepared
from tables import table
from traces import largest_file


def test_a_sweep_runs_each_point_once_and_goes_on_after_a_line_that_was_cut_off(
    command: Any, tmp_path: Path
) -> None:
    out, picture, parquet = (tmp_path / name for name in ("x.jsonl", "x.png", "x.parquet"))
    policies = f"cgopipe,{FAULTY}:RaisesAtFour"
    wanted = (*SHORT[:-1], "1,4", "--policy", policies, "--out", out, "--json", "--workers", "2")
    said = command(*wanted, "--plot", picture, "--parquet", parquet)
    assert (said.code, "a policy prints" in said.err) == (1, True)
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
    assert (again.code, "1 point failed" in again.out) == (1, True)
    assert lines_in(out) == lines


def test_a_point_whose_process_is_killed_twice_or_whose_policy_changed_fails_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    policies = f"{FAULTY}:DiesAtFour,{FAULTY}:DiesOnce,resident"
    sweep = prepared(policy=policies, batch_size="4,1", settings=(f"mark={tmp_path / 'mark'}",))
    sweep.found.policies["resident"] = "an older one"
    changed = "policy resident changed while the sweep ran: run the sweep again"
    with Store(tmp_path / "x.jsonl") as store:
        result = run_sweep(sweep, store, workers=1)
        assert [line.failure for line in result.lines] == [KILLED, None, changed, None, None, changed]
        assert missing_points(sweep, store) == []
        assert missing_points(sweep, store, retry=True) == [sweep.points[number] for number in (0, 2, 5)]


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


def test_a_sweep_whose_points_all_fail_tells_the_first_reason_and_ends_early(
    command: Any, tmp_path: Path
) -> None:
    sizes = ",".join(map(str, range(1, 61)))
    wanted = (*SHORT[:-1], sizes, "--policy", "resident", "--budget", "gpu=100MB", "--workers", "1")
    said = command(*wanted, "--out", tmp_path / "x.jsonl")
    assert said.code == 1
    assert "resident on t4: policy Resident does not fit" in said.out
    assert "a point failed, and the sweep goes on: resident on t4: policy Resident does not fit" in said.err
    assert f"all {TRIED_FIRST} points that ran failed: the sweep ended early" in said.err
    tried = [line["inputs"]["batch_size"] for line in lines_in(tmp_path / "x.jsonl")]
    assert len(tried) == TRIED_FIRST and max(tried) > 40, "points from all parts"


@pytest.mark.parametrize(
    ("policies", "code"), [("layer_streaming", 0), ("layer_streaming,resident", 1), ("all", 0)]
)
def test_a_sweep_fails_at_its_end_if_a_policy_that_was_named_failed(
    command: Any, tmp_path: Path, policies: str, code: int
) -> None:
    said = command(
        *SHORT, "--policy", policies, "--budget", "gpu=700MB", "--out", tmp_path / "x.jsonl", "--workers", "1"
    )
    assert said.code == code
    assert ("resident on t4: policy Resident does not fit" in said.out) == (policies != "layer_streaming")
    assert said.out.startswith("best policy")


def test_a_sweep_that_ends_early_fails_even_if_earlier_points_succeeded(command: Any, tmp_path: Path) -> None:
    def sweep(budgets: str) -> Any:
        wanted = (*SHORT, "--policy", "all", "--budget", budgets, "--workers", "2")
        return command(*wanted, "--out", tmp_path / "x.jsonl")

    assert sweep("gpu=700MB").code == 0
    said = sweep("gpu=700MB,100MB")
    assert f"all {TRIED_FIRST} points that ran failed: the sweep ended early" in said.err
    assert said.code == 1


def test_results_are_printed_even_if_the_picture_cannot_be_drawn(command: Any, tmp_path: Path) -> None:
    def sweep(policy: str) -> Any:
        files = ("--out", tmp_path / "x.jsonl", "--plot", tmp_path / "x.png", "--y", "decode")
        return command(*SHORT, "--policy", policy, "--budget", "gpu=700MB", "--workers", "1", *files)

    said = sweep("layer_streaming")  # one token, and no decode step
    assert (said.code, said.out.startswith("best policy")) == (2, True)
    assert "no point has figures for batch_size and decode" in said.err
    said = sweep("resident")
    assert (said.code, "1 point failed" in said.out, "cannot draw" in said.err) == (1, True, False)


def test_an_input_whose_name_is_no_text_is_refused(command: Any) -> None:
    said = command(*SHORT, "--policy", "resident", "--machine", os.fsdecode(b"\xff.toml"))
    refused(said, r"--machine '\\udcff\.toml' is not UTF-8, as results are: rename the file")


# -- axes, points, keys, files and figures ---------------------------------------------------------

GUIDE = Path(__file__).parents[1] / "docs" / "sweeps.md"
FIGURES = MachineFacts({"t4": "gpu", "l4": "gpu"}, {"t4": 0.36})


POINT: dict[str, Any] = {
    "model": "mixtral-0.8b",
    "machine": "t4",
    "policy": "cgopipe",
    "workload": "mtbench",
    "gen": 2,
    "batch_size": 2,
    "micro_batch_size": 1,
}
ON_DEMAND = {"policy": "expert_cache", "gen": 4, "budgets": {"gpu": "700MB"}}
EXPERT_PARALLEL = {"machine": "m2-ultra", "policy": "ep_naive", "nodes": 2, "network": "10gbe"}


def with_value(point: dict[str, Any], axis: str, value: Any) -> dict[str, Any]:
    """The point with another value of an axis."""
    table, dot, key = axis.partition(".")
    return point | {table: {**point.get(table, {}), key: value} if dot else value}


def figures_of(report: JobReport) -> tuple[Any, ...]:
    """All that an option may change."""
    return report.step_seconds, report.plan, report.peak_bytes, report.throughput_tokens_per_second


def line(batch_size: int, policy: str, throughput: float, **more: Any) -> Line:
    """A point that a batch took on a T4, or on the machine that is given."""
    inputs = {"machine": more.pop("machine", "t4"), "batch_size": batch_size, "policy": policy}
    return Line(
        key=f"{inputs}",
        inputs=inputs,
        plan=Sizes(batch_size, 8),
        throughput_tokens_per_second=throughput,
        decode_tokens_per_second=throughput,
        peak_bytes={"gpu": 2_000_000_000},
        **more,
    )


def test_an_option_replaces_the_axis_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(
        'policy = "cgopipe"\nmachine = ["t4", "l4"]\nbatch_size = [1, 2]\n[settings]\nahead = [1, 2]\n'
        "[price]\nt4 = 0.5\n"
    )
    sweep = merged(read_sweep(file), sweep_of_options({"batch_size": ["4, 8"], "price": ["l4=1"]}))
    assert sweep.axes == {
        "model": ["mixtral-8x7b"],
        "machine": ["t4", "l4"],
        "workload": ["mtbench"],
        "batch_size": [4, 8],
        "policy": ["cgopipe"],
        "settings.ahead": [1, 2],
    }
    assert sweep.prices == {"t4": 0.5, "l4": 1.0}


def test_the_guide_names_every_figure() -> None:
    text = GUIDE.read_text()
    for name in METRICS:
        assert f"`{name}`" in text, name


CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "model": ({}, "mixtral-8x7b"),
    "format": ({}, "q4_k_m"),
    "machine": ({}, "l4"),
    "machine_set.link.host->gpu": ({}, "x0.1"),
    "nodes": (EXPERT_PARALLEL, 3),
    "network": (EXPERT_PARALLEL, "rocev2"),
    "tensor_parallel": ({"machine": "t4x2"}, 1),
    "workload": ({}, "summarization"),
    "gen": ({}, 3),
    "beams": ({}, 2),
    "routing": (ON_DEMAND, "zipf"),
    "routing_settings.exponent": (ON_DEMAND | {"routing": "zipf"}, 3.0),
    "preview_accuracy": (ON_DEMAND | {"policy": "prefetch_gate"}, 0.0),
    "budgets.gpu": ({}, "700MB"),
    "policy": ({"budgets": {"gpu": "700MB"}}, "layer_streaming"),
    "settings.kv_on_gpu": ({}, 1.0),
}
"""By axis, the other inputs of a point, and a value that changes its figures."""


@pytest.mark.parametrize("axis", CHANGES)
def test_an_option_of_a_simulation_reaches_it_and_its_key(axis: str) -> None:
    others, value = CHANGES[axis]
    points = [POINT | others, with_value(POINT | others, axis, value)]
    finder = Finder(each["policy"] for each in points)
    keys = [finder.key(each) for each in points]
    before, after = (
        simulate_scenario(finder.found.scenario(each, options_of(each)), options_of(each)) for each in points
    )
    assert keys[0] != keys[1]
    assert figures_of(before) != figures_of(after)
    assert figures_of(after) == figures_of(simulate_model(**points[1], band=False))


def test_a_setting_goes_to_the_policies_that_take_it() -> None:
    sweep = prepared(policy="cgopipe,resident", batch_size="1,2", settings=("ahead=1,2",))
    assert [(inputs["policy"], inputs.get("settings")) for _, inputs in sweep.points] == 2 * [
        ("cgopipe", {"ahead": 1}),
        ("cgopipe", {"ahead": 2}),
        ("resident", None),
    ]


def test_all_stands_for_the_policies_that_ship() -> None:
    policies = {inputs["policy"] for _, inputs in prepared(policy="all").points}
    assert {"cgopipe", "ep_naive", "twiddler"} < policies
    assert "adversarial" not in policies


def test_contents_count_and_not_only_names(tmp_path: Path) -> None:
    policy, machine, workload = (tmp_path / name for name in ("p.py", "m.toml", "w.toml"))
    (tmp_path / "helper.py").write_text("AHEAD = 1\n")
    policy.write_text(
        "try: from . import helper\nexcept ImportError: import helper\n"
        "from moesched.policies.cgopipe import CGOPipe\nclass Mine(CGOPipe): pass\n"
    )
    machine.write_text((Path(__file__).parents[1] / "moesched/machines/t4.toml").read_text())
    workload.write_text('name = "short"\nnew_tokens = [2]\nprompt_tokens = [3, 9]\n')

    def key() -> str:
        [(found, _)] = prepared(machine=str(machine), workload=str(workload), policy=f"{policy}:Mine").points
        return found

    keys = [key(), key()]
    machine.write_text("# a comment is no content\n" + machine.read_text())
    keys.append(key())
    assert len(set(keys)) == 1
    for file, before, after in (
        (machine, "65e12", "60e12"),
        (workload, "9", "8"),
        (policy, "pass", "x = 1"),
        (tmp_path / "helper.py", "1", "2"),
    ):
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, after))
        assert key() not in keys, file
        keys.append(key())


def test_the_newest_line_of_the_same_inputs_stays(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    with Store(out) as store:
        for key in ("one", "two", "other"):
            store.append(f'{{"key":"{key}","inputs":{{"seed":{int(key == "other")}}}}}\n'.encode())
        assert list(store.lines) == ["two", "other"]
    assert [text[:12] for text in out.read_text().splitlines()] == ['{"key":"two"', '{"key":"othe']


def test_a_key_of_several_inputs_does_no_harm(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    pairs = [("a", 1), ("a", 2), ("b", 1), ("c", 2)]
    out.write_text("".join(f'{{"key":"{key}","inputs":{{"seed":{seed}}}}}\n' for key, seed in pairs))
    with Store(out) as store:
        assert list(store.lines) == ["b", "c"]
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize("text", ["a note", '{"seed": 1}\n', '{"key":"a","inputs":{}}\n7\n'])
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, text: str) -> None:
    out = tmp_path / "x.jsonl"
    out.write_text(text)
    with pytest.raises(
        BadInput, match=r"x\.jsonl:\d: not a result of a sweep: .*; name another file with --out"
    ):
        Store(out)
    assert out.read_text() == text


@pytest.mark.parametrize("torn", [b"{", b'{"key":"b","inp'])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    out = tmp_path / "x.jsonl"
    whole = b'{"key":"a","inputs":{}}\n'
    out.write_bytes(whole + torn)
    with Store(out) as store:
        assert list(store.lines) == ["a"]
    assert out.read_bytes() == whole


def test_the_best_policy_of_each_case_is_told_with_the_next() -> None:
    lines = [line(1, "a", 5.0), line(1, "b", 8.0), line(2, "a", 3.0), line(2, "b", 9.0, failure="oh")]
    best = best_by_case(lines, {"batch_size": [1, 2], "policy": ["a", "b"]}, FIGURES)
    assert [(each.case, each.policy, each.next_best) for each in best] == [
        ({"batch_size": 1}, "b", ("a", 5.0)),
        ({"batch_size": 2}, "a", None),
    ]
    assert best[0].beside["latency"] == 1 / 8
    assert best[0].beside["memory"] == 2.0
    assert best[0].beside["dollars"] == pytest.approx(0.36 / 3600 / 8 * 1e6)


def test_the_pareto_front_has_the_points_that_no_other_beats() -> None:
    lines = [line(1, "a", 4.0), line(8, "a", 16.0), line(8, "b", 20.0), line(2, "b", 4.0), line(1, "c", 3.0)]
    front = pareto_front(lines, "latency", "throughput", FIGURES)
    assert [(each.inputs["batch_size"], each.inputs["policy"]) for each in front] == [(1, "a"), (8, "b")]


AXES: Axes = {"machine": ["t4", "l4"], "batch_size": [1, 64], "policy": ["a", "b"]}


def lines_at_all_points() -> list[Line]:
    return [
        line(size, policy, size * 2.0, machine=machine) for machine, size, policy in product(*AXES.values())
    ]


@pytest.mark.parametrize(
    "picture", [Picture("batch_size", "throughput"), Picture("latency", "dollars", True)]
)
def test_pictures_name_policies_and_machines(tmp_path: Path, picture: Picture) -> None:
    lines = lines_at_all_points()
    draw_sweep(tmp_path / "x.svg", picture, lines, AXES, FIGURES)
    drawn = (tmp_path / "x.svg").read_text()
    shown = ["Pareto front", "t4, a", "others"] if picture.pareto else ["a", "b", "t4", "l4"]
    assert all(f">{text}<" in drawn for text in shown)
    assert default_x(AXES) == "batch_size"
    with pytest.raises(
        BadInput, match="no point has figures for batch_size and dollars; dollars need --price"
    ):
        draw_sweep(
            tmp_path / "y.svg", Picture("batch_size", "dollars"), lines, AXES, FIGURES._replace(prices={})
        )


@pytest.mark.parametrize(
    ("x", "joined"), [("machine", False), ("batch_size", True), ("policy", False), ("budgets.gpu", False)]
)
def test_curves_join_numbers_only_and_a_title_names_what_all_points_share(
    tmp_path: Path, x: str, joined: bool
) -> None:
    lines = lines_at_all_points()
    for each in lines:
        of_both_kinds = 8_000_000_000 if each.inputs["machine"] == "t4" else "16GB"
        each.inputs.update(model="m", workload="a/w.toml", budgets={"gpu": of_both_kinds})
    draw_sweep(tmp_path / "x.svg", Picture(x, "throughput"), lines, AXES, FIGURES)
    drawn = (tmp_path / "x.svg").read_text()
    assert ("stroke-width: 1.2; stroke-linecap: square" in drawn) == joined
    assert drawn.count(">m, a/w.toml<") == 1, "b/w.toml is another"
    assert drawn.count(">t4<") == 1, "as a tick or as the title of its panel"


def test_a_picture_of_many_series_names_the_best(tmp_path: Path) -> None:
    policies = [f"policy-{number}" for number in range(24)]
    lines = [line(1, policy, 1.0 + number) for number, policy in enumerate(policies)]
    for each in lines:
        each.inputs["dtype"] = "float32"
    not_taken: Axes = {"settings.ahead": [1, 2], "settings.slots": [1, 2]}
    axes: Axes = {"machine": ["t4"], "policy": policies, **not_taken, "dtype": ["float32", "bfloat16"]}
    draw_sweep(tmp_path / "x.svg", Picture("batch_size", "throughput"), lines, axes, FIGURES)
    drawn = (tmp_path / "x.svg").read_text()
    assert [f">{policy}, float32<" in drawn for policy in policies] == 4 * [False] + 20 * [True]
    assert ">the best 20 of 24<" in drawn


@pytest.mark.parametrize(
    ("text", "said"),
    table("broken_files.md", "Sweeps"),
)
def test_a_file_that_is_no_sweep_is_refused_in_one_line(
    command: Any, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "s.toml").write_text(text)
    refused(command("sweep", tmp_path / "s.toml", "--policy", "resident", "--machine", "t4"), said)


def test_results_never_replace_an_input(command: Any, tmp_path: Path) -> None:
    policy = tmp_path / "p.py"
    policy.write_text(FAULTY.read_text())
    given = (*SHORT, "--policy", f"{policy}:RaisesAtFour", "--out", policy)
    refused(command(*given), "which this command reads: name another file")


def test_a_dry_run_only_counts(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = (*SHORT[:-1], "1,2", "--policy", "all", "--dry-run")
    assert command(*given, "--json").json["points"] == 2 * 26
    assert "52 points" in command(*given).out
    assert list(tmp_path.iterdir()) == []
