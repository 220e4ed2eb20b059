"""Benchmarks beside other programs: their processes, the limits of rows, and the files that are written for them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.comparison import equal_tokens, ratios
from benchmarks.peers.environment import Peer
from benchmarks.peers.memory_cap import VERSION_1, VERSION_2, MemoryCap
from benchmarks.peers.protocol import Worker
from benchmarks.peers.rounds import Field, Results, turned, undisturbed
from benchmarks.record.results import ROOT
from benchmarks.shared.limits import limit_of, measured_flops, read_limit

DOINGS = ("answer", "raise", "hang", "end")
FAKE = Peer("fake", "fake_peer", settings={doing: {"do": doing} for doing in DOINGS}, seconds=3.0)


def start(peer: Peer, *arguments: str) -> Worker:
    script = Path(__file__).with_name("fake_peer.py")
    return Worker([sys.executable, str(script), *arguments], {"PYTHONPATH": str(ROOT)}, 20)


@pytest.fixture
def field() -> Iterator[Field]:
    rates = count(50)
    with Field([FAKE], patience=0, start=start, rate=lambda: next(rates)) as opened:
        yield opened


def test_whoever_fails_leaves_a_reason_and_the_others_go_on(field: Field) -> None:
    contestants, results = field.contestants(), Results()
    for number in range(2):
        results.run(field, contestants, "request", {"number": number})
    answered = {
        each.setting: [one["echo"] for one in results.answers("request", each)] for each in contestants
    }
    assert answered == {"answer": [0, 1], "raise": [], "hang": [], "end": []}
    assert results.reasons("request") == {
        "fake, raise": "ValueError: too many prompts",
        "fake, hang": "no answer within 3 s",
        "fake, end": "ended with 1: out of memory",
    }


def test_an_answer_has_the_rates_of_memory_before_and_after_it(field: Field) -> None:
    answering, *_ = field.contestants()
    rates = [field.ask(answering, {"number": number})["memory_gbs"] for number in range(2)]
    assert rates == [[50, 51], [52, 53]]


def test_a_peer_that_does_not_load_is_left_out_with_the_reason() -> None:
    with Field([FAKE], "unloadable", patience=0, start=start) as field:
        assert field.contestants() == []
        assert field.about == {"fake": {"failed": "ended with 1: OSError: no such model"}}


@pytest.mark.parametrize(
    ("files", "events"), [(VERSION_1, "17"), (VERSION_2, "low 0\nhigh 0\nmax 17\noom 0\n")]
)
@pytest.mark.parametrize(("peak", "binds"), [(1000, True), (600, False)])
def test_a_cap_binds_if_its_limit_was_met(
    tmp_path: Path, files: tuple[str, str, str], events: str, peak: int, binds: bool
) -> None:
    cap = MemoryCap(tmp_path, files, 1000)
    (tmp_path / files[1]).write_text(str(peak))
    (tmp_path / files[2]).write_text(events)
    assert (tmp_path / files[0]).read_text() == "1000"
    assert cap.report() == {"limit_bytes": 1000, "peak_bytes": peak, "times_met": 17, "binds": binds}


def test_each_contestant_begins_a_round_in_turn(field: Field) -> None:
    begins = [turned(field.contestants(), number)[0].setting for number in range(5)]
    assert begins == [*DOINGS, "answer"]


@pytest.mark.parametrize(
    ("flops", "bound_by", "rate"), [(10.0, "read_limit", 30.0), (1000.0, "compute_limit", 20.0)]
)
def test_the_limit_of_a_row_is_the_smaller_one(flops: float, bound_by: str, rate: float) -> None:
    limit = limit_of(nbytes=100.0, flops=flops, read=30.0, flops_per_second=200.0)
    assert (limit.bound_by, limit.rate) == (bound_by, rate)
    assert limit.fraction(nbytes=100.0, seconds=10.0) == 10.0 / rate


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_limits_are_measured_for_each_instruction_set_of_the_kernels(variant: str) -> None:
    numbers = np.ones(1 << 17)
    assert read_limit([(numbers.ctypes.data, numbers.nbytes)], cores=2) > 0
    assert measured_flops(1, variant) > 0
    with pytest.raises(RuntimeError, match="products with avx3"):
        measured_flops(1, "avx3")


def row(peer: str, seconds: list[float], others: list[float], memory: list[float]) -> dict[str, object]:
    return {
        "peer": peer,
        "seconds": seconds,
        "other_cores": others,
        "memory_gbs": [[rate, rate] for rate in memory],
        "tokens_per_second": {"median": 1 / seconds[0]},
    }


def test_ratios_are_of_the_best_settings_in_the_rounds_that_nobody_disturbed() -> None:
    steady = [75.0, 75.0, 75.0]
    rows = {
        "ours": row("ours", [1.0, 9.0, 2.0], [0.0, 1.5, 0.0], steady),
        "theirs, slow": row("theirs", [8.0, 8.0, 8.0], [0.0, 0.0, 0.0], steady),
        "theirs, fast": row("theirs", [2.0, 2.0, 3.0], [0.0, 0.0, 0.05], steady),
    }
    assert ratios({"decode": {"contestants": rows}}, "ours")["decode"]["theirs"] == {
        "median": 1.75,
        "least": 1.5,
        "most": 2.0,
        "undisturbed_rounds": 2,
        "steady_rounds": 2,
    }


@pytest.mark.parametrize(
    ("theirs", "median", "steady"), [([75.0, 48.0, 48.0, 50.0], 2.0, 3), ([75.0, 48.0, 75.0, 50.0], 4.5, 2)]
)
def test_ratios_leave_out_rounds_in_which_memory_changed_its_rate_if_three_remain(
    theirs: list[float], median: float, steady: int
) -> None:
    """Rates of the two are compared in each round, not those of several rounds."""
    ours = [75.0, 75.0, 48.0, 48.0]
    rows = {
        "ours": row("ours", [1.0, 1.0, 1.0, 1.0], [0.0] * 4, ours),
        "theirs": row("theirs", [2.0, 9.0, 7.0, 1.0], [0.0] * 4, theirs),
    }
    found = ratios({"decode": {"contestants": rows}}, "ours")["decode"]["theirs"]
    assert (found["median"], found["steady_rounds"], found["undisturbed_rounds"]) == (median, steady, 4)


def test_rounds_that_others_disturbed_stay_left_out_whatever_memory_does() -> None:
    answers = [{"other_cores": 0.5, "memory_gbs": [75.0, 75.0]}] * 3
    assert undisturbed([*answers, {"other_cores": 0.0, "memory_gbs": [75.0, 48.0]}]) == [3]
    assert undisturbed([{"other_cores": 0.0}] * 4) == [0, 1, 2, 3]


def test_tokens_count_as_equal_until_the_first_difference() -> None:
    assert equal_tokens([[1, 2, 3], [4, 5, 6]], [[1, 9, 3], [7, 5, 6]]) == {
        "sequences": 2,
        "equal_first_tokens": 1,
        "tokens": 6,
        "equal_until_the_first_difference": 1,
    }
