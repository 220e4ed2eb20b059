"""Describes the links between a GPU and its host, through a PCIe slot or the link of a board that has both."""

from __future__ import annotations

from typing import NamedTuple

from moesched.errors import BadInput
from moesched.machines.built_comments import times
from moesched.machines.machine import Interconnect, Link, Staging
from moesched.machines.part_notation import LANE_BANDWIDTHS, LANES, Pcie, parse_pcie
from moesched.machines.parts import Board, Cpu, Gpu
from moesched.units import format_bytes

REACHED = 0.75
"""Share of PCIe's line rate that copies of page-locked memory reach."""
LATENCY = 10e-6
MEMCPY_LATENCY = 2e-6
STAGING_COMMENT = (
    "Assumed: memcpy by several cores, which reads and writes: half of the bandwidth, 2 us to begin."
)
RING_COMMENT = (
    "An all-reduce is one kernel: NVIDIA/nccl, src/graph/tuning.cc, counts 6.6 us and 1 us for each round over PCIe "
    "with small messages. Assumed: a round without peer access crosses PCIe twice."
)
CALL_LATENCY, CROSSING_LATENCY = 6.6e-6, 1e-6
"""Seconds that an all-reduce's only kernel takes, and seconds of each crossing of PCIe in its ring.

Both are from NVIDIA/nccl, src/graph/tuning.cc.
"""


class GpuLinks(NamedTuple):
    """The links between GPU and host memory.

    Attributes:
        words: description of the slot or link.
        to_gpu, to_host: bytes per second that copies reach in each direction.
        comment: text on the source of the figures.
        assumed: a sentence on each figure that was assumed, with the option that sets it.
    """

    words: str
    to_gpu: float
    to_host: float
    comment: str
    assumed: list[str]

    @property
    def links(self) -> list[Link]:
        """The links in both directions."""
        return [
            Link(source="host", destination="gpu", bandwidth=self.to_gpu, latency=LATENCY),
            Link(source="gpu", destination="host", bandwidth=self.to_host, latency=LATENCY),
        ]


def gpu_links(gpu: Gpu, count: int, cpu: Cpu, sockets: int, slot: str | None) -> GpuLinks:
    """Return the links between a GPU and host memory: those of a PCIe slot, or of a board that has GPU and CPU.

    Args:
        count: number of GPUs, which share the lanes of the CPUs in all `sockets`.
        slot: generation and lanes, such as "4x16"; by default the fastest that both GPU and CPU have.

    Raises:
        BadInput: the slot cannot be read or needs more lanes than the CPU has, or a GPU on a board is combined with
            another CPU, with a slot or with a second GPU.
    """
    if gpu.board is not None:
        return _on_board(gpu, gpu.board, count, cpu, sockets, slot)
    pcie, assumed = _pcie(gpu, count, cpu, sockets, slot)
    rate = float(f"{REACHED * pcie.bandwidth:.4g}")
    comment = (
        f"{pcie}: {format_bytes(pcie.bandwidth)}/s in each direction, by PCI-SIG "
        f"({format_bytes(LANE_BANDWIDTHS[pcie.generation])}/s per lane). "
        "Assumed: copies of page-locked memory reach three quarters of that, and take 10 us to begin."
    )
    return GpuLinks(str(pcie), rate, rate, comment, assumed)


def _on_board(gpu: Gpu, board: Board, count: int, cpu: Cpu, sockets: int, slot: str | None) -> GpuLinks:
    if cpu.name != board.cpu:
        raise BadInput(
            f"--cpu {cpu.name!r}: {gpu.name} is on one board with another CPU: write --cpu {board.cpu!r}, "
            "or leave out --cpu"
        )
    if slot is not None:
        raise BadInput(f"--pcie {slot!r}: {gpu.name} has {board.link} to its CPU: leave out --pcie")
    if count > 1 or sockets > 1:
        raise BadInput(
            f"several {gpu.name} have a host memory each, and one host is simulated: write --gpu {gpu.name!r}"
        )
    comment = f"{board.link}: {gpu.source}. Assumed: 10 us to begin."
    return GpuLinks(board.link, board.to_gpu, board.to_host, comment, [])


def _pcie(gpu: Gpu, count: int, cpu: Cpu, sockets: int, slot: str | None) -> tuple[Pcie, list[str]]:
    """Return the PCIe generation and lanes that GPU and slot both have, and sentences on assumed figures."""
    card, lanes = parse_pcie(gpu.pcie), cpu.lanes_of(sockets)
    shared = max(each for each in LANES if each * count <= max(lanes, count))
    if slot is not None:
        here = parse_pcie(slot)
        if here.lanes > shared:
            raise BadInput(
                f"--pcie {slot!r}: {count} times {here.lanes} lanes, and {times(cpu.name, sockets)} has {lanes} "
                f"for GPUs: write --pcie {here.generation}x{shared}"
            )
        return Pcie(min(card.generation, here.generation), min(card.lanes, here.lanes)), []
    found = Pcie(min(card.generation, cpu.pcie), min(card.lanes, shared))
    if found.lanes == card.lanes:
        return found, []
    has = f"{times(cpu.name, sockets)} has {lanes} lanes for GPUs"
    return found, [f"{found} for each GPU, as {has}: --pcie would say another slot"]


def host_copies(bandwidth: float) -> Staging:
    """Return the rate and latency of copies into page-locked memory.

    Args:
        bandwidth: bytes per second of the host's memory.
    """
    return Staging(bandwidth=bandwidth / 2, latency=MEMCPY_LATENCY)


def gpu_interconnect(rate: float, count: int) -> Interconnect:
    """Return the connection between any two of `count` GPUs that have no bridge; it goes through both PCIe slots.

    An all-reduce is one kernel of 2 * (count - 1) rounds, each of which crosses PCIe twice.

    Args:
        rate: bytes per second of a slot.
    """
    latency = CALL_LATENCY / (2 * (count - 1)) + 2 * CROSSING_LATENCY
    return Interconnect(bandwidth=rate, latency=float(f"{latency:.3g}"), paths=["host->gpu", "gpu->host"])
