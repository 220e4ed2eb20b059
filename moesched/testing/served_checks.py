"""Checks of policies on requests that join and leave a run, with prompts and decode steps in any order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from moesched.drivers.validation import CheckedEngine
from moesched.requests.logprobs import WantedLogprobs
from moesched.runs.ranks import Rank
from moesched.runs.served_parts import ServingSetup
from moesched.runs.served_runs import simulate_serving
from moesched.seams import Policy
from moesched.serving.arrivals import ListedArrivals
from moesched.serving.capacity import Capacity
from moesched.serving.request import Request
from moesched.steps.plan import Plan
from moesched.testing.symbolic.device import SymbolicDevice
from moesched.testing.symbolic.served import expected_served

REQUESTS = 8
"""Number of requests in a check."""
APART = 2_000_000
"""Mean nanoseconds between two arrivals: a few steps of a small model."""


def random_requests(seed: int, longest_prompt: int, most_new: int, count: int = REQUESTS) -> list[Request]:
    """Return requests with random arrival times and lengths; equal seeds give equal requests.

    Every other request asks for the log probabilities of its prompt.

    Args:
        longest_prompt: the largest number of tokens of a prompt.
        most_new: the largest number of tokens to generate.
        count: number of requests.
    """
    draw, arrives, requests = random.Random(seed), 0, []
    scored = WantedLogprobs(0, prompt=True)
    for number in range(count):
        arrives += round(draw.expovariate(1 / APART))
        prompt, new_tokens = draw.randint(1, longest_prompt), draw.randint(1, most_new)
        requests.append(
            Request(
                number=number,
                prompt=prompt,
                new_tokens=new_tokens,
                arrives=arrives,
                ids=list(range(prompt)),
                logprobs=scored if number % 2 else None,
            )
        )
    return requests


def random_departures(seed: int, requests: Sequence[Request]) -> list[tuple[int, int]]:
    """Choose some requests at random, and a time at which the client of each disconnects.

    Equal seeds give equal results.

    Returns:
        Pairs of `Request.number` and the time in nanoseconds, on the clock of `Request.arrives` and not before it.
    """
    draw = random.Random(seed)
    return [
        (each.number, each.arrives + draw.randint(0, 3 * APART)) for each in requests if draw.random() < 0.25
    ]


def check_served(
    policy: Policy,
    plan: Plan,
    capacity: Capacity,
    requests: Iterable[Request],
    seed: int = 0,
    peers: Sequence[tuple[Plan, Policy]] = (),
) -> None:
    """Serve requests that join and leave, on a device that computes hashes; check tokens and use of memory.

    Args:
        plan: the policy's plan for the fullest batch that `capacity` allows.
        capacity: the largest number of requests and tokens in the run at once.
        seed: seed of the choice of requests whose clients leave before they have all tokens.
        peers: plans and policies of the other nodes, if several share the model.

    Raises:
        AssertionError: a request got wrong tokens or too few, nodes ran different requests, or a budget was exceeded.
        PolicyError: the policy submitted something illegal.
        BrokenRule: the engine broke one of its own rules.
    """
    asked, device = list(requests), SymbolicDevice()
    others = [SymbolicDevice() for _ in peers]
    for number, other in enumerate(others, 1):
        other.join(number, None, device)
    ranks = [Rank(*each, other) for each, other in zip(peers, others, strict=True)]
    arrivals = ListedArrivals(asked, random_departures(seed, asked))
    setup = ServingSetup(plan, policy, capacity, arrivals)
    serving = simulate_serving(setup, device=device, peers=ranks, make_engine=CheckedEngine)
    attending = [other for other, (own, _) in zip(others, peers, strict=True) if own.nodes.attends]
    if any(other.places.history != device.places.history for other in attending):
        raise AssertionError("the nodes had different rows")
    expected: dict[int, list[int]] = {}
    for history in device.places.history.values():
        expected |= expected_served(plan, history)
    for number, served in serving.requests.items():
        if served.tokens != expected.get(number, [])[: len(served.tokens)]:
            raise AssertionError(f"request {number} got wrong tokens")
        if served.ending != "left" and len(served.tokens) != served.request.new_tokens:
            raise AssertionError(
                f"request {number} got {len(served.tokens)} of {served.request.new_tokens} tokens"
            )
    if len(serving.requests) != len(asked):
        raise AssertionError(f"{len(serving.requests)} of {len(asked)} requests were served")
    memories = [memory for each in (plan, *(own for own, _ in peers)) for memory in each.memories.values()]
    over = [memory.name for memory in memories if memory.peak > memory.capacity]
    if over:
        raise AssertionError(f"more than the budget of {over}")
