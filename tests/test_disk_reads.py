"""Reads of files, several at a time: by the system's queue or by threads, they bring the same bytes and errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesched.devices.shared.arena import ALIGNMENT, aligned_bytes
from moesched.devices.shared.direct_file import BlockRead, DirectFile, parts_of
from moesched.devices.torch.disk_reads import DiskReads
from moesched.errors import MoeschedError

BLOCKS = 40
MISSING = 100
"""Bytes that the file's last block lacks."""


@pytest.fixture(scope="module", params=[True, False], ids=["queued", "by threads"])
def reads(request: pytest.FixtureRequest) -> Iterator[DiskReads]:
    with closing(DiskReads(3, queued=request.param)) as reads:
        if request.param and not reads.queued:
            pytest.skip("this system queues no reads")
        yield reads


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "file"
    path.write_bytes(Random(1).randbytes(BLOCKS * ALIGNMENT - MISSING))
    return path


def read_of(file: DirectFile, first: int, blocks: int, counts: list[int] | None = None) -> BlockRead:
    """A read of blocks of the file into new memory; all bytes that the file has are needed."""
    offset, nbytes = first * ALIGNMENT, blocks * ALIGNMENT
    needed = min(nbytes, BLOCKS * ALIGNMENT - MISSING - offset)
    memory = aligned_bytes(nbytes).numpy().data
    return BlockRead(file, memory, offset, needed, None if counts is None else counts.append)


def has_its_bytes(read: BlockRead, content: bytes) -> bool:
    return read.into[: read.needed] == content[read.offset : read.offset + read.needed]


RANGES = st.integers(0, BLOCKS - 1).flatmap(
    lambda first: st.tuples(st.just(first), st.integers(1, BLOCKS - first))
)


@settings(max_examples=30)
@given(ranges=st.lists(RANGES, max_size=20), direct=st.booleans())
def test_all_reads_bring_the_bytes_of_the_file(
    reads: DiskReads, path: Path, ranges: list[tuple[int, int]], direct: bool
) -> None:
    content, counts = path.read_bytes(), list[int]()
    with closing(DirectFile(path, direct=direct)) as file:
        wanted = [read_of(file, *each, counts) for each in ranges]
        reads.run(wanted)
    assert all(has_its_bytes(read, content) for read in wanted)
    assert len(counts) == len(wanted)
    assert sum(counts) >= sum(read.needed for read in wanted)


def test_reads_from_the_page_cache_and_other_calls_run_beside_those_from_the_disk(
    reads: DiskReads, path: Path
) -> None:
    called: list[int] = []
    with closing(DirectFile(path)) as file:
        wanted = [replace(read_of(file, 0, 5), cached=True), read_of(file, 5, 5)]
        reads.run([*wanted, lambda: called.append(1)])
    assert all(has_its_bytes(read, path.read_bytes()) for read in wanted)
    assert called == [1]


def test_a_file_that_was_cut_short_is_named(reads: DiskReads, path: Path, tmp_path: Path) -> None:
    cut, end = tmp_path / "cut", 20 * ALIGNMENT + 7
    cut.write_bytes(path.read_bytes())
    counts: list[int] = []
    with closing(DirectFile(cut)) as file:
        os.truncate(cut, end)
        with pytest.raises(MoeschedError, match=f"{cut} ends at byte {end}, .* restore it and run again"):
            reads.run([read_of(file, first, 10, counts) for first in (0, 10, 20)])
    assert sum(counts) <= 20 * ALIGNMENT


def test_a_read_that_fails_is_named(reads: DiskReads, path: Path) -> None:
    with closing(DirectFile(path)) as file:
        good, bad = read_of(file, 0, 3), read_of(file, 3, 3)
        bad.offset += 1  # no multiple of a block: the system refuses it
        with pytest.raises(MoeschedError, match=f"of {path} at byte {bad.offset} failed: Invalid argument"):
            reads.run([good, bad])


def test_several_threads_may_read_at_once(reads: DiskReads, path: Path) -> None:
    content, wrong = path.read_bytes(), list[int]()

    def read_often(first: int) -> None:
        with closing(DirectFile(path)) as file:
            for _ in range(50):
                wanted = [read_of(file, first + each, 2) for each in (0, 2, 4, 6)]
                reads.run(wanted)
                wrong.extend(first for read in wanted if not has_its_bytes(read, content))

    threads = [threading.Thread(target=read_often, args=(first,)) for first in (0, 8, 16, 32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def in_memory() -> Iterator[Path]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("this system has no file system in memory")
    path = folder / f"moesched-test-{os.getpid()}"
    path.write_bytes(Random(2).randbytes(8 << 20))
    yield path
    path.unlink()


def test_threads_read_where_the_system_makes_each_read_while_it_is_started(in_memory: Path) -> None:
    content = in_memory.read_bytes()
    with closing(DiskReads()) as reads, closing(DirectFile(in_memory)) as file:
        if not reads.queued or file.descriptor < 0:
            pytest.skip("this system queues no reads of such files")
        for _ in range(10):
            memory = aligned_bytes(len(content)).numpy().data
            reads.run([BlockRead(file, *part) for part in parts_of(memory, 0, len(content))])
            assert memory == content
        assert not reads.queued
