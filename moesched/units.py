"""Parses and formats sizes, rates and times; KB, MB, GB are powers of 1000, KiB, MiB, GiB powers of 1024."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from numbers import Integral, Real

from moesched.errors import BadInput
from moesched.system.plain_text import shown

MOST_BYTES = 10**18
"""Limit of any size; the largest machines have less."""

_UNITS = {"": 1, "b": 1}
_UNITS |= {prefix + "b": 1000 ** (n + 1) for n, prefix in enumerate("kmgt")}
_UNITS |= {prefix + "ib": 1024 ** (n + 1) for n, prefix in enumerate("kmgt")}
_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*"
_SIZE = re.compile(_NUMBER + r"([A-Za-z]*)\s*")
_PREFIXES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_FLOPS = re.compile(_NUMBER + r"([KMGTPkmgtp]?)FLOPS?(?:/s)?\s*", re.IGNORECASE)
_TIMES = {"s": 1, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}
_TIME = re.compile(_NUMBER + r"(s|ms|us|µs|ns)\s*")


def parse_bytes(text: object) -> int:
    """Return the number of bytes in a number, or in a text such as "600MB" or "1.5 GiB".

    Raises:
        BadInput: the text is not a size.
    """
    if isinstance(text, Integral):  # also numpy's
        return _limited(int(text), text)
    if isinstance(text, Real):
        return _limited(float(text), text)
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise BadInput(
            f"{shown(text)} is not a size in bytes: write a number and a unit, such as 600MB or 1.5GiB"
        )
    return _limited(float(match[1]) * _UNITS[match[2].lower()], text)


def parse_rate(text: str) -> float:
    """Return the bytes per second in a text such as "24GB/s".

    Raises:
        BadInput: the text is not a rate, or is below 1 byte per second.
    """
    try:
        rate = parse_bytes(text.strip().removesuffix("/s"))
    except BadInput:
        rate = 0
    return _positive(rate, text, "a rate", "24GB/s")


def parse_flops(text: str) -> float:
    """Return the floating-point operations per second in a text such as "65TFLOP/s".

    Raises:
        BadInput: the text is not such a rate, or is below 1 FLOP/s.
    """
    match = _FLOPS.fullmatch(text)
    rate = float(match[1]) * _PREFIXES[match[2].upper()] if match else 0.0
    return _positive(rate, text, "a number of operations per second", "65TFLOP/s")


def parse_seconds(text: str) -> float:
    """Return the seconds in a text such as "10us".

    Raises:
        BadInput: the text is not a time.
    """
    match = _TIME.fullmatch(text)
    if match is None or not isfinite(float(match[1])):
        raise BadInput(f"{shown(text)} is not a time: write a number and a unit, such as 10us, 2ms or 1s")
    return float(match[1]) / _TIMES[match[2]]


def _positive(rate: float, text: str, what: str, example: str) -> float:
    if rate < 1 or not isfinite(rate):
        raise BadInput(f"{shown(text)} is not {what}: write a number and a unit, such as {example}")
    return float(rate)


def _limited(nbytes: float, text: object) -> int:
    if not abs(nbytes) <= MOST_BYTES:
        raise BadInput(f"{shown(text)} is not a size in bytes: the largest is {MOST_BYTES // 10**15} PB")
    return int(nbytes)


def format_bytes(nbytes: float) -> str:
    """Format bytes with three digits, in the largest decimal unit in which they are at least 1, such as "1.58 GB"."""
    return _with_prefix(nbytes, "B", f"{nbytes:.0f} B")


def format_number(number: float) -> str:
    """Format a number with three significant digits, and with all digits from 1,000 on: "9.25", "284", "1,474"."""
    return f"{number:,.0f}" if abs(number) >= 999.5 else f"{number:.3g}"


def format_token_rate(rate: float) -> str:
    """Format tokens per second with one decimal, and with three digits below 10: "265.3 tokens/s", "0.144 tokens/s"."""
    return f"{rate:,.1f} tokens/s" if rate >= 9.995 else f"{rate:.3g} tokens/s"


def format_flops(rate: float) -> str:
    """Format FLOP/s with three digits, in the largest unit in which they are at least 1, such as "1.6 TFLOP/s"."""
    return _with_prefix(rate, "FLOP/s", f"{rate:.0f} FLOP/s")


def format_count(number: float) -> str:
    """Format a large number with three digits, such as "46.7 B" for 46.7 billion."""
    return _in_largest(number, {"T": 1e12, "B": 1e9, "M": 1e6}) or f"{number:,.0f}"


def format_seconds(seconds: float) -> str:
    """Format a duration in the unit that fits it, such as "12.3 ms"."""
    return _in_largest(seconds, {"s": 1.0, "ms": 1e-3, "µs": 1e-6}) or f"{seconds * 1e9:.0f} ns"


def _with_prefix(value: float, unit: str, small: str) -> str:
    units = {
        prefix + unit: factor
        for prefix, factor in sorted(_PREFIXES.items(), key=lambda each: -each[1])
        if prefix
    }
    return _in_largest(value, units) or small


def _in_largest(value: float, units: Mapping[str, float]) -> str:
    """Format a value to three significant digits in the first unit in which it rounds to at least 1; "" if none.

    units: the size of each unit by its name, the largest first.
    """
    for name, factor in units.items():
        rounded = float(f"{value / factor:.3g}")
        if abs(rounded) >= 1:
            return f"{value / factor:,.0f} {name}" if abs(rounded) >= 1000 else f"{rounded:.3g} {name}"
    return ""


def format_size(nbytes: int) -> str:
    """Format bytes as a whole number of a large unit, from which `parse_bytes` gets exactly the same bytes."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("GiB", 2**30), ("MB", 10**6)):
        if nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return f"{nbytes}B"
