"""Through the page cache a slot shows a part of a file: the same weights, without a copy of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from moesched.devices.shared.coded import rows_of
from moesched.devices.shared.page_reader import PageReader
from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.file_lease import FileLease
from moesched.devices.torch.mapped_pages import MappedPages
from moesched.errors import MoeschedError
from moesched.machines.local import local_machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.steps.memory import Memory, Pool, Slot, slots_of
from moesched.system.memory_advice import HUGE_PAGE, POPULATE_READ, system_takes
from small_models import SMALL


def gives_leases() -> bool:
    """Test whether the system gives a lease on a temporary file; some file systems do not know leases."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.touch()
        try:
            FileLease(file, "wait").close()
        except OSError:
            return False
    return True


linux = pytest.mark.skipif(
    not (system_takes(POPULATE_READ) and gives_leases()),
    reason="needs Linux 5.14, which reads into mapped memory when asked, and a file system with leases",
)

POLICIES = ("layer_streaming", "cgopipe", "expert_streaming")
PROMPTS = [[1, 2, 3], [4], [5, 6]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(SMALL, tmp_path_factory.mktemp("models") / "small", dtype="bfloat16")


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path) -> Checkpoint:
    """A copy, for tests that damage it."""
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return open_checkpoint(tmp_path)


@contextmanager
def shown(
    checkpoint: Checkpoint, layout: WeightLayout | None = None
) -> Iterator[tuple[MappedPages, WeightLayout]]:
    layout = layout or weight_layout(checkpoint.config, page_bytes=4096)
    with PageReader(checkpoint, layout, direct=False) as reader:
        pages = MappedPages(checkpoint, layout, reader)
        yield pages, layout
        pages.close()


def slots(count: int) -> Sequence[Slot]:
    return slots_of(Pool("shown", Memory("host", 10**9), count, 8192))


