"""The staging ring: whatever a GPU does meanwhile, it gets the bytes that were there when the copy was begun."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesched.devices.lagging.device import GPU_DEVICE, LaggingGpu
from moesched.devices.native.copy_team import CopyTeam, Pair
from moesched.devices.torch.staging_ring import StagingRing
from moesched.models.host_buffers import RING_SLOTS

SLOT = 4096


@pytest.fixture(params=[True, False], ids=["compiled", "without a compiler"])
def team(request: pytest.FixtureRequest) -> Iterator[CopyTeam]:
    team = CopyTeam(3, native=request.param)
    yield team
    team.close()


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(Random(seed).randbytes(nbytes)), dtype=torch.uint8)


@pytest.mark.parametrize("sizes", [[], [1], [1 << 20, 3, 5 << 20], [7_000_001, 1, 64]], ids=str)
def test_a_team_copies_every_byte(team: CopyTeam, sizes: list[int]) -> None:
    sources = [random_bytes(nbytes, nbytes) for nbytes in sizes]
    room = torch.zeros(sum(sizes) + 64 * len(sizes), dtype=torch.uint8)
    targets, at = [], 0
    for nbytes in sizes:
        targets.append(room[at : at + nbytes])
        at += nbytes + 64
    team.copy(list(zip(targets, sources, strict=True)))
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert int(room.sum()) == sum(int(source.sum()) for source in sources), "nothing beside them is written"


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 3 * SLOT), min_size=1, max_size=12),
    gaps=st.lists(st.integers(0, 200), min_size=12, max_size=12),
)
def test_a_target_gets_the_bytes_of_all_pieces(seed: int, sizes: list[int], gaps: list[int]) -> None:
    with LaggingGpu(seed=seed) as gpu:
        team = CopyTeam(1)
        ring = StagingRing(SLOT, team, GPU_DEVICE)
        pieces, at = [], 0
        for number, (nbytes, gap) in enumerate(zip(sizes, gaps, strict=False)):
            pieces.append((random_bytes(nbytes, seed + number), at + gap))
            at += gap + nbytes
        wanted = [(piece.clone(), offset) for piece, offset in pieces]
        target = torch.empty(at, dtype=torch.uint8, device=GPU_DEVICE)
        ring.copy(pieces, target)
        for piece, _ in pieces:
            piece.zero_()
        found = target.cpu()
        team.close()
        assert all(torch.equal(found[offset : offset + len(piece)], piece) for piece, offset in wanted)
        assert gpu.operations.blocked == 0
        assert gpu.pinned.faults == []


def test_a_slot_is_filled_again_only_after_the_copy_from_it_on_its_own_stream() -> None:
    for seed in range(8):
        with LaggingGpu(seed=seed) as gpu:
            team = CopyTeam(1)
            ring = StagingRing(SLOT, team, GPU_DEVICE)
            streams = [gpu.streams.new_stream() for _ in range(2)]
            sources = [random_bytes(SLOT, number) for number in range(3 * RING_SLOTS)]
            targets = [torch.zeros(SLOT, dtype=torch.uint8, device=GPU_DEVICE) for _ in sources]
            gpu.streams.current.synchronize()
            for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
                with gpu.streams.on(streams[number % 2]):
                    ring.copy([(source, 0)], target)
            gpu.streams.synchronize(0)
            assert all(torch.equal(each.cpu(), source) for each, source in zip(targets, sources, strict=True))
            team.close()


def test_a_slot_that_was_not_used_yet_is_filled_without_a_wait_for_the_gpu() -> None:
    with LaggingGpu(seed=1) as gpu, gpu.streams.on(stream := gpu.streams.new_stream()):
        stream.eagerness = 0.0
        team = CopyTeam(1)
        ring = StagingRing(SLOT, team, GPU_DEVICE)
        target = torch.empty(RING_SLOTS * SLOT, dtype=torch.uint8, device=GPU_DEVICE)
        before = gpu.streams.ran
        ring.copy([(random_bytes(RING_SLOTS * SLOT, 0), 0)], target)
        assert gpu.streams.ran == before
        ring.copy([(random_bytes(SLOT, 0), 0)], target)
        assert gpu.streams.ran > before
        team.close()


def test_the_ring_is_allocated_once_whatever_goes_through_it() -> None:
    with LaggingGpu() as gpu:
        team = CopyTeam(1)
        ring = StagingRing(SLOT, team, GPU_DEVICE)
        before = gpu.pinned.allocations
        target = torch.empty(20 * SLOT, dtype=torch.uint8, device=GPU_DEVICE)
        for _ in range(3):
            ring.copy([(random_bytes(20 * SLOT, 0), 0)], target)
        gpu.streams.synchronize(0)
        assert gpu.pinned.allocations == before
        assert [*gpu.pinned.registered.values()] == [RING_SLOTS * SLOT]
        team.close()


class Meeting:
    """A team whose members wait for a second copy at the same time."""

    def __init__(self) -> None:
        self.met = False
        self._both = threading.Barrier(2, timeout=0.1)

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Wait for another copy to begin."""
        with suppress(threading.BrokenBarrierError):
            self._both.wait()
            self.met = True


def test_two_threads_do_not_fill_a_slot_at_the_same_time() -> None:
    with LaggingGpu() as gpu:
        ring = StagingRing(SLOT, meeting := Meeting(), GPU_DEVICE)
        target = torch.empty(SLOT, dtype=torch.uint8, device=GPU_DEVICE)

        def copy() -> None:
            with gpu:
                ring.copy([(random_bytes(SLOT, 0), 0)], target)

        threads = [threading.Thread(target=copy) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not meeting.met
