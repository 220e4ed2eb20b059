"""The instruction sets that native kernels are tested with."""

from __future__ import annotations

import pytest

from moesched.devices.native.compiled import availability, instruction_sets


@pytest.fixture(params=instruction_sets() or ["none"])
def variant(request: pytest.FixtureRequest) -> str:
    """Every instruction set that this processor has."""
    name: str = request.param
    if name == "none":
        pytest.skip(availability())
    return name
