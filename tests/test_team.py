"""Products: a team does every job once, and plain matrices give the same bits on any number of cores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from moesched.devices.products.bfloat16_support import has_bfloat16
from moesched.devices.products.packed_weights import cores_keep_bits
from moesched.devices.products.plain_weights import plain_linear
from moesched.devices.products.team import Team, one_core, use_cores
from moesched.devices.torch.compute import Compute
from moesched.models.layout import weight_layout
from moesched.system.cores import usable_cores
from small_models import SMALL


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


# -- products with plain matrices ------------------------------------------------------------------


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).bfloat16()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 33])
def test_a_product_in_bfloat16_is_right_to_its_last_bit_or_next_to_it(rows: int, transposed: bool) -> None:
    x_TD = matrix(rows, 600, 1)
    weight_ND = matrix(600, 300, 2).T if transposed else matrix(300, 600, 2)
    exact_TN = x_TD.double() @ weight_ND.double().T
    error = (plain_linear(x_TD, weight_ND).double() - exact_TN).abs()
    assert (error <= exact_TN.abs() * 2**-8 + 0.02).all()


@pytest.mark.skipif(usable_cores() == 1, reason="this machine has one core")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 33, 128])
def test_the_bits_depend_on_the_number_of_cores_only_where_the_device_knows_it(rows: int) -> None:
    x_TD, weight_ND = matrix(rows, 600, 1), matrix(1000, 600, 2)
    with one_core():
        alone = plain_linear(x_TD, weight_ND)
    known = not cores_keep_bits(torch.bfloat16, usable_cores())
    assert known or torch.equal(plain_linear(x_TD, weight_ND), alone)


@pytest.mark.skipif(has_bfloat16(), reason="this processor multiplies bfloat16 numbers")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 33, 128])
def test_without_bfloat16_instructions_the_bits_do_not_depend_on_the_number_of_cores(rows: int) -> None:
    x_TD, weight_ND = matrix(rows, 2048, 1), matrix(4096, 2048, 2)
    with one_core():
        alone = plain_linear(x_TD, weight_ND)
    assert torch.equal(plain_linear(x_TD, weight_ND), alone)


def test_one_core_gives_the_others_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), one_core():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_a_number_of_cores_is_set_again_after_a_device_was_closed() -> None:
    before = torch.get_num_threads()
    compute = Compute("cpu", weight_layout(SMALL, "float32"), "torch", pin=False, threads=None)
    compute.start(1.0)
    use_cores(before + 1)
    compute.close()
    assert torch.get_num_threads() == before
    use_cores(before + 1)
    assert torch.get_num_threads() == before + 1
    use_cores(before)
