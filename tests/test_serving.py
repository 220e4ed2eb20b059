"""Serving: requests join and leave between steps, and get the tokens that each has alone, under every policy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from damaged_weights import damage
from moesched import plugins
from moesched.devices.lagging.device import LaggingDevice, LaggingGpu
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput, MoeschedError, OutOfMemory
from moesched.machines import Machine, load_machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.replayed import GRAPH_BYTES
from moesched.plugins import make_policy
from moesched.requests.batch import Batch
from moesched.requests.logprobs import ScoredToken, WantedLogprobs
from moesched.runs.hardware import run
from moesched.runs.planning import as_used_by, plan_run
from moesched.runs.served_parts import ServingSetup
from moesched.runs.served_runs import serve_on
from moesched.runs.serving import Served, Serving, ServingListener
from moesched.seams import Device
from moesched.serving.arrivals import ListedArrivals
from moesched.serving.capacity import Capacity
from moesched.serving.live import LiveArrivals
from moesched.serving.request import Request
from moesched.steps.plan import Plan
from moesched.tasks import Task
from moesched.testing.served_checks import random_departures
from served_requests import (
    CAPACITY,
    LAYOUT,
    T4,
    asked,
    assert_as_alone,
    mlx_device,
    planned,
    request,
    stop_of,
    tokens_alone,
    torch_device,
)
from small_models import small_model

M2_ULTRA = load_machine("m2-ultra")
ALONE = [
    name for name in plugins.names("policies") if not name.startswith("ep_") and name != "flexgen_pipeline"
]
"""Policies of one machine."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(small_model(tmp_path_factory.mktemp("models") / "small"))


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> dict[int, list[int]]:
    """The tokens of each request that runs alone."""
    return tokens_alone(checkpoint, asked(10))


def logits_alone(checkpoint: Checkpoint, ids: Sequence[int]) -> torch.Tensor:
    """The logits (T, V) after each of a sequence's tokens but the last one, from the prompt on."""
    rows = []
    for end in range(1, len(ids)):
        policy, device = make_policy("resident"), TorchDevice(checkpoint, LAYOUT, keep_logits=True)
        plan = plan_run(T4, LAYOUT, Batch((end,), 1, ((0,),)), policy)
        run(plan, policy, device, [list(ids[:end])])
        rows.append(device.logits[0][1][0])
    return torch.stack(rows)


@pytest.mark.parametrize("make", [torch_device, mlx_device])
def test_log_probabilities_of_prompt_and_tokens_are_those_of_the_logits(
    checkpoint: Checkpoint, make: Callable[[Checkpoint], Device]
) -> None:
    ids = [5, 200, 31, 7]
    asking = Request(number=0, prompt=4, new_tokens=3, ids=ids, logprobs=WantedLogprobs(3, prompt=True))
    beside = Request(number=1, prompt=2, new_tokens=4, ids=[9, 10])
    policy, device = make_policy("resident"), make(checkpoint)
    plan = planned(policy, device=device, machine=M2_ULTRA)
    serving = serve_on(device, ServingSetup(plan, policy, CAPACITY, ListedArrivals([asking, beside])))
    asyncio.run(device.aclose())
    tokens = serving.requests[0].tokens
    assert not any(isinstance(token, ScoredToken) for token in serving.requests[1].tokens)
    scored = [token for token in tokens if isinstance(token, ScoredToken)]
    assert len(scored) == 3
    whole = [*ids, *tokens]
    expected = logits_alone(checkpoint, whole).log_softmax(dim=1)
    found = [*serving.requests[0].prompt, *(token.logprob for token in scored)]
    assert found[0] is None
    for place, (token, each) in enumerate(zip(whole[1:], found[1:], strict=True)):
        assert each is not None
        assert each.logprob == pytest.approx(float(expected[place, token]), abs=1e-4)
        best = expected[place].topk(3)
        assert [number for number, _ in each.likeliest] == best.indices.tolist()
        assert [value for _, value in each.likeliest] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("make", [torch_device, mlx_device])
def test_prompts_that_are_cut_over_steps_have_the_log_probabilities_of_whole_ones(
    tmp_path: Path, make: Callable[[Checkpoint], Device], window: int | None
) -> None:
    checkpoint = open_checkpoint(small_model(tmp_path, layers=2, window=window))
    capacity = Capacity(1, 2, 2 * 64, 60, 64)
    asking = [
        Request(
            number=number,
            prompt=prompt,
            new_tokens=2,
            ids=[(31 * number + 7 * place) % 256 for place in range(prompt)],
            logprobs=logprobs,
        )
        for number, (prompt, logprobs) in enumerate([(50, WantedLogprobs(1, prompt=True)), (9, None)])
    ]

    def scores(chunk: int) -> tuple[list[int], list[float]]:
        policy, device = make_policy("resident"), make(checkpoint)
        layout, cut = weight_layout(checkpoint.config, "float32"), replace(capacity, chunk=chunk)
        plan = plan_run(M2_ULTRA, layout, cut.fullest(), policy, slot_bytes=device.slot_bytes)
        serving = serve_on(device, ServingSetup(plan, policy, cut, ListedArrivals(asking)))
        asyncio.run(device.aclose())
        first, *others = serving.requests[0].prompt
        assert first is None
        return [*serving.requests[0].tokens, *serving.requests[1].tokens], [
            each.logprob for each in others if each
        ]

    tokens, whole = scores(0)
    found, cut = scores(7)
    assert found == tokens
    assert len(whole) == 49
    assert cut == pytest.approx(whole, abs=1e-4)


