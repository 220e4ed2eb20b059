"""Parses short texts on parts: RAM such as "2x32GB DDR5-5600", PCIe such as "4x16", a disk such as "2TB 7GB/s"."""

from __future__ import annotations

import re
from typing import NamedTuple

from moesched.errors import BadInput
from moesched.machines.parts import library
from moesched.system.plain_text import shown
from moesched.units import parse_bytes, parse_rate

CHANNEL_BYTES = 8
"""Bytes per transfer of a memory channel of 64 bits."""

LANE_BANDWIDTHS = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of a PCIe lane in one direction, by generation, with line coding taken off."""
LANES = (1, 2, 4, 8, 16)

_SIZE = r"[0-9.]+\s*[kmgt]i?b"
_RAM = re.compile(
    rf"(?:(?P<count>[0-9]{{1,4}})\s*[x×]\s*)?(?P<size>{_SIZE})?\s*"
    rf"(?:(?P<type>(?:lp)?ddr[0-9]x?)[-\s]*(?P<speed>[0-9]{{3,6}}))?\s*(?P<total>{_SIZE})?",
    re.IGNORECASE,
)
_PCIE = re.compile(r"(?:pcie|gen)?\s*(?:gen)?\s*([0-9]{1,3})(?:\.0)?\s*[x×]\s*([0-9]{1,3})", re.IGNORECASE)


class Ram(NamedTuple):
    """Memory modules, as a text describes them; None for each attribute that the text does not give.

    Attributes:
        modules: number of modules, as in "2x32GB".
        channels: number of channels, as in "2xDDR5-5600".
        kind: type and speed, such as "DDR5-5600".
        nbytes: size of all modules together.
    """

    modules: int | None
    channels: int | None
    kind: str | None
    nbytes: int | None


class Pcie(NamedTuple):
    """Generation and number of lanes of a PCIe slot or card."""

    generation: int
    lanes: int

    def __str__(self) -> str:
        return f"PCIe {self.generation}.0 x{self.lanes}"

    @property
    def bandwidth(self) -> float:
        """Bytes per second of all lanes together, in one direction."""
        return LANE_BANDWIDTHS[self.generation] * self.lanes


class Disk(NamedTuple):
    """A disk: its size in bytes, None if unknown, and the bytes per second of reading."""

    nbytes: int | None
    bandwidth: float


def parse_ram(text: str) -> Ram:
    """Parse a text on RAM: the number of channels or modules, the size, and the type with its speed.

    Forms: "2xDDR5-5600" (two channels), "2xDDR5-5600 64GB" (with total size), "2x32GB DDR5-5600" (two modules),
    "2x32GB", and each of these without "2x".

    Raises:
        BadInput: the text has none of these forms, a figure is 0, or no module of that type is sold with that speed.
    """
    match = _RAM.fullmatch(text.strip())
    if match is None or not (match["size"] or match["type"]) or (match["size"] and match["total"]):
        raise BadInput(_not_ram(text))
    count = int(match["count"]) if match["count"] else None
    kind = memory_kind(f"{match['type']}-{match['speed']}") if match["type"] else None
    size = match["size"] or match["total"]
    nbytes = module_bytes(size) if size else None
    if count == 0 or nbytes == 0:
        raise BadInput(_not_ram(text))
    if match["size"]:
        return Ram(count, None, kind, (nbytes or 0) * (count or 1))
    return Ram(None, count, kind, nbytes)


def module_bytes(size: str) -> int:
    """Parse the size of memory modules to bytes; their GB is 1024**3.

    Raises:
        BadInput: the text is not a size.
    """
    return parse_bytes(re.sub("([KMGT])B", r"\1iB", size.replace(" ", "").upper().replace("IB", "iB")))


def memory_kind(text: str) -> str:
    """Check the type and speed of memory, such as "DDR5-5600", and return them in the library's spelling.

    Raises:
        BadInput: no such type is in the library, or it is not sold with that speed.
    """
    name, _, speed = text.upper().partition("-")
    kind = library().memories.get(name)
    if kind is None:
        raise BadInput(f"no memory type {shown(name)} in the library: it has {', '.join(library().memories)}")
    if not kind.slowest <= int(speed) <= kind.fastest:
        raise BadInput(
            f"{shown(text)}: {name} is sold with {kind.slowest} to {kind.fastest} million transfers per second: "
            f"write, for instance, {name}-{kind.slowest}"
        )
    return f"{name}-{int(speed)}"


def channel_bandwidth(kind: str) -> float:
    """Return the bytes per second of one channel of a memory type, such as "DDR5-5600"."""
    return int(kind.partition("-")[2]) * 1e6 * CHANNEL_BYTES


def parse_pcie(text: str) -> Pcie:
    """Parse the generation and lanes of PCIe, such as "4x16".

    Raises:
        BadInput: the text has another form, or there is no such generation or number of lanes.
    """
    match = _PCIE.fullmatch(text.strip())
    if match is None or int(match[1]) not in LANE_BANDWIDTHS or int(match[2]) not in LANES:
        lanes = ", ".join(map(str, LANES))
        raise BadInput(
            f"{shown(text)} is not PCIe: write generation (1 to {max(LANE_BANDWIDTHS)}) x lanes ({lanes}), such as 4x16"
        )
    return Pcie(int(match[1]), int(match[2]))


def parse_disk(text: str) -> Disk:
    """Parse the rate of a disk's reads, such as "7GB/s", optionally after its size, such as "2TB 7GB/s".

    Raises:
        BadInput: a figure is not a size or a rate, or is 0.
    """
    size, _, rate = text.strip().rpartition(" ")
    nbytes = parse_bytes(size.replace(" ", "")) if size else None
    if nbytes == 0 or not rate.endswith("/s"):
        raise BadInput(
            f"{shown(text)} is not a disk: write its rate, such as 7GB/s, or size and rate, such as '2TB 7GB/s'"
        )
    return Disk(nbytes, parse_rate(rate))


def _not_ram(text: str) -> str:
    return (
        f"{shown(text)} is not RAM: write channels x type-speed, such as 2xDDR5-5600, "
        "or modules x size with type-speed, such as '2x32GB DDR5-5600'"
    )
