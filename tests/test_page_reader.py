"""After a read a slot holds the tensors of the files, wherever they lie there and however they are cut."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from moesched.devices.shared.arena import ALIGNMENT, Arena, aligned_bytes
from moesched.devices.shared.direct_file import MOST_BYTES, DirectFile, parts_of
from moesched.devices.shared.page_reader import PagePart, PageReader
from moesched.errors import BadInput, MoeschedError
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.host_buffers import CACHE_LINE
from moesched.models.layout import Page, room_for, weight_layout
from moesched.models.published import published_tensors
from moesched.models.random_model import write_random_model
from moesched.models.tensors import tensor_shapes
from reference import tensors_in
from small_models import TINY

BLOCKS_OF_ROWS = 1000  # bytes: a page of a few rows

PUBLISHED = {stored.parts[0][0]: name for name, stored in published_tensors(TINY).items()}

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model in several shards, with the names of published checkpoints."""
    return write_random_model(TINY, tmp_path / "model", 11, shard_bytes=60_000)


def canonical(tensors: Tensors) -> Tensors:
    return {name: tensors[PUBLISHED[name]] for name in tensor_shapes(TINY)}


def move_data(directory: Path, start: int) -> None:
    """Pad every header, so that the data of each file begins `start` bytes after a multiple of 4096."""
    for path in directory.glob("*.safetensors"):
        raw = path.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        header = raw[8:end] + b" " * ((start - end) % ALIGNMENT)
        path.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])


def write_fused(directory: Path, tensors: Tensors) -> None:
    """One file without an index, the experts of a layer in one tensor."""
    fused = {PUBLISHED[n]: t.clone() for n, t in tensors.items() if "experts" not in n}
    for layer in range(TINY.layers):
        experts = [f"layers.{layer}.experts.{e}." for e in range(TINY.routed.experts)]
        prefix = f"model.layers.{layer}.mlp.experts."
        gate_up = [torch.cat([tensors[e + "gate"], tensors[e + "up"]]) for e in experts]
        fused[prefix + "gate_up_proj"] = torch.stack(gate_up)
        fused[prefix + "down_proj"] = torch.stack([tensors[e + "down"] for e in experts])
    for path in [*directory.glob("*.safetensors"), *directory.glob("*.index.json")]:
        path.unlink()
    save_file(fused, directory / "model.safetensors")


def read_all(
    reader: PageReader, pages: tuple[Page, ...]
) -> Iterator[tuple[Page, dict[str, list[torch.Tensor]]]]:
    arena = Arena(1, reader.slot_bytes)
    for page in pages:
        arena.slot(0).fill_(255)
        reader.read(page, arena.slot(0))
        yield page, reader.views(arena.slot(0), page)


def require_equal(
    directory: Path, expected: Tensors, dtype: str, page_bytes: int | None = None, direct: bool = True
) -> None:
    """Read every page and every global tensor, and compare each with what is expected."""
    checkpoint = open_checkpoint(directory)
    layout = weight_layout(checkpoint.config, dtype, page_bytes)
    wanted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in expected.items()}
    seen: dict[str, list[torch.Tensor]] = {}
    with PageReader(checkpoint, layout, direct) as reader:
        for page, views in read_all(reader, layout.pages):
            assert reader.bytes_in_slot(page) <= room_for(page)
            assert list(views) == list(dict.fromkeys(extent.tensor for extent in page.extents))
            for extent in page.extents:
                block = views[extent.tensor].pop(0)
                assert torch.equal(block, wanted[extent.tensor][slice(*extent.rows)])
                seen.setdefault(extent.tensor, []).append(block.clone())
        for name in wanted.keys() - seen.keys():
            seen[name] = [reader.read_tensor(name)]
    assert seen.keys() == wanted.keys()
    assert all(torch.equal(torch.cat(blocks), wanted[name]) for name, blocks in seen.items())


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("page_bytes", [None, BLOCKS_OF_ROWS, 5000])
def test_slots_hold_the_tensors_of_the_files(model: Path, page_bytes: int | None, direct: bool) -> None:
    require_equal(model, canonical(tensors_in(model)), "bfloat16", page_bytes, direct)