def tokens_of(serving: Serving) -> dict[int, list[int]]:
    return {number: served.tokens for number, served in serving.requests.items()}


def serve_until_a_stop_token(
    device: Device, name: str, alone: dict[int, list[int]], machine: Machine = T4
) -> None:
    """Serve requests of which some leave, and compare each one's tokens with those that it has alone."""
    requests = asked(10)
    stop = stop_of(alone)
    policy = make_policy(name)
    arrivals = ListedArrivals(requests, random_departures(2, requests))
    plan = planned(policy, device=device, machine=machine)
    serving = serve_on(device, ServingSetup(plan, policy, CAPACITY, arrivals, stop_tokens=[stop]))
    asyncio.run(device.aclose())
    assert_as_alone(serving, alone, stop)


@pytest.mark.parametrize("name", ALONE)
def test_under_every_policy_each_request_gets_the_tokens_that_it_has_alone(
    checkpoint: Checkpoint, alone: dict[int, list[int]], name: str
) -> None:
    serve_until_a_stop_token(TorchDevice(checkpoint, LAYOUT), name, alone)


@pytest.mark.parametrize("name", ["resident", "cgopipe"])
def test_a_request_whose_logits_are_not_finite_ends_and_the_others_go_on(
    tmp_path: Path, alone: dict[int, list[int]], name: str
) -> None:
    broken = alone[1][1]
    model = small_model(tmp_path / "model")
    damage(model, "embedding", row=broken)
    policy, device = make_policy(name), TorchDevice(open_checkpoint(model), LAYOUT)
    plan = planned(policy, device=device)
    serving = serve_on(device, ServingSetup(plan, policy, CAPACITY, ListedArrivals(asked(10))))
    device.close()
    assert serving.held == 0
    for number, served in serving.requests.items():
        assert served.tokens == good_tokens(served.request, alone[number], broken)
        is_whole = len(served.tokens) == served.request.new_tokens
        assert served.ending == ("length" if is_whole else "not finite")


def good_tokens(request: Request, whole: list[int], broken: int) -> list[int]:
    """The tokens of a request before one follows from a token that is broken."""
    if broken in (request.ids or ()):
        return []
    return whole[: whole.index(broken) + 1] if broken in whole else whole


@pytest.mark.parametrize("name", ["resident", "expert_cache", "cgopipe"])
def test_on_mlx_each_request_gets_the_tokens_that_it_has_alone(
    checkpoint: Checkpoint, alone: dict[int, list[int]], name: str
) -> None:
    serve_until_a_stop_token(mlx_device(checkpoint), name, alone, M2_ULTRA)


@pytest.mark.parametrize(
    ("places", "sequences", "prompts"), [(2, 1, (3, 5, 1, 1)), (1, 6, (1, 2, 3, 4, 5, 6, 7) * 2)]
)
def test_requests_join_and_leave_while_steps_of_as_many_rows_are_one_graph(
    checkpoint: Checkpoint, places: int, sequences: int, prompts: Sequence[int]
) -> None:
    """A prompt of one token has as many rows as a decode step. Graphs of several numbers of rows are in the plan."""
    requests = [
        Request(
            number=number,
            prompt=prompt,
            new_tokens=4 + 3 * (number % 6),
            ids=[*range(number, number + prompt)],
        )
        for number, prompt in enumerate(prompts)
    ]
    device = LaggingDevice(checkpoint, LAYOUT, gpu=LaggingGpu(seed=1), triton=True)
    policy, capacity = make_policy("resident"), Capacity(places, sequences, sequences * 32, 24, 32)
    plan = planned(policy, capacity, device, as_used_by(device, T4))
    serving = serve_on(device, ServingSetup(plan, policy, capacity, ListedArrivals(requests)))
    device.close()
    assert tokens_of(serving) == tokens_alone(checkpoint, requests)
    graphs = plan.reservations.sizes.graphs
    assert device.gpu.memory.most_wanted <= plan.memory("accelerator").used - graphs
    assert 0 < device.gpu.streams.captures * GRAPH_BYTES <= graphs
    assert "CUDA graphs of steps" in device.kernels["replay"]


@pytest.mark.parametrize("name", ["resident", "expert_streaming"])
def test_prompts_that_are_cut_over_steps_give_the_tokens_of_whole_ones(
    checkpoint: Checkpoint, alone: dict[int, list[int]], name: str
) -> None:
    policy, device, capacity = make_policy(name), TorchDevice(checkpoint, LAYOUT), replace(CAPACITY, chunk=5)
    plan, arrivals = planned(policy, capacity, device), ListedArrivals(asked(10))
    serving = serve_on(device, ServingSetup(plan, policy, capacity, arrivals))
    device.close()
    assert tokens_of(serving) == alone


