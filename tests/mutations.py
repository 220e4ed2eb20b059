"""Damage to files: flipped bits, cuts, repeated parts, and other values where a value stood."""

from __future__ import annotations

import re
from random import Random

_VALUE = re.compile(rb'"[^"\n]*"|-?\d[\w.+-]*|true|false|null|\[\]|\{\}')

ODD = (
    *(
        b"0", b"-1", b"1.5", b"1e400", b"-1e400", b"1e309", b"1e-320", b"1000000000000", b"9" * 5000, b"nan",
        b"inf",
    ),
    *(
        b"0x" + b"f" * 20_000, b"null", b"true", b"[]", b"{}", b'""', b'"x"', b'"1e309GB"',
        b'"' + b"x" * 100_000 + b'"',
    ),
    *(rb'"\ud800"', rb'"\u0000"', rb'"\u001b[2J"', b'"\xff"', b"\x00", b'"../x"', b"[" * 5000 + b"]" * 5000),
    *(
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"{a=" * 5000 + b"1" + b"}" * 5000,
        b"[1,1]",
        b'{"a":1}',
        b'["a"]',
    ),
)  # fmt: skip
"""Values that no real file has."""


def mutated(data: bytes, random: Random) -> bytes:
    """The bytes with one to three kinds of damage."""
    for _ in range(random.choice((1, 1, 2, 3))):
        data = random.choice(_DAMAGES)(data, random)
    return data


def _noise(data: bytes, random: Random) -> bytes:
    return random.randbytes(random.randrange(300))


def _flip(data: bytes, random: Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(random.randrange(1, 9)):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _remove(data: bytes, random: Random) -> bytes:
    start, end = _part(data, random)
    return data[:start] + data[end:]


def _repeat(data: bytes, random: Random) -> bytes:
    start, end = _part(data, random)
    return data[:end] + data[start:end] * random.choice((1, 1, 2, 100)) + data[end:]


def _swap(data: bytes, random: Random) -> bytes:
    """Exchange two values."""
    one, other = sorted((_value(data, random), _value(data, random)))
    if one[1] > other[0]:
        return data
    return (
        data[: one[0]] + data[slice(*other)] + data[one[1] : other[0]] + data[slice(*one)] + data[other[1] :]
    )


def _replace(data: bytes, random: Random) -> bytes:
    """Put an odd value in the place of one."""
    start, end = _value(data, random)
    return data[:start] + random.choice(ODD) + data[end:]


def _part(data: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(len(data) + 1)
    return start, min(len(data), start + random.randrange(200))


def _value(data: bytes, random: Random) -> tuple[int, int]:
    found = _VALUE.search(data, random.randrange(len(data) + 1)) or _VALUE.search(data)
    return found.span() if found else (0, 0)


_DAMAGES = (
    _noise, _flip, _flip, _cut, _remove, _repeat, _swap, _swap, _replace, _replace, _replace, _replace,
)  # fmt: skip
