"""Every transport keeps what transports promise; wrappers add what they say, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed

from meshes import ONE, closing, keys_of, mesh_of, ports, sockets_in, sums
from moesched.errors import BadInput, RankLost, TransportError
from moesched.plugins import find
from moesched.seams import Exchange, Transport
from moesched.testing import check_transport
from moesched.testing.faulty_transport import Faults, FaultyTransport
from moesched.testing.recording_transport import RecordingTransport
from moesched.testing.slow_transports import DelayingTransport, ThrottlingTransport
from moesched.testing.wrapping_transport import WrappingTransport
from moesched.transports.inproc import InprocTransport
from moesched.transports.torch_distributed import TorchDistributedTransport
from patience import PATIENCE_SECONDS

dist: Any = torch.distributed
Make = Callable[[int], Sequence[Transport]]

# -- what all promise ------------------------------------------------------------------------------


def made_together(make: Callable[[int], Transport], ranks: int) -> list[Transport]:
    """Transports whose making waits for the others."""
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(make, range(ranks)))


def zeromq_over_ipc(folder: Path) -> Make:
    return lambda ranks: mesh_of(sockets_in(folder, ranks))


def zeromq_with_keys(folder: Path) -> Make:
    return lambda ranks: mesh_of(sockets_in(folder, ranks), keys=keys_of(ranks))


def zeromq_over_tcp(folder: Path) -> Make:
    return lambda ranks: mesh_of(ports(ranks), keys=keys_of(ranks))


def gloo(folder: Path) -> Make:
    def make(ranks: int) -> list[Transport]:
        store = dist.HashStore()
        return made_together(lambda rank: TorchDistributedTransport(rank, ranks, store=store), ranks)

    return make


def nccl_on_a_group_of_gloo(folder: Path) -> Make:
    """All of the path of nccl but the library: the group is handed in, the device is the CPU."""

    def make(ranks: int) -> list[Transport]:
        store = dist.HashStore()
        groups = made_together(lambda rank: TorchDistributedTransport(rank, ranks, store=store)._group, ranks)
        return [
            TorchDistributedTransport(rank, ranks, backend="nccl", group=group, device="cpu")
            for rank, group in enumerate(groups)
        ]

    return make


class Gathering:
    """The promises of mx.distributed, between threads: a group, and an all-gather that waits for all ranks."""

    def __init__(self, rank: int, ranks: int, meeting: threading.Barrier, parts: dict[int, Any]) -> None:
        self._group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
        self._meeting = meeting
        self._parts = parts

    def init(self, *, strict: bool, backend: str) -> Any:
        return self._group

    def all_gather(self, part: Any, *, group: Any, stream: Any) -> Any:
        self._parts[group.rank()] = np.array(part)
        self._meeting.wait(PATIENCE_SECONDS)
        gathered = np.concatenate([self._parts[rank] for rank in range(group.size())])
        self._meeting.wait(PATIENCE_SECONDS)
        return gathered


class CountedParts(dict[int, Any]):
    """The parts of an all-gather, by rank; counts how often one was given."""

    count = 0

    def __setitem__(self, rank: int, part: Any) -> None:
        self.count += 1
        super().__setitem__(rank, part)


def mx_over_a_fake(folder: Path) -> Make:
    transport = pytest.importorskip("moesched.transports.mx_distributed").MxDistributedTransport

    def make(ranks: int) -> list[Transport]:
        meeting, parts = threading.Barrier(ranks), dict[int, Any]()
        return [
            transport(distributed=Gathering(rank, ranks, meeting, parts), backend="jaccl")
            for rank in range(ranks)
        ]

    return make


def wrapped(wrap: Callable[[Transport], Transport]) -> Callable[[Path], Make]:
    def makes(folder: Path) -> Make:
        def make(ranks: int) -> list[Transport]:
            inner = InprocTransport(ranks)
            return [wrap(inner) for _ in range(ranks)]

        return make

    return makes


MAKERS: dict[str, Callable[[Path], Make]] = {
    "zeromq over ipc": zeromq_over_ipc,
    "zeromq over ipc, with keys": zeromq_with_keys,
    "zeromq over tcp, with keys": zeromq_over_tcp,
    "gloo": gloo,
    "nccl's path": nccl_on_a_group_of_gloo,
    "mx": mx_over_a_fake,
    "wrapping": wrapped(WrappingTransport),
    "recording": wrapped(RecordingTransport),
    "delaying": wrapped(lambda inner: DelayingTransport(inner, 0.001)),
    "throttling": wrapped(lambda inner: ThrottlingTransport(inner, 0.001, 1e9)),
    "no faults": wrapped(lambda inner: FaultyTransport(inner, Faults(delay=0.5, delay_seconds=0.002))),
}


@pytest.mark.parametrize("name", MAKERS)
def test_it_keeps_what_transports_promise(name: str, tmp_path: Path) -> None:
    check_transport(MAKERS[name](tmp_path))


@pytest.mark.parametrize("name", ["inproc", "zeromq", "torch_distributed", "mx_distributed"])
def test_transports_are_found_by_name(name: str) -> None:
    if name == "mx_distributed":
        pytest.importorskip("mlx.core")
    assert callable(find("transports", name).all_reduce)


# -- mx.distributed --------------------------------------------------------------------------------

RING = """
import asyncio, sys
import numpy as np
from moesched.seams import Exchange
from moesched.transports.mx_distributed import MxDistributedTransport