def generate(model: Path, policy: str, *, direct: bool, dtype: str | None = None) -> TorchDevice:
    """Four tokens a prompt, with room for about half of the pages."""
    checkpoint = open_checkpoint(model)
    layout = weight_layout(checkpoint.config, dtype, page_bytes=4096)
    device = TorchDevice(checkpoint, layout, keep_logits=True, direct=direct)
    chosen = make_policy(policy)
    batch = split_batch([len(prompt) for prompt in PROMPTS], 4, 2)
    weights = sum(map(device.slot_bytes, layout.pages))
    budget = {"host": layout.globals_bytes + weights // 2 + 600_000}
    plan = plan_run(local_machine(), layout, batch, chosen, budget, device.slot_bytes)
    assert plan.weights.pools, "nothing streams"
    run(plan, chosen, device, PROMPTS)
    return device


def as_bits(device: TorchDevice) -> dict[tuple[int, ...], list[list[int]]]:
    by_requests: dict[tuple[int, ...], list[list[int]]] = {}
    for requests, logits_SV in device.logits:
        by_requests.setdefault(requests, []).append(logits_SV.view(torch.int32).flatten().tolist())
    return by_requests


@linux
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_shown_gives_the_same_logits_to_the_bit_as_what_is_copied(model: Path, policy: str) -> None:
    shown, copied = generate(model, policy, direct=False), generate(model, policy, direct=True)
    assert as_bits(shown) == as_bits(copied)


@linux
def test_what_is_shown_counts_as_read(model: Path) -> None:
    counts = {generate(model, "layer_streaming", direct=direct).bytes_read for direct in (False, True)}
    assert len(counts) == 1


def test_a_checkpoint_of_another_dtype_is_copied_and_converted(model: Path) -> None:
    through_cache = generate(model, "layer_streaming", direct=False, dtype="float32")
    past_cache = generate(model, "layer_streaming", direct=True, dtype="float32")
    assert as_bits(through_cache) == as_bits(past_cache)


def test_advice_that_the_system_has_never_heard_of_is_not_taken() -> None:
    assert not system_takes(9999)


@linux
def test_a_slot_shows_the_bytes_of_its_file(checkpoint: Checkpoint) -> None:
    (slot,) = slots(1)
    with shown(checkpoint) as (pages, layout):
        files = {file: file.read_bytes() for file in checkpoint.path.glob("*.safetensors")}
        for page in layout.pages:
            pages.bring(page, slot)
            for extent in page.extents:
                stored = checkpoint.tensors[extent.tensor]
                row = stored.nbytes // stored.shape[0]
                start = stored.offset + extent.rows[0] * row
                (block,) = pages.views(page)[extent.tensor]
                assert (
                    bytes(rows_of(block).view(torch.uint8).numpy().data)
                    == files[stored.file][start : start + extent.nbytes]
                )


@linux
def test_a_kernel_that_still_reads_finds_its_weights_after_the_slot_got_another_page(
    checkpoint: Checkpoint,
) -> None:
    (slot,) = slots(1)
    with shown(checkpoint) as (pages, layout):
        first, *others = layout.pages
        pages.bring(first, slot)
        blocks = [rows_of(block) for blocks in pages.views(first).values() for block in blocks]
        before = [block.clone() for block in blocks]
        for page in others:
            pages.bring(page, slot)
        assert all(torch.equal(block, then) for block, then in zip(blocks, before, strict=True))


@linux
def test_no_more_is_mapped_than_what_the_slots_hold(tmp_path: Path) -> None:
    config = SMALL.varied(hidden=256, intermediate=1024, head_dim=64)
    checkpoint = open_checkpoint(write_random_model(config, tmp_path / "large"))
    layout = weight_layout(config)
    two = slots(2)
    with shown(checkpoint, layout) as (pages, _):
        most = 0
        for number, page in enumerate(layout.pages):
            pages.bring(page, two[number % 2])
            most = max(most, mapped_bytes(checkpoint.path))
        at_once = 2 * max(page.nbytes for page in layout.pages)
        assert at_once * 0.9 <= most <= at_once + 2 * 2 * HUGE_PAGE < pages.bytes_mapped / 2
    assert mapped_bytes(checkpoint.path) == 0


@linux
def test_a_file_that_was_cut_short_is_told_before_it_is_mapped(checkpoint: Checkpoint) -> None:
    (file,) = checkpoint.path.glob("*.safetensors")
    layout = weight_layout(checkpoint.config, page_bytes=4096)
    with PageReader(checkpoint, layout, direct=False) as reader:
        os.truncate(file, file.stat().st_size // 2)
        with pytest.raises(
            MoeschedError, match=rf"{file} ends at byte \d+, .* cut short since it was opened"
        ):
            MappedPages(checkpoint, layout, reader)


@linux
def test_whoever_wants_to_write_to_a_mapped_file_waits_and_is_told_of(checkpoint: Checkpoint) -> None:
    first, second = slots(2)
    (file,) = checkpoint.path.glob("*.safetensors")
    with shown(checkpoint) as (pages, layout):
        pages.bring(layout.pages[0], first)
        with pytest.raises(BlockingIOError):
            os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
        with pytest.raises(MoeschedError, match=f"another process writes to {file}, which this run uses"):
            pages.bring(layout.pages[1], second)
        assert all(
            rows_of(block).sum().isfinite()
            for blocks in pages.views(layout.pages[0]).values()
            for block in blocks
        )
    os.truncate(file, 0)


@linux
def test_files_that_someone_writes_to_are_copied_and_not_mapped(checkpoint: Checkpoint) -> None:
    (file,) = checkpoint.path.glob("*.safetensors")
    with file.open("r+b"):
        copied = generate(checkpoint.path, "layer_streaming", direct=False)
    assert copied.bytes_read == generate(checkpoint.path, "layer_streaming", direct=True).bytes_read
    assert as_bits(copied) == as_bits(generate(checkpoint.path, "layer_streaming", direct=False))


def mapped_bytes(directory: Path) -> int:
    """Bytes of a folder's files that this process has mapped, by its page tables."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = str(directory) in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
