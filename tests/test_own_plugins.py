"""A device and a transport from outside the tree pass the conformance suites; broken ones do not."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import add
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from benchmarks.shared.small_runs import ONE_MEMORY
from meshes import keys_of, sockets_in
from moesched import plugins
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput, TransportError
from moesched.seams import Exchange
from moesched.testing import check_device, check_transport
from patience import wait_until

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def in_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names like own_device:NumpyDevice are looked up in the current folder."""
    monkeypatch.chdir(EXAMPLES)


def own_device() -> Any:
    return plugins.find("devices", "own_device:NumpyDevice")


def own_transport() -> Any:
    return plugins.find("transports", "own_transport:ThreadTransport")


def found_out(device: Any, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        check_device(device, ONE_MEMORY, ["resident"])


def transport_found_out(kind: Any, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        check_transport(lambda ranks: [kind(ranks)] * ranks)


def test_a_device_of_ones_own_gives_the_tokens_of_the_torch_device() -> None:
    check_device(own_device(), ONE_MEMORY)


def test_a_device_whose_tokens_depend_on_the_batch_before_is_found_out() -> None:
    class Forgetless(own_device()):  # type: ignore[misc]  # found by name
        def begin(self, plan: Any, prompts: Any, sampling: Any) -> None:
            cache = dict(self._cache)
            super().begin(plan, prompts, sampling)
            self._cache.update(cache)

    found_out(Forgetless, "depend on the batch before")


def test_a_device_that_loses_a_row_is_found_out() -> None:
    class Careless(own_device()):  # type: ignore[misc]  # found by name
        def execute(self, task: Any) -> Any:
            value = super().execute(task)
            return dict(list(value.items())[1:]) if task.verb == "post_attention" else value

    found_out(Careless, r"gives \d+ rows to \d+ tokens")


@pytest.mark.parametrize(
    ("verb", "value", "match"),
    [
        (
            "route",
            {99: 6},
            "device Mistaken: execute gives {99: 6} for route L0 mb0: give .* by ints from 0 to 3",
        ),
        ("sample", [1], "gives 1 values to 2 sequences for sample mb0"),
    ],
)
def test_a_device_whose_values_are_wrong_is_found_out(verb: str, value: Any, match: str) -> None:
    class Mistaken(own_device()):  # type: ignore[misc]  # found by name
        def execute(self, task: Any) -> Any:
            own = super().execute(task)
            return value if task.verb == verb else own

    with pytest.raises(AssertionError, match=match):
        check_device(Mistaken, ONE_MEMORY, ["expert_streaming"])


@pytest.mark.parametrize("temperature", [0, 2])
def test_a_device_that_makes_tokens_up_is_found_out(temperature: int) -> None:
    class Inventive(own_device()):  # type: ignore[misc]  # found by name
        def begin(self, plan: Any, prompts: Any, sampling: Any) -> None:
            self.invents = sampling.temperature == temperature
            super().begin(plan, prompts, sampling)

        def execute(self, task: Any) -> Any:
            value = super().execute(task)
            return [3] * len(value) if task.verb == "sample" and self.invents else value

    found_out(Inventive, r"and those of (the device )?torch")


def test_a_device_that_confuses_requests_as_they_join_is_found_out() -> None:
    class Confused(TorchDevice):
        served = False

        def serve(self, plan: Any) -> None:
            self.served = True
            super().serve(plan)

        def execute(self, task: Any) -> Any:
            value = super().execute(task)
            return [(token + 1) % 60 for token in value] if task.verb == "sample" and self.served else value

    found_out(Confused, "of requests that join and leave")


def test_a_device_that_takes_a_negative_token_is_found_out() -> None:
    class Wrapping(own_device()):  # type: ignore[misc]  # found by name
        def begin(self, plan: Any, prompts: Any, sampling: Any) -> None:
            super().begin(plan, [[abs(token) for token in prompt] for prompt in prompts], sampling)

    found_out(Wrapping, "takes the token id -1")


def test_a_transport_of_ones_own_passes() -> None:
    kind = own_transport()
    check_transport(lambda ranks: [kind(ranks)] * ranks)


@pytest.mark.slow
def test_an_envoy_keeps_what_transports_promise_and_says_why_it_cannot_start(tmp_path: Path) -> None:
    kind: Any = plugins.find("transports", "envoy_transport.py:EnvoyTransport")

    def make(ranks: int) -> list[Any]:
        addresses, keys = sockets_in(tmp_path, ranks), keys_of(ranks)
        with ThreadPoolExecutor(ranks) as threads:
            return list(threads.map(lambda rank: kind(addresses, rank, keys=keys[rank]), range(ranks)))

    check_transport(make)
    with pytest.raises(BadInput, match="rank 3 of 2 addresses"):
        kind(sockets_in(tmp_path, 2), 3)


def test_an_envoy_that_dies_is_missed(tmp_path: Path) -> None:
    kind: Any = plugins.find("transports", "envoy_transport.py:EnvoyTransport")
    transport = kind(sockets_in(tmp_path, 2), 0)
    transport.process.kill()
    with pytest.raises(TransportError, match="the envoy of rank 0 ended with code -9"):
        transport.all_reduce(0, Exchange(0), np.ones(1, np.float32))
    asyncio.run(transport.aclose())


def test_a_transport_that_hands_out_one_array_to_all_is_found_out() -> None:
    class Shared(own_transport()):  # type: ignore[misc]  # found by name
        def __init__(self, ranks: int) -> None:
            super().__init__(ranks)
            self._totals: dict[int, Any] = {}

        def all_reduce(self, rank: int, exchange: Exchange, part: Any) -> Any:
            return self._totals.setdefault(
                exchange.ticket, super().all_reduce(rank, exchange, np.array(part))
            )

    transport_found_out(Shared, "not the sum in the order of ranks")


def test_a_transport_that_adds_parts_once_their_owners_have_left_is_found_out() -> None:
    class Late(own_transport()):  # type: ignore[misc]  # found by name
        def __init__(self, ranks: int) -> None:
            super().__init__(ranks)
            self.parts: dict[int, Any] = {}

        def all_reduce(self, rank: int, exchange: Exchange, part: Any) -> Any:
            self.parts[rank] = part
            total = super().all_reduce(rank, exchange, part)
            if rank:
                wait_until(lambda: (self.parts[0] == -1).all(), "what rank 0 does after its call")
            return total if not rank else reduce(add, [self.parts[each] for each in range(self._ranks)])

    transport_found_out(Late, "not the sum")


def test_a_transport_that_hands_out_the_roots_own_array_is_found_out() -> None:
    class Lends(own_transport()):  # type: ignore[misc]  # found by name
        def broadcast(self, rank: int, exchange: Exchange, array: Any, root: int) -> Any:
            found = super().broadcast(rank, exchange, array, root)
            return array if rank == root else found

    transport_found_out(Lends, "a result is the root's own array")


def test_a_transport_that_changes_the_type_of_parts_is_found_out() -> None:
    class Widens(own_transport()):  # type: ignore[misc]  # found by name
        def gather(self, rank: int, exchange: Exchange, part: Any, root: int) -> Any:
            return super().gather(rank, exchange, np.float64(part), root)

    transport_found_out(Widens, "not all the parts")


def test_a_transport_that_compares_no_signatures_of_broadcasts_is_found_out() -> None:
    class Trusts(own_transport()):  # type: ignore[misc]  # found by name
        def broadcast(self, rank: int, exchange: Exchange, array: Any, root: int) -> Any:
            return super().broadcast(rank, exchange._replace(signature=""), array, root)

    transport_found_out(Trusts, "ranks that disagree go on")


def test_a_transport_whose_call_never_ends_is_found_out() -> None:
    never = Event()

    class Waits(own_transport()):  # type: ignore[misc]  # found by name
        def broadcast(self, rank: int, exchange: Any, array: Any, root: int) -> Any:
            never.wait()

    with pytest.raises(AssertionError, match="a call has not ended"):
        check_transport(lambda ranks: [Waits(ranks)] * ranks, patience_seconds=0.2)
    never.set()


def test_a_transport_that_gives_nothing_is_found_out() -> None:
    class Empty(own_transport()):  # type: ignore[misc]  # found by name
        def all_reduce(self, rank: int, exchange: Any, part: Any) -> Any:
            super().all_reduce(rank, exchange, part)

    transport_found_out(Empty, "all_reduce gives None, not an array")
