"""Weights at home for a GPU: in files that it copies from itself, in locked memory, or behind a ring of slots."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shared.small_runs import PAGE_LOCKED, TWO_MEMORIES, Generated
from moesched.devices.lagging.device import GPU_DEVICE, LaggingDevice, LaggingGpu
from moesched.devices.lagging.pinned import is_read_only
from moesched.devices.shared.page_reader import PageReader
from moesched.devices.torch.compute import Compute
from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.held_pages import CannotHold, HeldPage
from moesched.devices.torch.locked_memory import locked_bytes
from moesched.devices.torch.mapped_home import MappedHome
from moesched.devices.torch.page_copies import PageCopies
from moesched.devices.torch.registered_files import BLOCK, FileSpan, RegisteredFiles, spans_of
from moesched.errors import MoeschedError
from moesched.machines import Machine
from moesched.machines.toml_text import machine_toml
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import Page, WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.seams import Observer, ignore_progress
from moesched.tasks import Task
from odd_models import WIDE, layout_of
from odd_runs import one_batch, report_of
from test_mapped_pages import linux, mapped_bytes

pytestmark = linux

MAP_FIXED = 0x10  # Python's mmap module has no name for it
MAPPED, REGISTERED, ORDINARY = "mapped files", "registered memory", "ordinary memory"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "wide"
    return write_random_model(WIDE, folder, seed=3, dtype="bfloat16")


@pytest.fixture
def checkpoint(wide: Path, tmp_path: Path) -> Checkpoint:
    """A copy of its own, to be changed."""
    for file in wide.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return open_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def expected(wide: Path) -> Generated:
    layout = layout_of(WIDE, "bfloat16")
    return one_batch(TorchDevice(open_checkpoint(wide), layout, keep_logits=True, kernel="torch"), "resident")


@pytest.fixture
def gpu() -> LaggingGpu:
    return LaggingGpu(seed=2)


@pytest.fixture
def reader(checkpoint: Checkpoint) -> Iterator[PageReader]:
    with PageReader(checkpoint, layout(checkpoint)) as reader:
        yield reader


@pytest.fixture
def home(reader: PageReader, gpu: LaggingGpu) -> Iterator[MappedHome]:
    home = MappedHome(reader, 2, GPU_DEVICE)
    yield home
    home.hold((), ignore_progress)
    assert not gpu.pinned.registered
    assert not gpu.pinned.faults


def layout(checkpoint: Checkpoint) -> WeightLayout:
    return weight_layout(checkpoint.config, page_bytes=20_000)


def weights_of(checkpoint: Checkpoint) -> Path:
    (file,) = checkpoint.path.glob("*.safetensors")
    return file


def device_on(gpu: LaggingGpu, checkpoint: Checkpoint, *, map_files: bool = True) -> LaggingDevice:
    return LaggingDevice(
        checkpoint, layout_of(WIDE, "bfloat16"), keep_logits=True, map_files=map_files, gpu=gpu
    )


def streamed(
    device: LaggingDevice, policy: str, machine: Machine = PAGE_LOCKED, *observers: Observer
) -> Generated:
    return one_batch(device, policy, machine=machine, weights=0.8, observers=observers, keep_open=True)


class Allocations:
    """The numbers of allocations of page-locked memory that were seen after the second step."""

    def __init__(self, gpu: LaggingGpu) -> None:
        self.seen: set[int] = set()
        self._gpu = gpu

    def ended(self, task: Task) -> None:
        if task.step > 1:
            self.seen.add(self._gpu.pinned.allocations)


def bytes_in(held: HeldPage | None, nbytes: int) -> bytes:
    assert held is not None
    slot = torch.zeros(nbytes, dtype=torch.uint8)
    for part in held.parts:
        slot[part.at : part.at + len(part.memory)] = part.memory
    return bytes(slot.numpy().data)


@pytest.mark.parametrize(
    ("way", "policy"),
    [(MAPPED, "cgopipe"), (REGISTERED, "flexgen"), (ORDINARY, "layer_streaming"), (ORDINARY, "cgopipe")],
)
def test_each_way_gives_the_bits_of_the_cpu_and_no_copy_blocks(
    wide: Path, expected: Generated, gpu: LaggingGpu, way: str, policy: str
) -> None:
    told: list[tuple[float, float]] = []
    device = device_on(gpu, open_checkpoint(wide), map_files=way == MAPPED)
    device.tell = lambda what, done, total: told.append((done, total)) if what == "loading weights" else None
    machine, read = TWO_MEMORIES if way == ORDINARY else PAGE_LOCKED, set()
    for _ in range(2):
        found = streamed(device, policy, machine, allocations := Allocations(gpu))
        assert len(allocations.seen) == 1
        read.add(device.bytes_read)
        assert found.logits_RSV.equal(expected.logits_RSV)
        assert device.weights_home is not None
        assert device.weights_home.way == way
    device.close()
    gc.collect()
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done) and {done[-1]} == set(totals), "loading tells its progress"
    assert len(read) == 1, "the second batch finds its weights"
    assert gpu.operations.blocked == 0
    assert gpu.pinned.faults == []
    assert not gpu.pinned.registered


def test_weights_that_the_host_computes_with_are_read_into_locked_memory_and_mapped_no_longer(
    wide: Path, gpu: LaggingGpu
) -> None:
    device = device_on(gpu, open_checkpoint(wide))
    streamed(device, "layer_streaming")
    assert any(map(is_read_only, gpu.pinned.registered))
    one_batch(device, "twiddler", {"experts": 4}, machine=PAGE_LOCKED, keep_open=True)
    assert not any(map(is_read_only, gpu.pinned.registered))
    assert device.weights_home is not None
    assert device.weights_home.way == REGISTERED
    assert "the host computes with the weights" in device.weights_home.reason
    device.close()


def refuse(gpu: LaggingGpu, file: Path, refusal: str) -> AbstractContextManager[object]:
    """Half way through the weights, or by another program."""
    if refusal == "of files":
        gpu.pinned.refuses_files = 801
    elif refusal == "of more than some memory":
        gpu.pinned.most_registered = 300_000
    else:
        return file.open("r+b")
    return nullcontext()


@pytest.mark.parametrize(
    ("refusal", "way", "reason"),
    [
        ("of files", REGISTERED, r"\(error 801\): put the model on a local disk"),
        ("of more than some memory", ORDINARY, r"\(error 2\): put the model on a local disk.*CUDA locks no"),
        ("of a lease", REGISTERED, "the system gives no lease on"),
    ],
)
def test_a_way_that_is_refused_gives_way_to_the_next_by_name(
    checkpoint: Checkpoint,
    expected: Generated,
    gpu: LaggingGpu,
    capsys: pytest.CaptureFixture[str],
    refusal: str,
    way: str,
    reason: str,
) -> None:
    device = device_on(gpu, checkpoint)
    with refuse(gpu, weights_of(checkpoint), refusal):
        assert streamed(device, "layer_streaming").logits_RSV.equal(expected.logits_RSV)
        home = device.weights_home
        assert home is not None
        assert home.way == way
        assert re.search(reason, home.reason)
        assert ("CUDA locks no" in home.reason) == (way == ORDINARY)
        assert capsys.readouterr().err.count("weights cannot be at home in mapped files") == 1
        streamed(device, "layer_streaming")
        assert capsys.readouterr().err == "", "it is not tried again"
    device.close()
    gc.collect()
    assert not gpu.pinned.registered


class Writer:
    """Tries to write to a file once the first page has been copied."""

    def __init__(self, file: Path) -> None:
        self._files = [file]

    def ended(self, task: Task) -> None:
        if task.verb == "fetch" and self._files:
            with pytest.raises(BlockingIOError):
                os.open(self._files.pop(), os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)


def test_a_write_to_a_mapped_file_ends_the_run_in_one_line_and_leaves_nothing_locked(
    checkpoint: Checkpoint, gpu: LaggingGpu
) -> None:
    report = report_of(
        device_on(gpu, checkpoint),
        "layer_streaming",
        machine=PAGE_LOCKED,
        weights=0.8,
        observers=[Writer(weights_of(checkpoint))],
    )
    assert report.failure is not None
    assert f"another process writes to {weights_of(checkpoint)}" in report.failure
    assert report.failure.endswith("change it after the run, or run with --device-set map_files=false")
    gc.collect()
    os.close(os.open(weights_of(checkpoint), os.O_WRONLY | os.O_NONBLOCK))
    assert not gpu.pinned.registered
    assert gpu.pinned.faults == []


@pytest.mark.parametrize("way", [MAPPED, REGISTERED, ORDINARY])
def test_ctrl_c_while_weights_load_leaves_nothing_locked(wide: Path, gpu: LaggingGpu, way: str) -> None:
    told = []

    def interrupt(what: str, done: float, total: float) -> None:
        if what == "loading weights":
            told.append((done, total))
            raise KeyboardInterrupt

    device = device_on(gpu, open_checkpoint(wide), map_files=way == MAPPED)
    device.tell = interrupt
    report = report_of(
        device, "layer_streaming", machine=TWO_MEMORIES if way == ORDINARY else PAGE_LOCKED, weights=0.8
    )
    gc.collect()
    assert report.interrupted
    assert len(told) == 1
    assert not gpu.pinned.registered


def test_mapped_pages_have_the_bytes_that_reads_give_even_if_their_tensors_lie_apart(
    tmp_path: Path, gpu: LaggingGpu
) -> None:
    folder = write_random_model(WIDE, tmp_path / "many files", dtype="bfloat16", shard_bytes=20_000)
    checkpoint, pages = open_checkpoint(folder), weight_layout(WIDE, "bfloat16").pages
    with PageReader(checkpoint, weight_layout(WIDE, "bfloat16")) as reader:
        home = MappedHome(reader, 2, GPU_DEVICE)
        home.hold(pages, ignore_progress)
        assert any(len(reader.location(page).runs) > 1 for page in pages)
        for page in pages:
            memory, runs = reader.new_memory(reader.slot_bytes), reader.location(page).runs
            reader.read(page, memory)
            found = bytes_in(home.get(page), len(memory))
            for run in runs:
                part = slice(run.at, run.at + run.needed)
                assert found[part] == bytes(memory[part].numpy().data)
        home.hold((), ignore_progress)
    assert not gpu.pinned.registered


def test_what_is_registered_was_read_before_and_a_page_asks_for_the_lease_on_its_file(
    checkpoint: Checkpoint, home: MappedHome
) -> None:
    pages = layout(checkpoint).pages
    home.hold(pages, ignore_progress)
    assert mapped_bytes(checkpoint.path) >= sum(page.nbytes for page in pages)
    with pytest.raises(BlockingIOError):
        os.open(weights_of(checkpoint), os.O_WRONLY | os.O_NONBLOCK)
    with pytest.raises(MoeschedError, match="another process writes to"):
        home.get(pages[0])


def test_pages_in_locked_memory_do_not_go_through_the_ring(
    checkpoint: Checkpoint, reader: PageReader, gpu: LaggingGpu
) -> None:
    pages = layout(checkpoint)
    copies = PageCopies(reader, Compute(str(GPU_DEVICE), pages, "torch", pin=False, threads=None))
    with gpu, gpu.streams.on(stream := gpu.streams.new_stream()):
        stream.eagerness = 0.0
        copies.make_ring()
        slot = locked_bytes(reader.slot_bytes, GPU_DEVICE)
        target = torch.zeros(reader.slot_bytes, dtype=torch.uint8, device=GPU_DEVICE)
        copies.to_accelerator(pages.pages[0], HeldPage.whole(slot, locked=True), target)
        slot.fill_(1)
        assert target.cpu()[: pages.pages[0].extents[0].nbytes].all(), (
            "it is read when the stream comes to it"
        )
    copies.close()


def test_what_one_batch_has_locked_and_the_next_needs_stays_locked(
    checkpoint: Checkpoint, gpu: LaggingGpu, home: MappedHome
) -> None:
    first, *_, last = pages = apart(layout(checkpoint).pages)
    home.hold(pages[:-1], ignore_progress)
    before = dict(gpu.pinned.registered)
    home.hold(pages[1:], ignore_progress)
    assert len(gpu.pinned.registered) == len(before) == len(pages) - 1
    assert len(gpu.pinned.registered.keys() - before.keys()) == 1
    assert home.get(first) is None
    assert home.get(last) is not None


def apart(pages: list[Page] | tuple[Page, ...]) -> list[Page]:
    """Pages of experts that are not neighbours."""
    experts = [page for page in pages if page.expert >= 0]
    return experts[:: len(experts) // 4]


def test_a_refusal_half_way_undoes_the_registrations_before(
    checkpoint: Checkpoint, gpu: LaggingGpu, home: MappedHome
) -> None:
    pages = apart(layout(checkpoint).pages)
    home.hold(pages, ignore_progress)
    gpu.pinned.most_registered = sum(gpu.pinned.registered.values()) - 1
    home.hold((), ignore_progress)
    with pytest.raises(CannotHold, match=r"CUDA registers no .* of .*safetensors \(error 2\)"):
        home.hold(pages, ignore_progress)
    assert not gpu.pinned.registered


@contextmanager
def hole(address: int) -> Iterator[None]:
    """Unmap a page: the system then answers that it has no memory to read it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    page = ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE)
    assert libc.munmap(*page) == 0
    try:
        yield
    finally:
        fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        assert libc.mmap(*page, mmap.PROT_READ, fixed, -1, ctypes.c_long(0)) == address