@pytest.mark.parametrize("page_bytes", [None, BLOCKS_OF_ROWS])
@pytest.mark.parametrize("start", [0, 1, 2, 8, 511, 4094])
def test_data_may_begin_at_any_byte_of_a_file(model: Path, start: int, page_bytes: int | None) -> None:
    expected = canonical(tensors_in(model))
    move_data(model, start)
    require_equal(model, expected, "bfloat16", page_bytes)


@pytest.mark.parametrize("page_bytes", [None, BLOCKS_OF_ROWS])
def test_experts_may_be_fused_into_one_tensor(model: Path, page_bytes: int | None) -> None:
    expected = canonical(tensors_in(model))
    write_fused(model, expected)
    require_equal(model, expected, "bfloat16", page_bytes)


@pytest.mark.parametrize("start", [0, 1, 2, 4094])
@pytest.mark.parametrize(
    ("stored_as", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float32")]
)
def test_another_dtype_or_an_odd_offset_is_converted_on_the_way(
    tmp_path: Path, stored_as: str, wanted: str, start: int
) -> None:
    directory = write_random_model(TINY, tmp_path / "m", dtype=stored_as, shard_bytes=60_000)
    expected = canonical(tensors_in(directory))
    move_data(directory, start)
    require_equal(directory, expected, wanted)
    require_equal(directory, expected, wanted, page_bytes=BLOCKS_OF_ROWS)


def test_one_file_may_hold_several_dtypes(model: Path) -> None:
    expected = canonical(tensors_in(model))
    kinds = {"q": torch.float32, "ffn_norm": torch.float16, "gate": torch.float32}
    mixed = {
        name: tensor.to(kinds.get(name.split(".")[-1], tensor.dtype)) for name, tensor in expected.items()
    }
    write_fused(model, expected)
    save_file({PUBLISHED[n]: t for n, t in mixed.items()}, model / "model.safetensors")
    require_equal(model, expected, "bfloat16")


def test_a_tensor_larger_than_the_conversion_buffer_is_converted_whole(tmp_path: Path) -> None:
    config = TINY.varied(layers=1, vocabulary=70_001)  # 9 MB in bfloat16
    directory = write_random_model(config, tmp_path / "m")
    move_data(directory, 1)
    checkpoint = open_checkpoint(directory)
    expected = tensors_in(write_random_model(config, tmp_path / "same"))["model.embed_tokens.weight"]
    with PageReader(checkpoint, weight_layout(config, "float32")) as reader:
        assert torch.equal(reader.read_tensor("embedding"), expected.float())


@pytest.mark.parametrize("page_bytes", [None, 5000])
def test_a_page_is_copied_to_offsets_that_are_multiples_of_a_cache_line(
    tmp_path: Path, page_bytes: int | None
) -> None:
    directory = write_random_model(TINY, tmp_path / "m")
    move_data(directory, 8)
    checkpoint, expected = open_checkpoint(directory), canonical(tensors_in(directory))
    layout = weight_layout(checkpoint.config, page_bytes=page_bytes)
    off = 0
    with PageReader(checkpoint, layout) as reader:
        arena = Arena(2, reader.slot_bytes)
        for page in layout.pages:
            reader.read(page, arena.slot(0))
            off += sum(each.offset % CACHE_LINE > 0 for each in reader.location(page).placements)
            for piece, offset in reader.pieces(page, [PagePart(0, arena.slot(0))]):
                arena.slot(1)[offset : offset + len(piece)] = piece
            views = reader.views(arena.slot(1), page, aligned=True)
            for extent in page.extents:
                block = views[extent.tensor].pop(0)
                assert block.data_ptr() % CACHE_LINE == 0
                assert torch.equal(block, expected[extent.tensor][slice(*extent.rows)])
    assert off, "where they were read to, they were elsewhere"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_read_are_counted_in_whole_blocks(tmp_path: Path, dtype: str) -> None:
    directory = write_random_model(TINY, tmp_path / "m")
    checkpoint = open_checkpoint(directory)
    layout = weight_layout(checkpoint.config, dtype)
    with PageReader(checkpoint, layout) as reader:
        arena = Arena(1, reader.slot_bytes)
        counted = [reader.read(page, arena.slot(0)) for page in layout.pages]
        assert reader.bytes_read == sum(counted)
        assert counted[:-1] == [reader.location(page).bytes_to_read for page in layout.pages[:-1]]
        at_the_end_of_the_file = reader.location(layout.pages[-1]).bytes_to_read - counted[-1]
        assert 0 <= at_the_end_of_the_file < ALIGNMENT


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_several_threads_read_at_once(model: Path, dtype: str) -> None:
    checkpoint, expected = open_checkpoint(model), canonical(tensors_in(model))
    layout = weight_layout(checkpoint.config, dtype, BLOCKS_OF_ROWS)
    with PageReader(checkpoint, layout) as reader, ThreadPoolExecutor(4) as threads:
        arena = Arena(4, reader.slot_bytes)

        def read_quarter(quarter: int) -> int:
            nbytes = 0
            for page in layout.pages[quarter::4]:
                nbytes += reader.read(page, arena.slot(quarter))
                views = reader.views(arena.slot(quarter), page)
                for extent in page.extents:
                    rows = expected[extent.tensor][slice(*extent.rows)]
                    assert torch.equal(views[extent.tensor].pop(0), rows.to(reader.dtype))
            return nbytes

        assert sum(threads.map(read_quarter, range(4))) == reader.bytes_read


@pytest.mark.parametrize("missing", [0, 1, ALIGNMENT - 1])
def test_parts_of_a_read_fill_it_in_any_order(tmp_path: Path, missing: int) -> None:
    nbytes = 2 * MOST_BYTES + 2 * ALIGNMENT
    content = np.random.default_rng(1).bytes(nbytes - missing)
    (tmp_path / "file").write_bytes(content)
    memory = aligned_bytes(nbytes).numpy().data
    file = DirectFile(tmp_path / "file", direct=False)
    try:
        parts = list(parts_of(memory[ALIGNMENT:], ALIGNMENT, len(content) - ALIGNMENT))
        counts = [file.read(*part) for part in reversed(parts)]
    finally:
        file.close()
    assert all(len(into) <= MOST_BYTES for into, _, _ in parts)
    assert sum(counts) == len(content) - ALIGNMENT
    assert memory[ALIGNMENT : len(content)] == content[ALIGNMENT:]


def test_the_reads_of_a_page_are_independent(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    layout = weight_layout(checkpoint.config)
    with PageReader(checkpoint, layout) as reader:
        arena = Arena(2, reader.slot_bytes)
        several = 0
        for page in layout.pages:
            arena.slot(0).zero_(), arena.slot(1).zero_()
            reader.read(page, arena.slot(0))
            reads = reader.reads(page, arena.slot(1))
            several += len(reads) > 1
            for read in reversed(reads):
                read()
            assert torch.equal(arena.slot(0), arena.slot(1))
    assert several, "some pages lie in several places of the files"


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="needs reads that do not wait for the disk")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_page_may_come_from_the_page_cache_also_if_it_is_converted(tmp_path: Path, dtype: str) -> None:
    checkpoint = open_checkpoint(write_random_model(TINY, tmp_path / "m"))
    layout = weight_layout(checkpoint.config, dtype)
    with PageReader(checkpoint, layout) as reader:
        slot = Arena(1, reader.slot_bytes).slot(0)
        reads = [read_from_disk(reader, layout.pages[0], slot, cached=cached) for cached in (False, True)]
    if not reads[0]:
        pytest.skip("needs a file system on a disk")
    assert not reads[1]


def read_from_disk(reader: PageReader, page: Page, slot: torch.Tensor, *, cached: bool) -> int:
    """The blocks that the system read from the disk meanwhile, for this thread."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
    reader.read(page, slot, cached=cached)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock - before


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_cut_short_while_it_is_open_is_told(model: Path, direct: bool, dtype: str) -> None:
    checkpoint = open_checkpoint(model)
    layout = weight_layout(checkpoint.config, dtype)
    page = layout.pages[-1]
    last = max((checkpoint.tensors[extent.tensor] for extent in page.extents), key=lambda t: t.offset)
    with PageReader(checkpoint, layout, direct) as reader:
        arena = Arena(1, reader.slot_bytes)
        os.truncate(last.file, last.offset + 100)
        with pytest.raises(
            MoeschedError, match=rf"{last.file} ends at byte {last.offset + 100},.* restore it"
        ):
            reader.read(page, arena.slot(0))
        assert reader.bytes_read == 0


def test_a_file_that_went_missing_is_told(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    gone = checkpoint.tensors["lm_head"].file
    gone.unlink()
    with pytest.raises(BadInput, match=f"cannot open {gone}: No such file or directory; restore it"):
        PageReader(checkpoint, weight_layout(checkpoint.config))


def test_a_failing_device_is_told_with_file_and_place(tmp_path: Path) -> None:
    directory = DirectFile(tmp_path, direct=False)  # opens, and fails when it is read
    try:
        memory = Arena(1, ALIGNMENT).slot(0).numpy().data
        with pytest.raises(
            MoeschedError, match=rf"reading 10 bytes of {tmp_path} at byte 8192 failed: .*; check"
        ):
            directory.read(memory, 8192, 10)
    finally:
        directory.close()


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="needs reads that do not wait for the disk")
@pytest.mark.parametrize("dropped", ["nothing", "the second half", "everything"])
def test_what_the_page_cache_has_is_taken_from_there_and_the_rest_from_the_disk(
    tmp_path: Path, dropped: str
) -> None:
    path, blocks = tmp_path / "file", 256
    contents = bytes(number % 251 for number in range(blocks * ALIGNMENT))
    with path.open("wb") as written:
        written.write(contents)
        written.flush()
        os.fsync(written.fileno())
        if dropped != "nothing":
            first = 0 if dropped == "everything" else len(contents) // 2
            os.posix_fadvise(written.fileno(), first, 0, os.POSIX_FADV_DONTNEED)
    file = DirectFile(path)
    try:
        memory = Arena(1, len(contents)).slot(0)
        assert file.read(memory.numpy().data, 0, len(contents), cached=True) == len(contents)
        assert memory.numpy().tobytes() == contents
        os.truncate(path, ALIGNMENT)
        with pytest.raises(MoeschedError, match="it was cut short since it was opened"):
            file.read(memory.numpy().data, 0, len(contents), cached=True)
    finally:
        file.close()


def test_a_slot_that_does_not_fit_is_told(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    layout = weight_layout(checkpoint.config)
    with PageReader(checkpoint, layout) as reader:
        slot = Arena(1, reader.slot_bytes + ALIGNMENT).slot(0)
        with pytest.raises(MoeschedError, match="a slot of 4096 bytes is too small for"):
            reader.read(layout.pages[0], slot[:4096])
        with pytest.raises(MoeschedError, match="is not aligned to 4096; use an Arena's"):
            reader.read(layout.pages[0], slot[64:])


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs a file system that refuses direct reads: Linux's /proc"
)
def test_where_direct_reads_are_refused_the_file_is_read_all_the_same(tmp_path: Path) -> None:
    file = DirectFile(Path("/proc/version"))
    try:
        assert file.caching == "dropped"
        memory = Arena(1, ALIGNMENT).slot(0)
        read = file.read(memory.numpy().data, 0, 10)
        assert bytes(memory[:read].tolist()) == Path("/proc/version").read_bytes()
    finally:
        file.close()


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs a file system that refuses direct reads: Linux's /proc"
)
def test_that_the_page_cache_is_used_is_said_once(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    cached = msgspec.structs.replace(checkpoint.tensors["final_norm"], file=Path("/proc/version"))
    checkpoint = Checkpoint(checkpoint.config, model, {**checkpoint.tensors, "final_norm": cached})
    layout = weight_layout(checkpoint.config)
    with capture_logs() as logs, PageReader(checkpoint, layout) as reader:
        slot = Arena(1, reader.slot_bytes).slot(0)
        for page in layout.pages:
            reader.read(page, slot)
    assert [log["log_level"] for log in logs] == ["warning"]
    assert "/proc/version" in logs[0]["files"]
