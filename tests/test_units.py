"""Sizes, rates and times in words: three digits, and the prefix with which they are from 1 to 999."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.units import format_bytes, format_count, format_flops, format_seconds


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (format_bytes(999), "999 B"),
        (format_bytes(999_400), "999 KB"),
        (format_bytes(999_700), "1 MB"),
        (format_bytes(1.5e15), "1.5 PB"),
        (format_flops(999.9e12), "1 PFLOP/s"),
        (format_flops(2e3), "2 KFLOP/s"),
        (format_seconds(0.9996), "1 s"),
        (format_seconds(999.6e-9), "1 µs"),
        (format_seconds(1234.5), "1,234 s"),
        (format_count(791.2e6), "791 M"),
        (format_count(46.7e9), "46.7 B"),
        (format_count(1500), "1,500"),
    ],
)
def test_the_prefix_is_chosen_after_rounding(said: str, expected: str) -> None:
    assert said == expected


@given(st.floats(1, 1e18))
def test_a_size_has_three_digits_at_most(nbytes: float) -> None:
    number, unit = format_bytes(nbytes).split()
    assert re.fullmatch(r"[0-9]{1,3}|[0-9]\.[0-9]{1,2}|[0-9]{2}\.[0-9]|1,000", number)
    assert unit in ("B", "KB", "MB", "GB", "TB", "PB")
