"""Comparisons: runs side by side, from recordings, traces and reports, predicted against measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from commands import SIMULATE, refused
from moesched.analysis.compare import compare_runs, read_runs
from moesched.analysis.compared_runs import replayed_run, run_of_recording
from moesched.analysis.comparison import Comparison, Row, letters_of
from moesched.analysis.published import PREFILL_ERROR
from moesched.errors import BadInput
from moesched.plugins import make_policy
from moesched.runs.simulation import simulate
from moesched.trace import (
    LaneName,
    LastSteps,
    Recording,
    Slice,
    TaskInfo,
    check_trace,
    summarize,
    write_trace,
)
from runs import FORTY_PERCENT, make_plan, virtual_run
from traces import MEASURED, PREDICTED


def test_the_error_of_a_prediction_is_in_percent_of_what_was_measured() -> None:
    predicted = run_of_recording("p", recording(fetch=80), PREDICTED)
    measured = run_of_recording("m", recording(fetch=100), MEASURED)
    row = find(compare_runs([predicted, measured]), "kind", "fetch on link", "time")
    assert row.values == [80e-9, 100e-9]
    assert row.ratios == [1.0, 1.25]
    assert row.error_percents == [None, pytest.approx(-20)]
    row = find(compare_runs([measured, predicted]), "kind", "fetch on link", "time")
    assert row.ratios == [1.0, 0.8]
    assert row.error_percents == [None, pytest.approx(-20)]


def test_two_policies_differ_first_in_what_their_lanes_do() -> None:
    runs = [
        run_of_recording(policy, virtual.recording, virtual.about)
        for policy in ("expert_cache", "flexgen")
        for virtual in [virtual_run(policy, budgets=FORTY_PERCENT, requests=2)]
    ]
    comparison = compare_runs(runs)
    difference = comparison.difference
    assert difference is not None
    moved = next(each for each in difference.works if (each.what, each.lane) == ("bytes", "host->gpu"))
    assert moved.amounts == tuple(
        sum(
            each.task.nbytes
            for each in run.trace.recording.slices
            if each.step >= 0 and each.lane.name == "host->gpu"
        )
        for run in runs
        if run.trace is not None
    )
    shares = [each.amounts for each in difference.works if each.what == "experts"]
    assert [sum(of_all) for of_all in zip(*shares, strict=True)] == pytest.approx([1, 1])
    assert difference.works[-1].what == "hits"
    first = comparison.reasons()[1]
    assert first.startswith("host->gpu moved ")
    assert " in expert_cache and " in first
    assert comparison.causes()[1][-1][0] == "other tasks and their order"


def test_a_longer_run_of_the_same_tasks_in_more_steps_is_not_said_to_have_another_spread() -> None:
    runs = []
    for new_tokens in (2, 4):
        virtual = virtual_run("resident", new_tokens=new_tokens)
        runs.append(run_of_recording(str(new_tokens), virtual.recording, virtual.about))
    comparison = compare_runs(runs)
    assert comparison.difference is not None
    assert comparison.difference.works == []
    assert comparison.causes()[1][-1][0] == "other tasks and their order"


def test_neither_of_two_measured_runs_is_in_error() -> None:
    runs = [run_of_recording(str(length), recording(fetch=length), MEASURED) for length in (1000, 1500)]
    comparison = compare_runs(runs)
    row = find(comparison, "kind", "fetch on link", "time")
    assert (row.ratios, row.error_percents) == ([1.0, 1.5], [None, None])
    table = comparison.table()
    assert ["link", "busy", "1 µs", "1.5 µs", "1.500"] in table
    assert ["fetch on link", "moved", "1 KB", "1 KB", "1.000"] in table
    assert comparison.header()[-1] == "B/A"
    assert {len(line) for line in table} == {len(comparison.header())}
    assert msgspec.json.decode(msgspec.json.encode(comparison), type=Comparison) == comparison


def test_runs_of_different_models_are_told_apart_first() -> None:
    other = msgspec.structs.replace(MEASURED, model="n")
    runs = [run_of_recording(about.model, recording(fetch=10), about) for about in (MEASURED, other)]
    assert compare_runs(runs).reasons()[0] == "The models differ: m (measured) ran m, and n (measured) n."
    assert not compare_runs([runs[0], runs[0]]).reasons()[0].startswith("The models differ")


def test_what_only_one_run_has_stands_alone() -> None:
    both = [run_of_recording(verb, recording(**{verb: 10}), MEASURED) for verb in ("fetch", "pin")]
    found = {verb: find(compare_runs(both), "kind", f"{verb} on link", "time") for verb in ("fetch", "pin")}
    values, ratios, errors = zip(
        *((row.values, row.ratios, row.error_percents) for row in found.values()), strict=True
    )
    assert values == ([10e-9, None], [None, 10e-9])
    assert ratios == ([1.0, None], [None, None])
    assert errors == ([None, None], [None, None])


def test_more_than_two_runs_are_held_against_the_first() -> None:
    figures = {10: MEASURED, 20: MEASURED, 40: PREDICTED}
    runs = [
        run_of_recording(str(length), recording(fetch=length), about) for length, about in figures.items()
    ]
    row = find(compare_runs(runs), "lane", "link", "busy")
    assert row.ratios == [1.0, 2.0, 4.0]
    assert compare_runs(runs).answer() == "", "a prediction is not faster than a measurement"
    assert compare_runs(runs[1::-1]).answer() == (
        "Least time without loading: P (10) with 10 ns, link busy 100%. P (20) took 2.00 times as long, link busy 100%."
    )
    assert compare_runs(runs).header()[2:] == [
        "10 (measured)",
        "20 (measured)",
        "40 (predicted)",
        "B/A",
        "C/A",
        "error",
    ]


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (
            1e9 / 40,
            "Least time without loading: P (30) with 30 ns, link busy 100%. P (40) took 1.33 times as long, link",
        ),
        (
            1e8,
            "Most tokens a second without loading: P (40) with 100,000,000, link busy 100%."
            " P (30) had 0.33 times as many",
        ),
    ],
)
def test_runs_of_different_numbers_of_tokens_are_compared_by_their_rates(rate: float, said: str) -> None:
    runs = [
        run_of_recording(str(length), recording(fetch=length), replace(MEASURED, tokens_per_second=rate))
        for length, rate in ((30, 1e9 / 30), (40, rate))
    ]
    assert compare_runs(runs).answer().startswith(said)


def test_a_replay_has_its_own_rate() -> None:
    gap = recording(fetch=10, pin=10)
    gap.slices[1].start, gap.slices[1].end = 30, 40
    run = run_of_recording("a", gap, replace(MEASURED, tokens_per_second=1e8))
    rate = find(compare_runs([run, replayed_run(run)]), "total", "throughput", "rate")
    assert rate.values == [1e8, 2e8]


def test_what_ends_after_the_last_token_takes_no_time() -> None:
    lengths = {"fetch": 10, "sample": 5}
    runs = [
        run_of_recording("short", recording(**lengths), MEASURED),
        run_of_recording("long", recording(**lengths, prefetch=20), MEASURED),
    ]
    comparison = compare_runs(runs)
    assert find(comparison, "total", "run", "time").values == [15e-9, 15e-9]
    assert comparison.difference is not None
    assert comparison.difference.run_seconds == (15e-9, 15e-9)


def test_runs_beyond_the_letter_z_have_two_letters() -> None:
    assert [letters_of(number) for number in (1, 25, 26, 27, 52, 702)] == ["B", "Z", "AA", "AB", "BA", "AAA"]


def test_one_file_is_one_run(tmp_path: Path) -> None:
    run = virtual_run("cgopipe", budgets=FORTY_PERCENT)
    file = tmp_path / "a.json"
    write_trace(file, run.recording, run.about)
    for source in (file, str(file)):
        assert len(compare_runs(source, replayed=True).runs) == 2
        with pytest.raises(BadInput, match="1 run given: name two traces"):
            compare_runs(source)


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    files = [tmp_path / folder / "run.json" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text('{"lanes": {}}')
    assert [run.title for run in read_runs(files)] == list(map(str, files))


def test_a_run_equals_itself_in_every_row_and_differs_in_no_work(tmp_path: Path) -> None:
    run = virtual_run("cgopipe", budgets=FORTY_PERCENT)
    write_trace(tmp_path / "a.json", run.recording, run.about)
    write_trace(tmp_path / "b.json.gz", run.recording, run.about)
    comparison = compare_runs([tmp_path / "a.json", tmp_path / "b.json.gz"])
    assert all(row.values[0] == row.values[1] for row in comparison.rows)
    assert {row.section for row in comparison.rows} == {"total", "lane", "kind", "memory"}
    assert [run.title for run in comparison.runs] == ["a.json", "b.json.gz"]
    assert comparison.difference is not None
    assert comparison.difference.works == []


def test_a_trace_and_a_report_of_the_same_run_agree(tmp_path: Path) -> None:
    run = virtual_run("cgopipe", budgets=FORTY_PERCENT)
    write_trace(tmp_path / "trace.json", run.recording, run.about)
    policy = make_policy("cgopipe")
    report = simulate(make_plan(policy, budgets=FORTY_PERCENT), policy)
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(report))
    comparison = compare_runs([tmp_path / "trace.json", tmp_path / "report.json"])
    both = [row for row in comparison.rows if None not in row.values]
    assert {(row.section, row.name) for row in both} >= {
        ("total", "load"),
        ("total", "prefill"),
        ("total", "decode step"),
        ("lane", "accelerator"),
        ("lane", "host->gpu"),
        ("memory", "gpu"),
    }
    assert [row.values[1] for row in both] == pytest.approx([row.values[0] for row in both], rel=1e-8)


def test_a_report_that_tells_its_kinds_is_compared_by_kind(tmp_path: Path) -> None:
    kinds = summarize(recording(fetch=50)).kinds
    report = {"policy": "P", "tokens": [[1]], "lanes": {}, "kinds": msgspec.to_builtins(kinds)}
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(report))
    predicted = run_of_recording("p", recording(fetch=60), PREDICTED)
    comparison = compare_runs([tmp_path / "report.json", predicted])
    assert comparison.runs[0].figures == "measured"
    assert find(comparison, "kind", "fetch on link", "time").error_percents[1] == pytest.approx(20)


def test_the_first_step_of_a_trimmed_trace_has_no_say_in_the_mean() -> None:
    whole = virtual_run("cgopipe", budgets=FORTY_PERCENT, new_tokens=6)
    last = virtual_run("cgopipe", LastSteps(2), budgets=FORTY_PERCENT, new_tokens=6)
    run = run_of_recording("last", last.recording, last.about)
    row = find(compare_runs([run, run]), "total", "decode step", "time")
    ends = whole.generation.step_ends
    assert row.values[0] == pytest.approx((ends[5] - ends[4]) / 1e9)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"not JSON", "is not a JSON object"),
        (b"[1, 2]", "is not a JSON object"),
        (b"{}", "is neither the trace nor the report of a run: name a file that"),
        (b'{"ttft": 3}', "is not the report of a run: Expected `object"),
        (
            b'{"plan": {}, "ranking": []}',
            "is what `moesched plan` found.*: compare the reports of `moesched simulate",
        ),
        (b'{"nodes": 2, "ways": []}', "is what `moesched plan` found"),
        (b'{"lanes": 3}', "is not the report of a run: Expected `object`"),
        (b'{"traceEvents": []}', "is not a trace of moesched"),
        (b"\x1f\x8b\x00", "cannot read"),
    ],
)
def test_what_is_neither_trace_nor_report_is_named(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=complaint) as caught:
        compare_runs([path, path])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def recording(**lengths: int) -> Recording:
    """Transfers of 1,000 bytes each on one link, one after another, by verb and nanoseconds."""
    link, slices, now = LaneName(0, "link"), [], 0
    for number, (verb, length) in enumerate(lengths.items()):
        task = TaskInfo(verb, verb, "PageTransfer", "copy", "a->b", nbytes=1000)
        slices.append(Slice(number, link, task, 0, now, now + length))
        now += length
    return Recording([link], slices, [()] * len(slices), [])


def find(comparison: Comparison, section: str, name: str, what: str) -> Row:
    """One row of a comparison."""
    [row] = [row for row in comparison.rows if (row.section, row.name, row.what) == (section, name, what)]
    return row


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [["--beams", 2], ["--arrivals", "poisson:100", "--requests", 8]], ids=["beams", "arrivals"]
)
def test_a_trace_has_the_rate_of_its_report(more: list[Any], command: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    job = [*SIMULATE, "--policy", "cgopipe", "--batch-size", 4, "--gen", 3, *more]
    report = command(*job, "--trace", trace, "--json").json
    rows = command("compare", trace, trace, "--json").json["rows"]
    [rate] = [row["values"] for row in rows if row["unit"] == "tokens/s"]
    assert rate[0] in (report.get("throughput_tokens_per_second"), report.get("tokens_per_second"))


def test_requests_that_arrive_over_time_are_compared_by_the_times_of_requests(
    command: Any, tmp_path: Path
) -> None:
    job = [*SIMULATE, "--arrivals", "poisson:100", "--requests", 8, "--slo", "ttft=1s"]
    reports = {policy: tmp_path / f"{policy}.json" for policy in ("resident", "cgopipe")}
    made = {
        name: command(*job, "--policy", name, "--report", file, "--json").json
        for name, file in reports.items()
    }
    said = command("compare", *reports.values(), "--report", tmp_path / "page.html")
    medians = {name: report["ttft"]["p50"] for name, report in made.items()}
    best = min(medians, key=medians.__getitem__)
    assert said.out.startswith(f"Least median time to the first token: {best} ({best}.json) with ")
    rows = command("compare", *reports.values(), "--json").json["rows"]
    found = {(row["section"], row["name"], row["what"]): row["values"] for row in rows}
    assert found["request", "to the first token", "p50"] == list(medians.values())
    assert found["total", "objectives", "goodput"] == [report["goodput"] for report in made.values()]
    assert found["total", "throughput", "rate"] == [report["tokens_per_second"] for report in made.values()]


def test_a_trace_of_requests_that_arrive_has_no_prefill_and_no_decode_step(
    command: Any, tmp_path: Path
) -> None:
    trace, report = tmp_path / "trace.json", tmp_path / "report.json"
    job = [*SIMULATE, "--policy", "resident", "--gen", 3, "--arrivals", "poisson:1", "--requests", 3]
    command(*job, "--trace", trace, "--report", report)
    said = command("compare", trace, report).out
    assert "between tokens" in said
    assert "prefill" not in said and "decode step" not in said


def test_both_times_without_loading_count_from_the_first_task(command: Any, tmp_path: Path) -> None:
    early = recording(fetch=1000)
    late = replace(early, slices=[replace(each, start=500, end=1500) for each in early.slices])
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        write_trace(file, late, MEASURED)
    told, reason, *_ = command("compare", *files).out.splitlines()
    assert "Least time without loading: P (a.json) with 1 µs, " in told
    assert "b.json (measured) took 1 µs and a.json (measured) 1 µs" in reason


def test_compare_says_why_and_shows_a_run_beside_its_replay(command: Any, tmp_path: Path) -> None:
    trace, both = tmp_path / "trace.json", tmp_path / "both.json"
    command(*SIMULATE, "--policy", "cgopipe", "--batch-size", 4, "--gen", 3, "--trace", trace)
    said = command("compare", trace, "--replayed", "--trace", both)
    assert "trace.json replayed (predicted)" in said.out
    assert "explain" in said.out
    [published] = [line.split() for line in said.out.splitlines() if line.startswith("prefill, usual error")]
    assert published[3:] == [f"{PREFILL_ERROR:.0%}"], "a replay predicts no prefill"
    assert check_trace(both) == []
    told = command("compare", trace, "--replayed", "--json").json["difference"]
    assert told["run_seconds"][0] == pytest.approx(told["run_seconds"][1])


def test_the_name_of_a_compared_file_may_have_bytes_that_are_no_text(command: Any, tmp_path: Path) -> None:
    run = virtual_run("cgopipe", budgets=FORTY_PERCENT)
    file, both = tmp_path / os.fsdecode(b"\xff.json"), tmp_path / "both.json"
    write_trace(file, run.recording, run.about)
    said = command("compare", file, "--replayed", "--trace", both, "--json").json
    assert said["runs"][0]["title"] == r"\udcff.json"
    assert check_trace(both) == []


def test_compare_wants_two_files_of_ours(command: Any, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    refused(command("compare", tmp_path / "other.json"), "1 run given: name two")
    refused(
        command("compare", tmp_path / "other.json", tmp_path / "other.json"),
        r"other\.json is neither the trace nor the report of a run",
    )
