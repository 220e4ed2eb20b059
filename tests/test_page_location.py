"""The places of a page's tensors in files and in a slot, and the reads that bring them there."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesched.devices.shared.page_location import PageLocation, locate
from moesched.models.checkpoint import StoredTensor
from moesched.models.layout import Extent, Page
from moesched.models.stored_formats import STORED_FORMATS

BLOCK = 4096
FILE = Path("model.safetensors")


class Unread:
    """A file of weights that nobody reads."""

    path, caching, descriptor = FILE, "bypassed", -1

    def read(self, into: memoryview, offset: int, needed: int, *, cached: bool = False) -> int:
        raise AssertionError("a location is computed")

    def require(self, offset: int, needed: int) -> None: ...

    def close(self) -> None: ...


def located(*offsets: int, dtype: str = "bfloat16") -> PageLocation:
    """A page of tensors of two blocks each, which start at these bytes of one file."""
    nbytes = 2 * BLOCK
    tensors = {
        str(number): StoredTensor(FILE, offset, (4, nbytes // 8), STORED_FORMATS["bfloat16"], nbytes)
        for number, offset in enumerate(offsets)
    }
    extents = tuple(Extent(name, (0, 4), int(name) * nbytes, nbytes) for name in tensors)
    page = Page(0, 0, 0, 0, extents, len(offsets) * nbytes)
    return locate(page, lambda name: STORED_FORMATS[dtype], tensors, {FILE: Unread()})


def reads(location: PageLocation) -> list[tuple[int, int, int]]:
    """First block in the file, number of blocks and first block in the slot of each read."""
    return [(run.offset // BLOCK, run.nbytes // BLOCK, run.at // BLOCK) for run in location.runs]


def places(location: PageLocation) -> list[int]:
    return [placement.offset for placement in location.placements]


@pytest.mark.parametrize(
    ("offsets", "runs", "placed"),
    [
        ((0, 2 * BLOCK), [(0, 4, 0)], [0, 2 * BLOCK]),
        ((64, 2 * BLOCK + 64), [(0, 5, 0)], [64, 2 * BLOCK + 64]),
        ((64, 4 * BLOCK + 32), [(0, 3, 0), (4, 3, 3)], [64, 3 * BLOCK + 32]),
        ((8 * BLOCK, 0), [(0, 2, 0), (8, 2, 2)], [2 * BLOCK, 0]),
    ],
    ids=["their blocks touch", "they share a block", "a block lies between", "not in the order of the page"],
)
def test_neighbours_are_one_read_and_reads_go_up_the_file_one_behind_the_other_in_the_slot(
    offsets: tuple[int, ...], runs: list[tuple[int, int, int]], placed: list[int]
) -> None:
    location = located(*offsets)
    assert (reads(location), places(location)) == (runs, placed)
    assert location.nbytes == location.bytes_to_read == BLOCK * sum(blocks for _, blocks, _ in runs)


@pytest.mark.parametrize(("offset", "dtype"), [(1, "bfloat16"), (0, "float32")])
def test_a_page_that_no_view_can_show_has_no_reads_and_the_places_of_the_layout(
    offset: int, dtype: str
) -> None:
    location = located(offset, 8 * BLOCK, dtype=dtype)
    assert reads(location) == []
    assert places(location) == [0, 2 * BLOCK]
    assert location.bytes_to_read == (3 if offset else 2) * BLOCK + 2 * BLOCK
