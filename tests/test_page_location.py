"""The blocks of files that make a page, and the places of its tensors in a slot."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesched.devices.shared.page_location import PageLocation, locate
from moesched.models.checkpoint import StoredTensor
from moesched.models.layout import Extent, Page

BLOCK = 4096
FILE = Path("model.safetensors")


class Unread:
    """A file of weights that nobody reads."""

    path, caching = FILE, "bypassed"

    def read(self, into: memoryview, offset: int, needed: int, *, cached: bool = False) -> int:
        raise AssertionError("a location is computed")

    def require(self, offset: int, needed: int) -> None: ...

    def close(self) -> None: ...


def located(*offsets: int, dtype: str = "bfloat16") -> PageLocation:
    """A page of tensors of two blocks each, which start at these bytes of one file."""
    nbytes = 2 * BLOCK
    tensors = {
        str(number): StoredTensor(FILE, offset, (4, nbytes // 8), "bfloat16", nbytes)
        for number, offset in enumerate(offsets)
    }
    extents = tuple(Extent(name, (0, 4), int(name) * nbytes, nbytes) for name in tensors)
    page = Page(0, 0, 0, 0, extents, len(offsets) * nbytes)
    return locate(page, dtype, tensors, {FILE: Unread()})


def reads(location: PageLocation) -> list[tuple[int, int, int]]:
    """First block in the file, number of blocks and first block in the slot of each read."""
    return [(run.offset // BLOCK, run.nbytes // BLOCK, run.at // BLOCK) for run in location.runs]


def places(location: PageLocation) -> list[int]:
    return [placement.offset for placement in location.placements]


def test_tensors_whose_blocks_touch_are_one_read() -> None:
    assert reads(located(0, 2 * BLOCK)) == [(0, 4, 0)]


def test_tensors_that_share_a_block_are_one_read() -> None:
    location = located(64, 2 * BLOCK + 64)
    assert reads(location) == [(0, 5, 0)]
    assert places(location) == [64, 2 * BLOCK + 64]


def test_tensors_with_a_block_between_them_are_two_reads_one_behind_the_other_in_the_slot() -> None:
    location = located(64, 4 * BLOCK + 32)
    assert reads(location) == [(0, 3, 0), (4, 3, 3)]
    assert places(location) == [64, 3 * BLOCK + 32]
    assert location.nbytes == location.bytes_to_read == 6 * BLOCK


def test_reads_go_up_the_file_whatever_the_order_of_the_page() -> None:
    location = located(8 * BLOCK, 0)
    assert reads(location) == [(0, 2, 0), (8, 2, 2)]
    assert places(location) == [2 * BLOCK, 0]


@pytest.mark.parametrize(("offset", "dtype"), [(1, "bfloat16"), (0, "float32")])
def test_a_page_that_no_view_can_show_has_no_reads_and_the_places_of_the_layout(
    offset: int, dtype: str
) -> None:
    location = located(offset, 8 * BLOCK, dtype=dtype)
    assert reads(location) == []
    assert places(location) == [0, 2 * BLOCK]
    assert location.bytes_to_read == (3 if offset else 2) * BLOCK + 2 * BLOCK
