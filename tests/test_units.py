"""Sizes, rates and times in words: three digits, and the prefix with which they are from 1 to 999."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched import units
from moesched.errors import BadInput
from moesched.units import format_bytes
from tables import table


@pytest.mark.parametrize(("kind", "number", "words"), table("published.md", "Numbers in words"))
def test_the_prefix_is_chosen_after_rounding(kind: str, number: float, words: str) -> None:
    assert getattr(units, f"format_{kind}")(number) == words


@pytest.mark.parametrize(
    ("parse", "text"),
    [(units.parse_bytes, "1e400GB"), (units.parse_flops, "1e400TFLOP/s"), (units.parse_seconds, "1e400s")],
)
def test_a_number_beyond_all_others_is_refused(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(BadInput, match=f"'{text}' is not"):
        parse(text)


@given(st.floats(1, 1e18))
def test_a_size_has_three_digits_at_most(nbytes: float) -> None:
    number, unit = format_bytes(nbytes).split()
    assert re.fullmatch(r"[0-9]{1,3}|[0-9]\.[0-9]{1,2}|[0-9]{2}\.[0-9]|1,000", number)
    assert unit in ("B", "KB", "MB", "GB", "TB", "PB")
