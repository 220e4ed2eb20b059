"""Tokens of requests that join and leave between steps, against those that each request has alone.

A small random model in float32 on the CPU, with little of its weights in fast memory, serves random requests under six
policies of one machine, and under `ep_balanced` on two processes: random arrivals, lengths and stop tokens, half of
them sampled, and some that leave early. A token may differ where the two largest logits are as near as 1e-4, or where a
draw is that near to a boundary.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, none_of
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput
from moesched.machines import load_machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import Batch
from moesched.requests.next_token import probabilities, uniform
from moesched.requests.sampling import Sampling
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.served_parts import ServingSetup
from moesched.runs.served_runs import follow_on, serve_on
from moesched.runs.serving import Serving
from moesched.seams import Policy
from moesched.serving.arrivals import ListedArrivals
from moesched.serving.capacity import Capacity
from moesched.serving.request import Request
from moesched.steps.plan import Plan
from moesched.system.own_loop import run_on_own_loop
from moesched.transports.zeromq import ZeroMqTransport

POLICIES = ("resident", "layer_streaming", "cgopipe", "expert_cache", "expert_streaming", "twiddler")
ON_NODES = "ep_balanced"
"""The policy of two processes."""
REQUESTS = 500
CAPACITY = Capacity(3, 4, 4 * 80, 60, 100)
APART = 2e6
"""Mean nanoseconds between two arrivals."""
NEAR = 1e-4
MACHINE = load_machine("t4")
MODEL = SHAPES["mixtral-0.8b"].varied(
    4,
    name="served",
    hidden=64,
    intermediate=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    experts=6,
    vocabulary=512,
    max_positions=256,
    stop_tokens=(),
)


def claims(result: Result) -> Iterator[Claim]:
    """Requests that differ, over all policies."""
    rows = result["policies"]
    words = (
        f"requests that join and leave between steps and get other tokens than alone, float32, {len(rows)} policies, "
        f"{ON_NODES} on two processes"
    )
    yield none_of(words, sum(each["differ"] for each in rows), sum(each["requests"] for each in rows))


BENCHMARK = Benchmark(
    __file__, __doc__, claims=claims, parts=(*POLICIES, ON_NODES), by_machine=False, keeps_parts=True
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve, compare, and write what was found."""
    options = BENCHMARK.parse(arguments)
    with TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(write_random_model(MODEL, Path(folder) / "model", dtype="float32"))
        layout = weight_layout(checkpoint.config, "float32")
        requests = random_requests(random.Random(1))
        alone = {each.number: tokens_alone(checkpoint, layout, each) for each in track(requests, "alone")}
        stop = alone[0][len(alone[0]) // 2]
        rows = [
            {"policy": name, **served(checkpoint, layout, name, requests, alone, stop)}
            for name in track(options.only, "policies")
        ]
    return BENCHMARK.write({"policies": rows})


def random_requests(draw: random.Random) -> list[Request]:
    """Requests at random times, with random lengths; every other one is sampled."""
    requests, at = [], 0.0
    for number in range(REQUESTS):
        at += draw.expovariate(1 / APART)
        prompt = draw.randint(1, CAPACITY.prompt_tokens)
        requests.append(
            Request(
                number=number,
                prompt=prompt,
                new_tokens=draw.randint(1, 20),
                arrives=round(at),
                ids=[draw.randrange(MODEL.vocabulary) for _ in range(prompt)],
                sampling=Sampling(temperature=0.8 if number % 2 else 0.0, seed=number),
            )
        )
    return requests


def tokens_alone(checkpoint: Checkpoint, layout: WeightLayout, request: Request) -> list[int]:
    """The tokens of a request that runs alone with all weights in fast memory."""
    policy, device = make_policy("resident"), TorchDevice(checkpoint, layout)
    plan = plan_run(MACHINE, layout, Batch((request.prompt,), request.new_tokens, ((0,),)), policy)
    tokens = run(plan, policy, device, [list(request.ids or ())], sampling=request.sampling).tokens
    assert tokens is not None, "nothing ended it early"
    return tokens[0]


def served(
    checkpoint: Checkpoint,
    layout: WeightLayout,
    name: str,
    requests: Sequence[Request],
    alone: dict[int, list[int]],
    stop: int,
) -> dict[str, int]:
    """Serve under a policy; how many requests there were, ended early, and differ."""
    draw = random.Random(2)
    leaving = [
        (each.number, each.arrives + draw.randint(0, 10**8)) for each in requests if draw.random() < 0.1
    ]
    arrivals = ListedArrivals(requests, leaving)
    serve = on_two_processes if name == ON_NODES else on_one
    serving = serve(checkpoint, layout, name, arrivals, stop)
    differ = 0
    for number, each in serving.requests.items():
        whole = alone[number]
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        expected = whole[: end if each.ending != "left" else len(each.tokens)]
        if each.tokens != expected and not near(checkpoint, layout, each.request, each.tokens, expected):
            differ += 1
    endings = [each.ending for each in serving.requests.values()]
    return {
        "requests": len(endings),
        "left": endings.count("left"),
        "stopped": endings.count("stop"),
        "steps": serving.steps,
        "differ": differ,
    }


def on_one(
    checkpoint: Checkpoint, layout: WeightLayout, name: str, arrivals: ListedArrivals, stop: int
) -> Serving:
    """Serve in this process."""
    policy, device = make_policy(name), TorchDevice(checkpoint, layout)
    plan = planned(policy, layout, device)
    serving = serve_on(device, ServingSetup(plan, policy, CAPACITY, arrivals, stop_tokens=[stop]))
    device.close()
    return serving


def on_two_processes(
    checkpoint: Checkpoint, layout: WeightLayout, name: str, arrivals: ListedArrivals, stop: int
) -> Serving:
    """Serve in this process, which is the first node, and another one."""
    policy, device = make_policy(name), TorchDevice(checkpoint, layout)
    plan = planned(policy, layout, device, nodes=2)
    budgets = {"gpu": plan.memory("accelerator").capacity}
    with TemporaryDirectory() as folder:
        addresses = [f"ipc://{folder}/{node}" for node in range(2)]
        other = multiprocessing.get_context("spawn").Process(
            target=follow, args=(checkpoint.path, name, budgets, addresses)
        )
        other.start()
        transport = ZeroMqTransport(addresses, 0)
        setup = ServingSetup(plan, policy, CAPACITY, arrivals, stop_tokens=[stop])
        serving = serve_on(device, setup, transport=transport)
        other.join()
        run_on_own_loop(transport.aclose)
    device.close()
    return serving


def follow(model: Path, name: str, budgets: Mapping[str, int], addresses: Sequence[str]) -> None:
    """Be the second node."""
    checkpoint = open_checkpoint(model)
    layout = weight_layout(checkpoint.config, "float32")
    policy, device = make_policy(name), TorchDevice(checkpoint, layout)
    plan = plan_run(
        MACHINE, layout, CAPACITY.fullest(), policy, budgets, device.slot_bytes, nodes=len(addresses), node=1
    )
    transport = ZeroMqTransport(addresses, 1)
    follow_on(device, plan, policy, transport)
    run_on_own_loop(transport.aclose)
    device.close()


def planned(policy: Policy, layout: WeightLayout, device: TorchDevice, nodes: int = 1) -> Plan:
    """A plan with about as little fast memory as the policy accepts."""
    whole = sum(page.nbytes for page in layout.pages)
    for share in np.arange(0.3, 3.0, 0.1):
        budgets = {"gpu": int(whole * share)}
        try:
            return plan_run(
                MACHINE, layout, CAPACITY.fullest(), policy, budgets, device.slot_bytes, nodes=nodes
            )
        except BadInput:
            continue
    raise BadInput(f"policy {type(policy).__name__} fits in no budget")


def near(
    checkpoint: Checkpoint,
    layout: WeightLayout,
    request: Request,
    tokens: Sequence[int],
    expected: Sequence[int],
) -> bool:
    """Test whether the first token that differs is one that rounding may change."""
    place = next(
        (place for place, (one, other) in enumerate(zip(tokens, expected, strict=False)) if one != other),
        None,
    )
    if place is None:
        return False
    ids = [*(request.ids or ()), *expected[:place]]
    policy, device = make_policy("resident"), TorchDevice(checkpoint, layout, keep_logits=True)
    run(plan_run(MACHINE, layout, Batch((len(ids),), 1, ((0,),)), policy), policy, device, [ids])
    logits_V = device.logits[0][1][0].numpy()
    if request.sampling.temperature == 0:
        first, second = np.sort(logits_V)[::-1][:2]
        return bool(first - second <= NEAR)
    ends = np.cumsum(probabilities(logits_V, request.sampling))
    return bool(np.abs(ends - uniform(request.sampling.seed, 0, len(ids))).min() <= NEAR)


if __name__ == "__main__":
    sys.exit(main())
