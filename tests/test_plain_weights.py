"""Products with plain matrices: right, the same on any number of cores, and rounded once."""

from __future__ import annotations

import pytest
import torch

from moesched.devices.products.bfloat16_support import has_bfloat16
from moesched.devices.products.packed_weights import cores_keep_bits
from moesched.devices.products.plain_weights import plain_linear
from moesched.devices.products.team import one_core
from moesched.system.cores import usable_cores


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
