"""A layer takes the time that twiddler_makespan expects, with lanes that share memories."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.fidelity.layer_estimate import CASES, shared


@pytest.mark.parametrize("case", CASES)
def test_layers_take_what_was_expected_of_them(case: str) -> None:
    layers = shared("rtx6000", case)
    assert len(layers) >= 32
    assert median(abs(each["expected"] / each["measured"] - 1) for each in layers) < 0.02