class Followed(ServingListener):
    """Hands over further requests, from another thread, as tokens come; the last one closes."""

    def __init__(self, arrivals: LiveArrivals, requests: Sequence[Request]) -> None:
        self.arrivals = arrivals
        self.requests = list(requests)
        self.tokens: list[tuple[int, int]] = []
        self.steps = 0

    def loaded(self, serving: Serving) -> None:
        assert (serving.requests, self.tokens) == ({}, [])

    def token(self, served: Served) -> None:
        self.tokens.append((served.request.number, len(served.tokens)))
        if served.ending is not None:
            thread = threading.Thread(target=self._next)
            thread.start()
            thread.join()

    def _next(self) -> None:
        if self.requests:
            self.arrivals.add(self.requests.pop(0))
        else:
            self.arrivals.close()

    def step(self, serving: Serving) -> None:
        self.steps += 1


def test_requests_of_other_threads_are_served_as_they_come_until_the_last_one(
    checkpoint: Checkpoint, alone: dict[int, list[int]]
) -> None:
    arrivals = LiveArrivals()
    first, *others = asked(4)
    arrivals.add(first)
    followed = Followed(arrivals, others)
    policy, device = make_policy("resident"), TorchDevice(checkpoint, LAYOUT)
    setup = ServingSetup(planned(policy), policy, CAPACITY, arrivals, listener=followed)
    serving = serve_on(device, setup)
    device.close()
    assert tokens_of(serving) == {number: alone[number] for number in range(4)}
    assert followed.tokens == [
        (number, place + 1) for number in range(4) for place in range(len(alone[number]))
    ]
    assert followed.steps == len(serving.occupancy.times)


def test_a_server_keeps_nothing_of_requests_that_have_ended(checkpoint: Checkpoint) -> None:
    policy, device = make_policy("resident"), TorchDevice(checkpoint, LAYOUT)
    setup = ServingSetup(
        planned(policy, device=device), policy, CAPACITY, ListedArrivals(asked(6)), keeps_history=False
    )
    serving = serve_on(device, setup)
    device.close()
    assert serving.requests == {}
    assert len(serving.occupancy.times) == 1
    assert serving.steps > 6


def test_waiting_for_requests_ends_with_the_next_one_or_at_the_close() -> None:
    async def woken(act: str) -> bool:
        arrivals = LiveArrivals()
        waiting = asyncio.ensure_future(arrivals.wait(0))
        await asyncio.sleep(0)
        assert not waiting.done()
        threading.Thread(
            target={
                "add": lambda: arrivals.add(request(0)),
                "remove": lambda: arrivals.remove(0),
                "close": arrivals.close,
            }[act]
        ).start()
        await waiting
        return arrivals.over

    assert [asyncio.run(woken(act)) for act in ("add", "remove", "close")] == [False, False, True]


def test_requests_may_still_be_added_after_a_run_that_waited_was_given_up() -> None:
    arrivals = LiveArrivals()

    async def give_up() -> None:
        waiting = asyncio.ensure_future(arrivals.wait(0))
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    arrivals.add(request(0))
    assert arrivals.news(0).came == [request(0)]


class Full(TorchDevice):
    """A device for whose KV cache there is no memory."""

    def serve(self, plan: Plan) -> None:
        raise MemoryError


def test_a_server_that_the_system_refuses_memory_says_what_its_plan_takes(checkpoint: Checkpoint) -> None:
    policy, device = make_policy("resident"), Full(checkpoint, LAYOUT)
    setup = ServingSetup(planned(policy, device=device), policy, CAPACITY, ListedArrivals(asked(1)))
    with pytest.raises(OutOfMemory, match="the plan takes"):
        serve_on(device, setup)
    device.close()


@pytest.mark.parametrize(
    ("verb", "policy_name", "says"),
    [
        ("sample", "resident", "sample mb0: give a list"),
        ("route", "expert_cache", "route L0 mb0: give a dict"),
    ],
)
def test_wrong_values_of_a_device_end_its_service_with_its_name(
    checkpoint: Checkpoint, verb: str, policy_name: str, says: str
) -> None:
    class Mistaken(TorchDevice):
        def execute(self, task: Task) -> Any:
            own = super().execute(task)
            return None if task.verb == verb else own

    policy, device = make_policy(policy_name), Mistaken(checkpoint, LAYOUT)
    setup = ServingSetup(planned(policy, device=device), policy, CAPACITY, ListedArrivals(asked(1)))
    with pytest.raises(MoeschedError, match=f"^device Mistaken: execute gives None for {says}"):
        serve_on(device, setup)
    device.close()


def test_a_device_that_runs_batches_only_is_refused_with_a_remedy(checkpoint: Checkpoint) -> None:
    policy = make_policy("resident")
    setup = ServingSetup(planned(policy), policy, CAPACITY, ListedArrivals([]))
    with pytest.raises(BadInput, match="runs batches only: serve with --device torch, cuda or mlx"):
        serve_on(Batches(), setup)  # type: ignore[arg-type]  # a device without the ability


class Batches:
    """A device that serves no requests."""
