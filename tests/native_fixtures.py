"""The instruction sets that native kernels are tested with, and the kernels of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from moesched.devices.native.compiled import availability, instruction_sets

if TYPE_CHECKING:
    from moesched.devices.native.kernels import NativeKernels


@pytest.fixture(params=instruction_sets() or ["none"])
def variant(request: pytest.FixtureRequest) -> str:
    """Every instruction set that this processor has."""
    name: str = request.param
    if name == "none":
        pytest.skip(availability())
    return name


@pytest.fixture
def native(variant: str) -> Iterator[NativeKernels]:
    """Native kernels of one instruction set, for up to 2,000 rows."""
    from moesched.devices.native.kernels import NativeKernels

    with closing(NativeKernels(2000, variant, threads=2)) as native:
        yield native
