"""The amounts of work: the quick way to size a decode step's attention agrees with the general one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.models.operations import Operations
from moesched.models.shapes import SHAPES


@pytest.mark.parametrize("window", [None, 7])
@given(totals=st.lists(st.integers(1, 20), min_size=1))
def test_a_decode_step_asks_for_what_its_sequences_ask_for_one_by_one(
    window: int | None, totals: list[int]
) -> None:
    config = SHAPES["mixtral-0.8b"].varied(window=window)
    operations = Operations(config, "bfloat16")
    assert operations.attention_step(totals) == operations.attention([(1, total) for total in totals])
