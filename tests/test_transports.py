"""Every transport keeps what transports promise."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed

from meshes import FIRST, ONE, at_once, closing, free_port, keys_of, mesh_of, ports, sockets_in, sums
from moesched.cluster.messages import Begin, Member
from moesched.cluster.node_transports import meet
from moesched.errors import BadInput, TransportError
from moesched.inputs.options import SizeOptions
from moesched.plugins import find
from moesched.seams import Exchange, Transport
from moesched.testing import check_transport
from moesched.transports.gathering import GatheringTransport
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


class MeasuredParts(dict[int, Any]):
    """The parts of an all-gather, by rank; keeps the bytes of all that were given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __setitem__(self, rank: int, part: Any) -> None:
        self.sizes.append(part.nbytes)
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


MAKERS: dict[str, Callable[[Path], Make]] = {
    "inproc": lambda folder: lambda ranks: [InprocTransport(ranks)] * ranks,
    "zeromq over ipc": zeromq_over_ipc,
    "zeromq over ipc, with keys": zeromq_with_keys,
    "zeromq over tcp, with keys": zeromq_over_tcp,
    "gloo": gloo,
    "nccl's path": nccl_on_a_group_of_gloo,
    "mx": mx_over_a_fake,
}


def refused(ranks: Sequence[Any], call: Callable[[Any, int], Any], said: str) -> None:
    """Call all ranks at once; each of them is refused."""
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call, one, rank) for rank, one in enumerate(ranks)]
    for each in calls:
        with pytest.raises(TransportError, match=said):
            each.result()
    for transport in dict.fromkeys(ranks):
        asyncio.run(transport.aclose())


@pytest.mark.parametrize("name", MAKERS)
def test_it_keeps_what_transports_promise(name: str, tmp_path: Path) -> None:
    check_transport(MAKERS[name](tmp_path))


@pytest.mark.parametrize("name", ["inproc", "zeromq over ipc", "mx"])
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda one, rank: one.all_reduce(rank, Exchange(1, "sum"), np.ones(2 + rank)),
            r"rank 0: .* of float64 \(2,\).*; rank 1: .* of float64 \(3,\)",
        ),
        (
            lambda one, rank: one.all_reduce(rank, Exchange(1, "sum", 4, rank), np.ones(2)),
            r"rank 0: .*step 4, layer 0\) sum; rank 1: .*step 4, layer 1\) sum",
        ),
        (
            lambda one, rank: one.gather(rank, Exchange(1), np.ones(2), rank),
            "rank 0: gather #1 with root 0.*; rank 1: gather #1 with root 1",
        ),
        (
            lambda one, rank: (one.broadcast if rank else one.gather)(rank, Exchange(1), np.ones(2), 0),
            "rank 0: gather #1.*; rank 1: broadcast #1",
        ),
    ],
    ids=["arrays", "layers", "roots", "operations"],
)
def test_all_ranks_are_told_on_what_they_disagree(name: str, call: Any, said: str, tmp_path: Path) -> None:
    refused(MAKERS[name](tmp_path)(2), call, said)


def test_a_thread_that_asks_for_a_root_that_is_not_there_is_refused() -> None:
    with pytest.raises(TransportError, match="gather #0: asked for root 2 of 2 ranks"):
        InprocTransport(2).gather(0, Exchange(0), np.ones(1), 2)


@pytest.mark.parametrize("name", ["inproc", "zeromq over ipc", "gloo", "mx"])
def test_all_ranks_are_told_that_a_root_has_nothing_to_send(name: str, tmp_path: Path) -> None:
    ranks = MAKERS[name](tmp_path)(2)
    refused(ranks, lambda one, rank: one.broadcast(rank, Exchange(0, "sent"), None, 0), "nothing to send")


class SlowToFree(GatheringTransport):
    """Frees its library while a second call closes it as well."""

    def __init__(self, closings: list[Future[None]]) -> None:
        super().__init__(0, 1)
        self.closings = closings
        self.freeing, self.second_began = threading.Event(), threading.Event()

    def all_gather(self, data: Any) -> list[Any]:
        return [data]

    def free(self) -> None:
        self.freeing.set()
        self.second_began.wait(PATIENCE_SECONDS)
        wait(self.closings, timeout=0.2, return_when=FIRST_COMPLETED)
        self.freed_first = not any(each.done() for each in self.closings)


def test_a_call_that_closes_a_transport_does_not_return_before_all_is_freed() -> None:
    closings: list[Future[None]] = []
    transport = SlowToFree(closings)
    with ThreadPoolExecutor(2) as threads:
        closings.append(threads.submit(asyncio.run, transport.aclose()))
        assert transport.freeing.wait(PATIENCE_SECONDS)
        closings.append(threads.submit(asyncio.run, transport.aclose()))
        transport.second_began.set()
    assert transport.freed_first


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
    meeting, parts = threading.Barrier(2), MeasuredParts()
    ranks = [transport(distributed=Gathering(rank, 2, meeting, parts), backend="jaccl") for rank in range(2)]
    given = np.arange(items, dtype=np.float32)
    with ThreadPoolExecutor(2) as threads:
        sums = [
            threads.submit(transport.all_reduce, rank, Exchange(0, "a sum"), given * (rank + 1))
            for rank, transport in enumerate(ranks)
        ]
        assert all(np.array_equal(each.result(PATIENCE_SECONDS), 3 * given) for each in sums)
    assert len(parts.sizes) == 2 * gathers
    assert gathers == 1 or parts.sizes[-1] == given.nbytes, "the second all-gather is of the elements alone"
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


def met(begin: Begin) -> list[Transport]:
    """The transports by which the nodes of a cluster carry out an order over gloo."""

    def make(rank: int) -> Transport:
        return meet("torch_distributed", begin, rank, secret="", listen="", lost_after=5.0)

    return made_together(make, len(begin.members))


def test_nodes_of_gloo_meet_again_at_the_same_port_without_the_one_that_is_lost() -> None:
    port = free_port()
    members = [Member(rank=rank, address="127.0.0.1", port=port, key="") for rank in range(3)]
    begin = partial(Begin, sizes=SizeOptions())
    before = met(begin(epoch=0, order=0, members=members))
    with closing(before):
        assert all(total == 3 for total in sums(before))
    for order in (0, 1):
        with closing(met(begin(epoch=1, order=order, members=members[:2]))) as after:
            assert all(total == 2 for total in sums(after))


def test_ranks_of_gloo_meet_only_those_of_the_same_meeting() -> None:
    store = dist.HashStore()

    def make(place: int) -> Transport:
        return TorchDistributedTransport(place % 2, 2, store=store, meeting=f"order {place // 2}")

    pairs = made_together(make, 4)
    with closing(pairs):
        calls = [
            partial(each.all_reduce, place % 2, FIRST, (place + 1) * ONE) for place, each in enumerate(pairs)
        ]
        assert [total.item() for total in at_once(*calls)] == [3, 3, 7, 7]


def test_a_backend_that_torch_was_built_without_is_refused() -> None:
    if dist.is_nccl_available():
        pytest.skip("this build of torch has nccl")
    with pytest.raises(BadInput, match="this build of torch has no nccl"):
        TorchDistributedTransport(0, 1, backend="nccl", store=dist.HashStore())
