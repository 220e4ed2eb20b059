"""Times of tokens: by request and by micro-batch, in predictions and in runs, to the first token and between tokens."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest

import moesched
from moesched.jobs.report import JobReport
from moesched.requests.batch import Batch
from moesched.runs.token_times import RequestTimes, merged, micro_batch_times, request_times
from runs import predicted

BATCH = Batch((3, 3, 3), 4, ((2,), (0, 1)), first_request=6)
SECOND = 10**9


def times(tokens: list[int]) -> RequestTimes:
    """Loaded after one second; the second micro-batch's second token takes four."""
    first_tokens = {2: 2 * SECOND, 0: 3 * SECOND, 1: 3 * SECOND}
    ends = [(3, 7), (4, 8), (6, 9)]
    sampled = [dict(enumerate((first * SECOND, second * SECOND))) for first, second in ends]
    return request_times(BATCH, SECOND, first_tokens, sampled, tokens)


def test_a_request_has_the_times_of_its_own_tokens() -> None:
    assert times([4, 2, 4]) == RequestTimes([2.0, 2.0, 1.0], [2.0, 4.0, 4 / 3], [4.0, 4.0, 2.0])


def test_a_request_that_ended_with_its_first_token_or_before_has_no_times_between_tokens() -> None:
    found = request_times(BATCH, 0, {0: SECOND}, [], [1, 0, 0])
    assert found == RequestTimes([1.0, None, None], [None] * 3, [None] * 3)
    assert [each.first_token_seconds for each in micro_batch_times(BATCH, found)] == [None, 1.0]


def test_a_micro_batch_has_the_means_of_its_requests_and_the_longest_time_of_all() -> None:
    first, second = micro_batch_times(BATCH, times([4, 2, 4]))
    assert (first.requests, second.requests) == ([8], [6, 7])
    assert (second.first_token_seconds, second.between_tokens_seconds) == (2.0, 3.0)
    assert (first.longest_between_tokens_seconds, second.longest_between_tokens_seconds) == (2.0, 4.0)


def test_requests_that_never_ran_have_no_times() -> None:
    joined = merged([times([4, 2, 4])], 5)
    assert joined is not None
    assert joined.first_token_seconds == [2.0, 2.0, 1.0, None, None]
    assert merged([times([4, 4, 4]), None], 6) is None


def check(report: JobReport, requests: int) -> None:
    """The times agree with each other and with the report's other figures."""
    found = report.request_times
    assert found is not None
    first, between = found.first_token_seconds, found.between_tokens_seconds
    longest = found.longest_between_tokens_seconds
    assert len(first) == len(between) == len(longest) == requests
    assert report.first_token_seconds == pytest.approx(fmean(each for each in first if each is not None))
    assert all(0 < mean <= most for mean, most in zip(between, longest, strict=True) if mean and most)
    numbers = [number for each in report.micro_batch_times for number in each.requests]
    assert sorted(numbers) == list(range(requests))
    told = report.as_dict()
    assert told["request_times"]["first_token_seconds"] == first
    assert told["micro_batch_times"][0].keys() >= {
        "requests",
        "first_token_seconds",
        "between_tokens_seconds",
    }


@pytest.mark.parametrize("policy", ["flexgen", "expert_cache"], ids=["repeated steps", "all steps"])
def test_a_prediction_has_them(policy: str) -> None:
    sizes: dict[str, Any] = {"gen": 9, "requests": 6, "batch_size": 4, "micro_batch_size": 2}
    report = predicted(policy, **sizes)
    check(report, 6)
    assert report.request_times is not None
    times = zip(*msgspec.structs.astuple(report.request_times)[:2], strict=True)
    ends = [first + 8 * between for first, between in list(times)[:4]]
    assert max(ends) == pytest.approx(sum(report.step_seconds[:9])), "the last token ends the batch"


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_run_has_them_beside_its_text(no_text: Path, chunk: int | None) -> None:
    sizes: dict[str, Any] = {"batch_size": 2, "micro_batch_size": 1, "prefill_chunk": chunk}
    check(moesched.run_model(no_text, [[1, 2, 3], [4], [5, 6]], max_new_tokens=4, **sizes), 3)


def test_the_command_and_the_page_tell_them(command: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = "simulate --model mixtral-0.8b --machine t4 --policy flexgen --workload mtbench --gen 5 --batch-size 4"
    said = command(*options.split(), "--micro-batch-size", 2, "--report", page)
    assert "between tokens, average" in said.out
    shown = page.read_text()
    assert "between tokens, average" in shown
    assert "Micro-batches" in shown
