"""Memory that a run takes for its weights while torch is imported: as much as they need, used by them, given back."""

from __future__ import annotations

import gc
import math
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesched import run_model
from moesched.devices.shared.page_reader import PageReader
from moesched.devices.torch.compute import Compute
from moesched.devices.torch.resident_pages import ResidentPages
from moesched.inputs.prompts import Prompt
from moesched.jobs.memory_ahead import LEAST, pieces_to_take
from moesched.jobs.options import SessionOptions
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import room_for, weight_layout
from moesched.models.shapes import SHAPES
from moesched.models.tensors import global_shapes
from moesched.runs.listeners import Listener
from moesched.system.memory import resident_bytes
from moesched.system.memory_ahead import MemoryAhead
from small_models import small_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is taken ahead")

SIZE = 8 << 20
MIXTRAL = SHAPES["mixtral-0.8b"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each expert is a page of 6 MB in float32; the other pages are smaller than a huge page."""
    folder = tmp_path_factory.mktemp("models") / "small"
    return small_model(folder, layers=2, experts=2, hidden=512, intermediate=1024)


@pytest.fixture
def ahead() -> Iterator[MemoryAhead]:
    with MemoryAhead() as memory:
        yield memory


def taken(ahead: MemoryAhead, *sizes: int) -> MemoryAhead:
    """The same, when the thread has taken all pieces."""
    ahead.begin(sizes)
    while ahead.nbytes < sum(sizes):
        pass
    return ahead


class Watching(Listener):
    """Notes how many pieces the run in this process used, and how many bytes of others are left after it."""

    used = left = 0

    def ran(self) -> None:
        for each in gc.get_objects():
            if type(each) is MemoryAhead:
                self.used += each.used
                self.left += each.nbytes


def test_a_piece_is_cut_to_the_bytes_that_are_needed(ahead: MemoryAhead) -> None:
    piece = taken(ahead, SIZE).use(SIZE - 10_000)
    assert piece is not None
    assert len(piece) == SIZE - 8192
    assert not piece.read().strip(b"\0")
    assert ahead.nbytes == 0
    assert ahead.used == 1


@pytest.mark.parametrize("nbytes", [SIZE + 1, SIZE // 2], ids=["larger", "much smaller"])
def test_a_piece_is_not_used_for_what_does_not_fit_it(ahead: MemoryAhead, nbytes: int) -> None:
    assert taken(ahead, SIZE).use(nbytes) is None
    assert ahead.nbytes == SIZE


def test_the_smallest_of_the_pieces_that_fit_is_used(ahead: MemoryAhead) -> None:
    taken(ahead, SIZE, SIZE - 4096, SIZE + 4096)
    assert ahead.use(SIZE - 8192) is not None
    assert ahead.nbytes == 2 * SIZE + 4096


def test_nothing_is_taken_once_it_was_stopped(ahead: MemoryAhead) -> None:
    ahead.stop()
    ahead.begin([SIZE])
    ahead.stop()
    assert ahead.nbytes == 0


def test_the_system_refuses_more_than_there_is_and_what_was_taken_before_is_used(ahead: MemoryAhead) -> None:
    ahead.begin([SIZE, 1 << 60, SIZE])
    while ahead.nbytes < SIZE:
        pass
    ahead.stop()
    assert ahead.nbytes == SIZE


def test_memory_is_given_back_if_the_run_fails() -> None:
    before = resident_bytes()
    with pytest.raises(ZeroDivisionError), MemoryAhead() as ahead:
        taken(ahead, 8 * SIZE)
        assert resident_bytes() > before + 7 * SIZE
        raise ZeroDivisionError
    assert resident_bytes() < before + SIZE


def pieces(prompts: int = 1, **options: Any) -> list[int]:
    return pieces_to_take(SessionOptions("nowhere", **options), MIXTRAL, [16] * prompts, 4, 1)


def test_pages_that_stay_and_the_tensors_outside_of_pages_are_taken() -> None:
    layout = weight_layout(MIXTRAL, "bfloat16")
    tensors = [2 * math.prod(shape) for shape in global_shapes(MIXTRAL).values()]
    sizes = [*tensors, *map(room_for, layout.pages)]
    assert pieces(dtype="bfloat16") == [nbytes for nbytes in sizes if nbytes >= LEAST]


def test_a_policy_that_streams_gets_no_more_than_stays() -> None:
    streamed = pieces(policy="layer_streaming", budgets={"host": 900_000_000}, dtype="bfloat16")
    assert 0 < sum(streamed) < 900_000_000


@pytest.mark.parametrize(
    "options",
    [
        {"device": "emulated", "machine": "t4"},
        {"device_settings": {"accelerator": "cuda"}},
        {"budgets": {"process": "4GB"}},
        {"budgets": {"host": "1GB"}},
        {"machine": "t4"},
        {"policy": "no_such_policy"},
        {"prompts": 128, "batch_size": 128, "micro_batch_size": 128},
    ],
    ids=str,
)
def test_nothing_is_taken_that_the_run_would_not_use(options: dict[str, Any]) -> None:
    assert pieces(dtype="bfloat16", **options) == []


def test_a_run_uses_what_it_took_in_time_and_keeps_no_more(model: Path) -> None:
    watching = Watching()
    prompts: list[Prompt] = [[1, 2, 3]]
    report = run_model(model, prompts, policy="resident", max_new_tokens=4, listener=watching)
    layout = weight_layout(open_checkpoint(model).config, report.dtype)
    large = [page for page in layout.pages if page.nbytes >= LEAST]
    assert watching.used <= len(large)
    assert watching.left == 0


def test_what_no_page_used_is_given_back_after_the_last_one(model: Path, ahead: MemoryAhead) -> None:
    checkpoint = open_checkpoint(model)
    layout = weight_layout(checkpoint.config, "float32")
    with PageReader(checkpoint, layout) as reader:
        reader.ahead = taken(ahead, 8 * SIZE)
        pages = ResidentPages(reader, Compute("cpu", layout, "torch", pin=False, threads=1))
        pages.expect(pages.retain(layout.pages))
        for page in layout.pages[:-1]:
            pages.load(page)
        assert ahead.nbytes == 8 * SIZE
        pages.load(layout.pages[-1])
    assert ahead.nbytes == 0


def test_an_address_space_with_a_limit_is_left_to_libraries() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, before[1]))
    try:
        assert pieces(dtype="bfloat16") == []
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_tokens_are_those_of_a_run_that_takes_nothing(model: Path) -> None:
    prompts: list[Prompt] = [[1, 2, 3], [4, 5]]
    with_memory = run_model(model, prompts, policy="resident", max_new_tokens=4)
    limited = {"process": "4GB"}
    without = run_model(model, prompts, policy="resident", max_new_tokens=4, budgets=limited)
    assert with_memory.tokens == without.tokens
