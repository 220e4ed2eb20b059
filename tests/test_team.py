"""A team does every job exactly once, tells of errors, and never makes two lanes wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from moesched.devices.products.packed_weights import cores_keep_bits
from moesched.devices.products.team import Team, use_cores


@pytest.fixture
def team() -> Iterator[Team]:
    """A team of three threads, whatever the machine has."""
    before = torch.get_num_threads()
    team = Team(3)
    yield team
    team.close()
    use_cores(before)


@pytest.mark.parametrize("jobs", [0, 1, 2, 3, 20])
def test_every_job_is_done_exactly_once(team: Team, jobs: int) -> None:
    done: list[int] = []
    for _ in range(10):
        team.run([partial(done.append, number) for number in range(jobs)])
    assert sorted(done) == sorted(list(range(jobs)) * 10)


def test_jobs_run_beside_each_other(team: Team) -> None:
    all_here = threading.Barrier(3, timeout=30)
    team.run([all_here.wait] * 3)


def test_an_error_is_raised_when_all_have_ended(team: Team) -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("no such expert")

    with pytest.raises(ValueError, match="no such expert"):
        team.run([partial(done.append, 1), fail, *[partial(done.append, 2)] * 5])
    team.run([partial(done.append, 3)] * 2)
    assert done[-2:] == [3, 3]


def test_an_index_error_of_a_job_is_not_taken_for_the_end_of_the_list(team: Team) -> None:
    with pytest.raises(IndexError):
        team.run([partial([].__getitem__, 0)] * 3)


def test_a_lane_that_finds_the_helpers_at_work_does_its_jobs_alone(team: Team) -> None:
    done: list[str] = []
    second = threading.Event()

    def meanwhile() -> None:
        team.run([partial(done.append, "mine")] * 4)
        second.set()

    def first() -> None:
        threading.Thread(target=meanwhile).start()
        assert second.wait(30)

    team.run([first, partial(done.append, "theirs")])
    assert sorted(done) == ["mine"] * 4 + ["theirs"]


def test_cores_are_shared_out_among_the_jobs() -> None:
    before = torch.get_num_threads()
    team = Team(4)
    seen: list[int] = []
    for jobs in (1, 2, 3, 8):
        team.run([lambda: seen.append(torch.get_num_threads())] * jobs)
    team.close()
    use_cores(before)
    assert seen == [4, 2, 2, 1, 1, 1] + [1] * 8


def test_products_of_float32_must_stay_on_the_same_cores() -> None:
    assert not cores_keep_bits(torch.float32, 2)
