"""Links between a GPU and its host, by their PCIe slot."""

from __future__ import annotations

from moesched.machines.machine import Interconnect, Link, Staging
from moesched.machines.part_notation import LANE_BANDWIDTHS, Pcie, parse_pcie
from moesched.machines.parts import Cpu, Gpu
from moesched.units import format_bytes

REACHED = 0.75
"""Share of the line rate that copies of page-locked memory reach."""
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
"""Of a ring in one kernel with small messages over PCIe: NVIDIA/nccl, src/graph/tuning.cc, baseLat and hwLat of LL."""


def pcie_of(gpu: Gpu, cpu: Cpu, slot: str | None) -> Pcie:
    """The generation and lanes that a GPU and its slot settle on: the lower of both.

    slot: such as "4x16"; by default as fast as the CPU's lanes.

    Raises:
        BadInput: the slot cannot be read.
    """
    card = parse_pcie(gpu.pcie)
    here = Pcie(cpu.pcie, card.lanes) if slot is None else parse_pcie(slot)
    return Pcie(min(card.generation, here.generation), min(card.lanes, here.lanes))


def gpu_links(slot: Pcie) -> tuple[list[Link], dict[str, str]]:
    """The links between GPU and host memory, with the sources of their figures."""
    rate = _rate(slot)
    links = [
        Link(source="host", destination="gpu", bandwidth=rate, latency=LATENCY),
        Link(source="gpu", destination="host", bandwidth=rate, latency=LATENCY),
    ]
    comments = {
        "links.host->gpu": (
            f"{slot}: {format_bytes(slot.bandwidth)}/s in each direction, by PCI-SIG "
            f"({format_bytes(LANE_BANDWIDTHS[slot.generation])}/s per lane). "
            "Assumed: copies of page-locked memory reach three quarters of that, and take 10 us to begin."
        ),
    }
    return links, comments


def host_copies(bandwidth: float) -> Staging:
    """Copies into page-locked memory, by the bandwidth of the host's memory."""
    return Staging(bandwidth=bandwidth / 2, latency=MEMCPY_LATENCY)


def gpu_interconnect(slot: Pcie, count: int) -> Interconnect:
    """The connection between any two of `count` GPUs without a bridge: up one slot and down another.

    An all-reduce is one kernel of 2 * (count - 1) rounds, each of which crosses PCIe twice.
    """
    latency = CALL_LATENCY / (2 * (count - 1)) + 2 * CROSSING_LATENCY
    return Interconnect(
        bandwidth=_rate(slot), latency=float(f"{latency:.3g}"), paths=["host->gpu", "gpu->host"]
    )


def _rate(slot: Pcie) -> float:
    return float(f"{REACHED * slot.bandwidth:.4g}")
