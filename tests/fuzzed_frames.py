"""Frames that were damaged at random: noise, other lengths, flipped bits, fields that nobody writes."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np

from moesched.transports.frames import HEADER, Frame, Kind, pack


def fuzzed_frames(count: int, seed: int) -> Iterator[bytes]:
    """Bad frames, none of which a rank may mistake for one of its exchange."""
    random = Random(seed)
    for _ in range(count):
        yield DAMAGES[random.randrange(len(DAMAGES))](random)


def _whole(random: Random) -> bytearray:
    """A frame of another epoch, so that what is left unharmed is refused all the same."""
    values = np.frombuffer(random.randbytes(4 * random.randrange(40)), "<f4")
    kind = random.choice(list(Kind))
    operation = random.choice([Kind.ALL_REDUCE, Kind.BROADCAST, Kind.GATHER])
    return bytearray(pack(Frame(kind, operation, 1, 1 << 63, shape=values.shape, text="fuzz", values=values)))


def _noise(random: Random) -> bytes:
    return random.randbytes(random.randrange(300))


def _cut_short(random: Random) -> bytes:
    frame = _whole(random)
    return bytes(frame[: random.randrange(len(frame))])


def _too_long(random: Random) -> bytes:
    return bytes(_whole(random)) + random.randbytes(random.randrange(1, 100))


def _flipped(random: Random) -> bytes:
    frame = _whole(random)
    for _ in range(random.randrange(1, 6)):
        at = random.randrange(len(frame))
        if not 8 <= at < 16:  # the epoch stays another one
            frame[at] ^= 1 << random.randrange(8)
    return bytes(frame)


def _other_fields(random: Random) -> bytes:
    frame = _whole(random)
    frame[16 : HEADER.size] = random.randbytes(HEADER.size - 16)
    return bytes(frame)


DAMAGES = (_noise, _cut_short, _too_long, _flipped, _other_fields)