transport = MxDistributedTransport(backend="ring")
part = np.array([[1e8, 1.0, transport.rank]], np.float32)
total = transport.all_reduce(transport.rank, Exchange(0, "a sum"), part)
parts = transport.gather(transport.rank, Exchange(1, "parts"), part[:, : 1 + transport.rank], 0)
print(total.tolist(), None if parts is None else [part.shape for part in parts])
asyncio.run(transport.aclose())
"""


@pytest.mark.slow
def test_two_processes_meet_over_mlx_s_ring(tmp_path: Path) -> None:
    core = pytest.importorskip("mlx.core")
    if not core.distributed.is_available("ring"):
        pytest.skip("this build of MLX has no ring")
    hosts = [[address.removeprefix("tcp://")] for address in ports(2)]
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RING],
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(tmp_path / "hosts.json")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=PATIENCE_SECONDS)[0].strip() for rank in ranks]
    assert said == ["[[200000000.0, 2.0, 1.0]] [(1, 1), (1, 2)]", "[[200000000.0, 2.0, 1.0]] None"]


@pytest.mark.parametrize(("items", "gathers"), [(6144, 1), (8192, 1), (8193, 2)])
def test_a_token_s_sum_takes_one_gather_and_a_larger_one_two(items: int, gathers: int) -> None:
    transport = pytest.importorskip("moesched.transports.mx_distributed").MxDistributedTransport
    meeting, parts = threading.Barrier(2), CountedParts()
    ranks = [transport(distributed=Gathering(rank, 2, meeting, parts), backend="jaccl") for rank in range(2)]
    given = np.arange(items, dtype=np.float32)
    with ThreadPoolExecutor(2) as threads:
        sums = [
            threads.submit(transport.all_reduce, rank, Exchange(0, "a sum"), given * (rank + 1))
            for rank, transport in enumerate(ranks)
        ]
        assert all(np.array_equal(each.result(PATIENCE_SECONDS), 3 * given) for each in sums)
    assert parts.count == 2 * gathers
    for each in ranks:
        asyncio.run(each.aclose())


def test_mx_without_its_launcher_says_how_to_start_it() -> None:
    module = pytest.importorskip("moesched.transports.mx_distributed")

    class Nobody:
        def init(self, **_: Any) -> None:
            raise RuntimeError("no hostfile")

    with pytest.raises(
        BadInput, match=r"cannot start with ring: no hostfile; start the ranks with mlx\.launch"
    ):
        module.MxDistributedTransport(backend="ring", distributed=Nobody())


# -- torch.distributed -----------------------------------------------------------------------------


def test_ranks_of_gloo_that_do_not_come_are_waited_for_no_longer_than_said() -> None:
    store = dist.HashStore()
    groups = made_together(lambda rank: TorchDistributedTransport(rank, 2, store=store)._group, 2)
    ranks = [TorchDistributedTransport(rank, 2, group=groups[rank], timeout_seconds=0.2) for rank in range(2)]
    with closing(ranks), pytest.raises(TransportError, match=r"all-reduce #0: .*0\.2 s"):
        ranks[0].all_reduce(0, Exchange(0), ONE)


def test_a_backend_that_torch_was_built_without_is_refused() -> None:
    if dist.is_nccl_available():
        pytest.skip("this build of torch has nccl")
    with pytest.raises(BadInput, match="this build of torch has no nccl"):
        TorchDistributedTransport(0, 1, backend="nccl", store=dist.HashStore())


# -- wrappers --------------------------------------------------------------------------------------


def test_a_recorder_knows_calls_bytes_and_seconds() -> None:
    inner = InprocTransport(2)
    recorders = [RecordingTransport(inner) for _ in range(2)]
    sums(recorders, Exchange(0), np.ones(6, np.float32))
    asyncio.run(inner.aclose())
    with pytest.raises(TransportError):
        recorders[0].gather(0, Exchange(1), ONE, 0)
    assert (recorders[0].calls, recorders[0].nbytes) == (2, 24 + 4)
    assert [record.failed for record in recorders[0].records] == [False, True]
    assert recorders[0].seconds == sum(record.seconds for record in recorders[0].records) > 0


def test_a_throttled_exchange_takes_as_long_as_the_network_would() -> None:
    recorder = RecordingTransport(ThrottlingTransport(InprocTransport(), 0.01, bandwidth=1e6))
    recorder.all_reduce(0, Exchange(0), np.ones(5000, np.float32))
    assert recorder.seconds >= 0.01 + 20e3 / 1e6


def test_a_delayed_call_is_woken_when_its_transport_is_closed() -> None:
    slow = DelayingTransport(InprocTransport(), 60.0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(slow.all_reduce, 0, Exchange(0), ONE)
        asyncio.run(slow.aclose())
        with pytest.raises(TransportError, match="the transport was closed"):
            waiting.result(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda inner: DelayingTransport(inner, -1.0), "delay in seconds of -1"),
        (lambda inner: ThrottlingTransport(inner, 0.0, 0.0), "bandwidth of 0 bytes per second"),
        (lambda inner: ThrottlingTransport(inner, float("nan"), 1.0), "latency in seconds of nan"),
        (lambda inner: FaultyTransport(inner, Faults(drop=2.0)), "drop 2.0 is not a share"),
    ],
)
def test_wrappers_refuse_figures_that_cannot_be(make: Callable[[Transport], Transport], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        make(InprocTransport())


def faulty(faults: Faults, timeout_seconds: float = PATIENCE_SECONDS) -> list[Transport]:
    """Two ranks, the second of which has faults."""
    inner = InprocTransport(2, timeout_seconds=timeout_seconds)
    return [inner, FaultyTransport(inner, faults)]


def test_a_dropped_part_is_an_error_on_both_ranks() -> None:
    first, second = sums(faulty(Faults(drop=1.0)))
    assert str(first) == "all-reduce #0: rank 1 gave up: its part was dropped"
    assert "the part of rank 1 was dropped" in str(second)


def test_a_corrupted_part_differs_in_a_bit_and_the_caller_s_own_does_not() -> None:
    part = np.zeros(64, np.uint8)
    first, second = sums(faulty(Faults(corrupt=1.0)), Exchange(0), part)
    assert first.tolist() == second.tolist()
    assert bin(int(first.sum())).count("1") == 1
    assert not part.any()


def test_exchanges_that_are_swapped_do_not_meet() -> None:
    ranks = faulty(Faults(swap_at=0), timeout_seconds=0.1)
    for found in sums(ranks, Exchange(0)):
        assert isinstance(found, TransportError)


def test_a_rank_is_lost_from_an_exchange_on() -> None:
    inner = [InprocTransport(), InprocTransport()]
    rank = FaultyTransport(inner[1], Faults(lose_at=2))
    for ticket in range(2):
        rank.all_reduce(0, Exchange(ticket), ONE)
    with pytest.raises(RankLost) as lost:
        rank.all_reduce(0, Exchange(2), ONE)
    assert lost.value.ranks == (0,)
    with pytest.raises(TransportError, match="closed"):
        inner[1].all_reduce(0, Exchange(3), ONE)


def test_the_same_seed_gives_the_same_faults() -> None:
    def dropped(seed: int) -> list[int]:
        rank = FaultyTransport(InprocTransport(), Faults(drop=0.5), seed)
        tickets = []
        for ticket in range(64):
            try:
                rank.all_reduce(0, Exchange(ticket), ONE)
            except TransportError:
                tickets.append(ticket)
        return tickets

    assert dropped(1) == dropped(1) != dropped(2)
    assert 10 < len(dropped(1)) < 54
