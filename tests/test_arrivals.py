"""Requests that arrive over time, on the virtual clock: where they come from, and what the report says of them."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import moesched
from moesched.errors import BadInput
from moesched.runs.service_report import Objectives, parse_objectives, percentiles
from moesched.serving.arrival_files import random_arrivals, read_arrivals
from moesched.trace import check_trace, read_trace

pytestmark = pytest.mark.usefixtures("as_users_run")

MODEL: dict[str, Any] = {"model": "mixtral-0.8b", "machine": "t4", "policy": "resident"}


def test_random_arrivals_have_the_rate_and_the_lengths_that_were_given_and_depend_on_the_seed() -> None:
    requests = random_arrivals("poisson:4", [7] * 4000, 3, seed=1)
    assert {(each.prompt, each.new_tokens) for each in requests} == {(7, 3)}
    assert [each.number for each in requests] == list(range(4000))
    assert requests[-1].arrives / 1e9 == pytest.approx(1000, rel=0.05)
    gaps = [(after.arrives - before.arrives) / 1e9 for before, after in pairwise(requests)]
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)
    assert random_arrivals("poisson:4", [7] * 10, 3, seed=2) != requests[:10]


def test_a_file_has_one_request_a_line(tmp_path: Path) -> None:
    file = tmp_path / "arrivals.jsonl"
    file.write_text(
        '{"at": 0, "prompt_tokens": 9, "new_tokens": 2}\n\n'
        '{"at": 0.25, "prompt_tokens": 4, "new_tokens": 5, "user": "ann", "note": "ignored"}\n'
    )
    first, second = read_arrivals(file)
    assert (first.arrives, first.prompt, first.new_tokens, first.user) == (0, 9, 2, "")
    assert (second.number, second.arrives, second.user) == (1, 250_000_000, "ann")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "holds no requests"),
        (['{"at": 1, "prompt_tokens": 1, "new_tokens": 1}'] * 2 + ["{"], "jsonl:3: "),
        (['{"at": 1, "prompt_tokens": 0, "new_tokens": 1}'], "jsonl:1: .*>= 1"),
        (['{"at": -1, "prompt_tokens": 1, "new_tokens": 1}'], "at is -1.0: give 0 to 100,000,000 seconds"),
        (['{"at": 1e300, "prompt_tokens": 1, "new_tokens": 1}'], "at is 1e[+]300"),
        (['{"at": NaN, "prompt_tokens": 1, "new_tokens": 1}'], "jsonl:1"),
        (['{"prompt_tokens": 1, "new_tokens": 1}'], "missing required field `at`"),
        (
            [f'{{"at": {at}, "prompt_tokens": 1, "new_tokens": 1}}' for at in (2, 1)],
            "jsonl:2: at is 1.0, before the line before it: sort by the arrival",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: list[str], message: str) -> None:
    file = tmp_path / "arrivals.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(BadInput, match=message):
        read_arrivals(file)


def test_a_file_with_a_request_beyond_the_context_is_to_be_changed_itself(tmp_path: Path) -> None:
    file = tmp_path / "arrivals.jsonl"
    file.write_text('{"at": 0, "prompt_tokens": 32768, "new_tokens": 1}')
    with pytest.raises(
        BadInput, match=r"more than the context of mixtral-0.8b, 32768: shorten it in .*jsonl$"
    ):
        moesched.simulate_arrivals(**MODEL, arrivals=file)
    with pytest.raises(BadInput, match=r"32768: lower --gen, or choose another workload$"):
        moesched.simulate_arrivals(**MODEL, arrivals="poisson:1", workload="mtbench", gen=40_000)


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "x", "1e9", ""])
def test_a_rate_that_is_none_is_refused(rate: str) -> None:
    with pytest.raises(BadInput, match=r"give requests a second, from 0\.000001"):
        random_arrivals(f"poisson:{rate}", [1], 1)


def test_objectives_are_times_by_name() -> None:
    assert parse_objectives("ttft=2s, tpot=200ms") == Objectives(2.0, 0.2)
    assert parse_objectives("tpot=1ms") == Objectives(tpot=0.001)


def test_percentiles_of_no_times_are_none() -> None:
    assert percentiles([]) is None


def test_the_report_adds_up_and_more_load_means_longer_queues(tmp_path: Path) -> None:
    file = tmp_path / "arrivals.jsonl"
    file.write_text(
        "".join(json.dumps({"at": at / 4, "prompt_tokens": 20, "new_tokens": 8}) + "\n" for at in range(12))
    )
    quiet = moesched.simulate_arrivals(**MODEL, arrivals=file, batch_size=4, slo="ttft=10s,tpot=1us")
    assert (quiet.requests, quiet.left, quiet.measured) == (12, 0, False)
    assert quiet.tokens_per_second == pytest.approx(12 * 8 / quiet.seconds)
    assert quiet.requests_per_second == pytest.approx(12 / quiet.seconds)
    assert quiet.ttft is not None
    assert quiet.tpot is not None
    assert quiet.seconds == pytest.approx(11 / 4 + quiet.ttft.p50 + 7 * quiet.tpot.p50, rel=0.02)
    assert (quiet.kept, quiet.goodput) == (0.0, 0.0)
    burst = moesched.simulate_arrivals(
        **MODEL,
        workload="uniform",
        arrivals="poisson:1000",
        requests=24,
        gen=8,
        batch_size=4,
        slo="ttft=100s",
    )
    assert burst.kept == 1.0
    assert burst.goodput == pytest.approx(burst.requests_per_second)
    assert burst.queue[1] > quiet.queue[1] == 0
    assert burst.running[1] == 4
    assert 0 < burst.cache_held[0] <= burst.cache_held[1] <= 1
    assert burst.ttft is not None
    assert burst.ttft.p99 > quiet.ttft.p99
    assert burst.waited is not None
    assert burst.waited.p50 < burst.ttft.p50


def test_the_same_arrivals_give_the_same_report() -> None:
    one, other = (
        moesched.simulate_arrivals(
            **MODEL, workload="uniform", arrivals="poisson:20", requests=10, gen=4, seed=3
        )
        for _ in range(2)
    )
    assert one == other


def test_a_trace_shows_each_request_with_its_parts(tmp_path: Path) -> None:
    trace = tmp_path / "served.json"
    report = moesched.simulate_arrivals(
        **MODEL, workload="uniform", arrivals="poisson:1000", requests=6, gen=4, batch_size=2, trace=trace
    )
    assert check_trace(trace) == []
    spans = read_trace(trace).recording.requests
    assert [span.tokens for span in spans] == [4] * 6
    assert [span.request for span in spans] == list(range(6))
    for span in spans:
        assert span.arrived <= span.entered < span.first_token < span.ended
        assert [name for name, _, _ in span.parts][-2:] == ["prompt", "tokens"]
    waited = [span.entered - span.arrived for span in spans]
    assert max(waited) / 1e9 == pytest.approx(report.waited.p99, rel=0.2) if report.waited else False


def test_weights_that_were_unwired_while_nobody_asked_are_wired_again(tmp_path: Path) -> None:
    asked = MODEL | {"machine": "m2-ultra-macos14", "batch_size": 1}
    slowest = []
    for gap in (0.5, 100.0):
        file = tmp_path / f"{gap}.jsonl"
        file.write_text(
            "".join(f'{{"at": {at}, "prompt_tokens": 9, "new_tokens": 1}}\n' for at in (0.0, gap, 2 * gap))
        )
        report = moesched.simulate_arrivals(**asked, arrivals=file)
        assert report.ttft is not None
        slowest.append(report.ttft.p50)
    assert slowest[1] > 1.2 * slowest[0]


SERVED = (
    "simulate", "--model", "mixtral-0.8b", "--machine", "t4", "--policy", "cgopipe", "--workload", "uniform",
    "--gen", 4, "--requests", 6, "--arrivals", "poisson:10",
)  # fmt: skip


def test_the_command_prints_the_report_and_writes_it_as_json(command: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    said = command(*SERVED, "--slo", "ttft=10s", "--report", file)
    assert said.code == 0
    assert "6 completed" in said.out
    assert "objectives kept by 100.0%" in said.out
    written = json.loads(file.read_text())
    assert command(*SERVED, "--slo", "ttft=10s", "--json").json == written
    assert written["capacity"]["sequences"] * written["capacity"]["places"] <= 16
    assert written["objectives"] == {"ttft": 10.0, "tpot": None}
