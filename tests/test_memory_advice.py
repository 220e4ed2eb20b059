"""Advice to the system about memory: parts of it move to huge pages, and keep what they hold."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest
import torch

from moesched.devices.products.packed_weights import pack, packed_bytes, packing_pays
from moesched.system.memory_advice import COLLAPSE, HUGE_PAGE, advise, move_to_huge_pages


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping in which an address lies."""
    for start, end, rest in re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) (.*?)^VmFlags", Path("/proc/self/smaps").read_text(), re.M | re.S
    ):
        if int(start, 16) <= address < int(end, 16):
            [kilobytes] = re.findall(r"^AnonHugePages:\s+(\d+) kB", rest, re.M)
            return 1024 * int(kilobytes)
    raise AssertionError("no such memory")


def small_pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory in small pages with numbers in it, and its address."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = bytes(range(256)) * (nbytes // 256)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def moves_memory() -> bool:
    """Whether the system moves memory to huge pages at once."""
    memory, address = small_pages(4 * HUGE_PAGE)
    return advise(address, len(memory), COLLAPSE) == 0


needs_huge_pages = pytest.mark.skipif(
    not moves_memory(), reason="the system cannot move memory to huge pages at once"
)


@needs_huge_pages
def test_memory_moves_to_huge_pages_and_keeps_what_it_holds() -> None:
    memory, address = small_pages(4 * HUGE_PAGE)
    before = huge_bytes(address)
    move_to_huge_pages(address, len(memory))
    assert huge_bytes(address) >= before + 3 * HUGE_PAGE
    assert memory[:] == bytes(range(256)) * (len(memory) // 256)


@needs_huge_pages
def test_memory_of_less_than_a_huge_page_stays_where_it_is() -> None:
    memory, address = small_pages(HUGE_PAGE // 2)
    move_to_huge_pages(address, len(memory))
    assert huge_bytes(address) < HUGE_PAGE


@needs_huge_pages
@pytest.mark.skipif(not packing_pays(), reason="weights are not packed on this processor")
def test_packed_weights_lie_in_huge_pages() -> None:
    packed = pack(torch.ones(8192, 4096, dtype=torch.bfloat16))
    lying = huge_bytes(torch.ops.mkldnn.data_ptr(packed))
    assert lying >= packed_bytes(packed) - 2 * HUGE_PAGE