def test_a_file_that_the_system_has_no_memory_to_map_is_refused_in_favour_of_the_next_way(
    checkpoint: Checkpoint, gpu: LaggingGpu
) -> None:
    file, files = weights_of(checkpoint), RegisteredFiles(2, GPU_DEVICE)
    span = FileSpan(file, 0, 4 * BLOCK)
    files.keep([span])
    refused = r"mapping \d+ bytes of .*: Cannot allocate memory; give the container .* map_files=false"
    with hole(files[file].bytes.data_ptr() + BLOCK), pytest.raises(CannotHold, match=refused):
        files.register([span], ignore_progress)
    assert not gpu.pinned.registered
    files.close()


def test_a_file_that_was_cut_short_is_told_before_it_is_registered(
    checkpoint: Checkpoint, home: MappedHome, gpu: LaggingGpu
) -> None:
    os.truncate(weights_of(checkpoint), weights_of(checkpoint).stat().st_size // 2)
    with pytest.raises(MoeschedError, match=r"ends at byte \d+, .* cut short since it was opened"):
        home.hold(layout(checkpoint).pages, ignore_progress)
    assert not gpu.pinned.registered


def test_neighbouring_ranges_of_a_file_are_one_span() -> None:
    one, other = Path("one"), Path("other")
    ranges = [
        (one, 3 * BLOCK, 1),
        (one, 10, BLOCK),
        (other, 0, BLOCK),
        (one, 2 * BLOCK - 1, 1),
        (one, 9 * BLOCK, 2 * BLOCK),
    ]
    assert spans_of(ranges) == [
        FileSpan(one, 0, 2 * BLOCK),
        FileSpan(one, 3 * BLOCK, 4 * BLOCK),
        FileSpan(one, 9 * BLOCK, 11 * BLOCK),
        FileSpan(other, 0, BLOCK),
    ]


def leave_a_copy(gpu: LaggingGpu) -> None:
    """Have a copy from each piece of locked memory in the queue of a stream that is in no hurry."""
    with gpu, gpu.streams.on(stream := gpu.streams.new_stream()):
        stream.eagerness = 0.0
        for address, nbytes in gpu.pinned.registered.items():
            memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
            torch.empty(nbytes, dtype=torch.uint8, device=GPU_DEVICE).copy_(memory, non_blocking=True)


def test_memory_is_unlocked_only_after_copies_that_a_failed_run_left(wide: Path, gpu: LaggingGpu) -> None:
    device = device_on(gpu, open_checkpoint(wide))
    streamed(device, "cgopipe")
    leave_a_copy(gpu)
    one_batch(device, "resident", machine=PAGE_LOCKED, keep_open=True)
    assert not any(map(is_read_only, gpu.pinned.registered))
    streamed(device, "layer_streaming")
    leave_a_copy(gpu)
    device.close()
    gc.collect()
    assert gpu.pinned.faults == []
    assert not gpu.pinned.registered


def test_a_run_says_where_its_weights_came_from_and_why(command: Any, model: Path, tmp_path: Path) -> None:
    machine, page = tmp_path / "machine.toml", tmp_path / "page.html"
    machine.write_text(machine_toml(TWO_MEMORIES))
    run = ("run", model, "--prompt", "a", "--max-new-tokens", 2, "--policy", "layer_streaming")
    device = ("--device", "moesched.devices.lagging.device:LaggingDevice", "--machine", machine)
    said = command(*run, *device, "--report", page)
    line = (
        "Weights come from ordinary memory: the machine limits page-locked memory: it has the memory pinned"
    )
    assert line in said.out
    assert line in page.read_text()
    assert command(*run, *device, "--json").json["weights_home"]["way"] == ORDINARY
    assert command(*run, "--json").json["weights_home"] is None
