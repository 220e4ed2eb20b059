"""Finds the size and the bandwidth of a machine's host memory, given its CPU and a text that describes its RAM.

The CPU's fastest memory is assumed where the text leaves type or speed open.
"""

from __future__ import annotations

from typing import NamedTuple

from moesched.errors import BadInput
from moesched.machines.part_notation import Ram, channel_bandwidth, parse_ram
from moesched.machines.parts import Cpu
from moesched.system.plain_text import shown
from moesched.units import format_size

CHANNEL_SIZE = 32 * 2**30
"""Assumed bytes of the module in each channel, if no size was given."""


class HostMemory(NamedTuple):
    """Host memory of a machine.

    Attributes:
        nbytes: size in bytes.
        bandwidth: bytes per second of all channels together, by their line rate.
        words: description of size, channels and type.
        comment: text on the source of the figures.
        assumed: a sentence on each figure that was assumed, with the option that sets it.
    """

    nbytes: int
    bandwidth: float
    words: str
    comment: str
    assumed: list[str]


def host_memory(cpu: Cpu, sockets: int, ram: str | None) -> HostMemory:
    """Return the host memory of a machine with a number of CPU sockets.

    Args:
        ram: memory in the notation of `parse_ram`; None for the fastest memory that the CPU supports.

    Raises:
        BadInput: the notation cannot be read, or has more channels than the CPU.
    """
    given = Ram(None, None, None, None) if ram is None else parse_ram(ram)
    kind = given.kind or cpu.memory
    channels = _channels(cpu, sockets, given, ram)
    nbytes = given.nbytes or channels * CHANNEL_SIZE
    bandwidth = channels * channel_bandwidth(kind)
    assumed = []
    if given.nbytes is None:
        assumed.append(f"{format_size(nbytes)} of RAM: --ram '{channels}x16GB {kind}' would say another size")
    if given.kind is None:
        assumed.append(
            f"{kind}, the fastest that {cpu.name} supports: --ram '{channels}x16GB {kind}' would say another type"
        )
    said = f"--ram {ram}" if ram else cpu.source
    unsaid = "" if given.nbytes else f" Assumed: {format_size(CHANNEL_SIZE)} per channel."
    return HostMemory(
        nbytes=nbytes,
        bandwidth=bandwidth,
        words=f"{format_size(nbytes)} in {channels} channels of {kind}",
        comment=f"{said}: line rate of {channels} channels x 8 bytes x {kind}.{unsaid}",
        assumed=assumed,
    )


def _channels(cpu: Cpu, sockets: int, given: Ram, ram: str | None) -> int:
    """Return the number of memory channels in use.

    It is the number that `ram` states. If `ram` states only modules, each takes a channel, up to the channels of all
    CPUs. If it states neither, all channels are in use.

    Args:
        given: the parsed text `ram`.

    Raises:
        BadInput: `ram` states more channels than the CPUs have.
    """
    most = sockets * cpu.channels
    if given.channels is None:
        return min(most, given.modules or most)
    if given.channels > most:
        raise BadInput(
            f"--ram {shown(ram)}: {cpu.name} has {most} memory channels{' in all' if sockets > 1 else ''}: "
            f"write {most}x{given.kind}, or modules with their size, such as '{given.channels}x16GB {given.kind}'"
        )
    return given.channels
