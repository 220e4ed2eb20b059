"""`explain` against the truth: runs with a planted cause of slowness, of which each is to be named as the bottleneck.

Simulated runs are of Mixtral 8x7B on changed machines, with dear kinds of work, or under policies with one weakness.
Measured ones are of a small random model on worker threads, with a device that is slow where the cause is planted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from benchmarks.fidelity._planted import AfterTheRouter, Dear, OneLayer, Sleepy, SlowTorch
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of
from benchmarks.shared.small_runs import TWO_MEMORIES
from moesched.analysis.bottleneck import Bottleneck
from moesched.analysis.explanation import explain
from moesched.machines import load_machine
from moesched.machines.changes import changed
from moesched.machines.networks import load_network
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.runs.simulation import simulate
from moesched.seams import Observer, Policy, Routing
from moesched.tasks import Task
from moesched.trace import About, Recorder, Recording

NEW_TOKENS = 4


class Cause(NamedTuple):
    """A planted cause: the run, and what its bottleneck has to be.

    Attributes:
        truth: the fields of the bottleneck that tell the cause apart from others.
    """

    recording: Callable[[], Recording]
    truth: Mapping[str, str]


class Popular:
    """All tokens choose among the first experts of each layer."""

    def __init__(self, experts: Sequence[int], top_k: int = 2) -> None:
        self._experts, self._top_k = list(experts), top_k

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        chosen = np.random.default_rng((step, layer, micro_batch)).permutation(self._experts)[: self._top_k]
        return {int(expert): tokens for expert in sorted(chosen)}


def simulated(
    policy: str | Policy,
    machine: str = "t4",
    changes: Sequence[str] = (),
    *,
    requests: int = 8,
    prompt: int = 128,
    dear: Mapping[str, float] | None = None,
    routing: Routing | None = None,
    nodes: int = 1,
    network: str = "10gbe",
    network_times: float = 1.0,
    settings: Mapping[str, Any] | None = None,
) -> Recording:
    """A prediction of Mixtral 8x7B."""
    described = changed(load_machine(machine), changes)
    if nodes > 1:
        joined = load_network(network)
        described = replace(
            described,
            network=replace(
                joined,
                latency_seconds=joined.latency_seconds * network_times,
                bandwidth=joined.bandwidth / network_times,
            ),
        )
    layout = weight_layout(SHAPES["mixtral-8x7b"])
    batch = split_batch([prompt] * requests, NEW_TOKENS, max(1, requests // 2))
    ranks = []
    for node in range(nodes):
        made = make_policy(policy, dict(settings or {})) if isinstance(policy, str) else policy
        ranks.append(Rank(plan_run(described, layout, batch, made, nodes=nodes, node=node), made))
    recorder = Recorder()
    simulate(
        ranks[0].plan,
        ranks[0].policy,
        cost=Dear(described, layout.dtype, dear) if dear else None,
        routing=routing,
        recorder=recorder,
        peers=ranks[1:],
    )
    return recorder.recording()


class Dawdler:
    """Keeps the driver from going on after each task."""

    def ended(self, task: Task) -> None:
        """Sleep."""
        time.sleep(0.01)


def measured(
    policy: Policy,
    slow: Mapping[str, float] | None = None,
    observers: Sequence[Observer] = (),
    prompts: Sequence[Sequence[int]] = ((1, 2, 3, 4, 5, 6, 7, 8),) * 4,
) -> Recording:
    """A run of a small random model on worker threads."""
    with TemporaryDirectory() as folder:
        config = SHAPES["mixtral-0.8b"].varied(
            layers=4,
            hidden=64,
            intermediate=128,
            vocabulary=256,
            head_dim=8,
            dtype="float32",
        )
        write_random_model(config, Path(folder) / "model")
        checkpoint = open_checkpoint(Path(folder) / "model")
        device = SlowTorch(checkpoint, weight_layout(config), slow or {})
        batch = split_batch([*map(len, prompts)], NEW_TOKENS, 2)
        plan = plan_run(TWO_MEMORIES, device.layout, batch, policy, slot_bytes=device.slot_bytes)
        recorder = Recorder()
        run(plan, policy, device, prompts, observers=observers, recorder=recorder)
    return recorder.recording()


CAUSES = {
    "slow link, simulated": Cause(
        lambda: simulated("cgopipe", changes=["link.host->gpu=x0.3"]),
        {"lane": "host->gpu", "kind": "fetch"},
    ),
    "slow link, measured": Cause(
        lambda: measured(make_policy("layer_streaming"), {"fetch": 0.05}),
        {"lane": "host->gpu", "kind": "fetch"},
    ),
    "slow disk, simulated": Cause(
        lambda: simulated("three_tiers", "t4-nvme"), {"lane": "disk", "kind": "copy_to_pinned"}
    ),
    "small pool, simulated": Cause(
        lambda: simulated(
            "lru_offload",
            "a100-80g",
            requests=1,
            routing=Popular(range(5, 8)),
            settings={"offload_per_layer": 6},
        ),
        {"cause": "budget", "kind": "fetch"},
    ),
    "tight budget, simulated": Cause(
        lambda: simulated(OneLayer(), requests=512, prompt=64, dear={"post_attention": 2.0}),
        {"cause": "budget"},
    ),
    "tight budget, measured": Cause(
        lambda: measured(OneLayer(), {"fetch": 0.02, "post_attention": 0.008}), {"cause": "budget"}
    ),
    "sleeping policy, measured": Cause(lambda: measured(Sleepy()), {"cause": "policy"}),
    "slow kernel, simulated": Cause(
        lambda: simulated("resident", "h200", dear={"combine": 50.0, "sample": 1.0, "post_attention": 20.0}),
        {"lane": "accelerator", "kind": "post_attention"},
    ),
    "slow kernel, measured": Cause(
        lambda: measured(make_policy("layer_streaming"), {"attention": 0.05}),
        {"lane": "accelerator", "kind": "attention"},
    ),
    "late router, simulated": Cause(
        lambda: simulated(AfterTheRouter(), "a100-80g", requests=1, dear={"route": 3000.0}),
        {"cause": "router"},
    ),
    "late router, measured": Cause(
        lambda: measured(AfterTheRouter(), {"route": 0.02, "fetch": 0.01}, prompts=[[1]]), {"cause": "router"}
    ),
    "starved host lane, simulated": Cause(
        lambda: simulated("cgopipe", dear={"cpu_attention": 2000.0}, requests=64),
        {"lane": "host", "kind": "cpu_attention"},
    ),
    "starved host lane, measured": Cause(
        lambda: measured(make_policy("cgopipe"), {"cpu_attention": 0.02}),
        {"lane": "host", "kind": "cpu_attention"},
    ),
    "slow cache of keys and values, simulated": Cause(
        lambda: simulated("flexgen", "h200", requests=512, prompt=512, changes=["link.host->gpu=x0.1"]),
        {"lane": "host->gpu", "kind": "load_kv"},
    ),
    "slow network, simulated": Cause(
        lambda: simulated("ep_naive", "m2-ultra", requests=1, nodes=2, network_times=20.0),
        {"lane": "rank 1 network"},
    ),
    "crowded node, simulated": Cause(
        lambda: simulated(
            "ep_naive", "m2-ultra", requests=8, nodes=2, network_times=0.01, routing=Popular(range(4, 8))
        ),
        {"lane": "rank 1 accelerator", "kind": "run_expert"},
    ),
    "slow driver, measured": Cause(
        lambda: measured(make_policy("layer_streaming"), observers=[Dawdler()]), {"cause": "host"}
    ),
}


def claims(result: Result) -> Iterator[Claim]:
    """Planted causes of slowness."""
    yield all_of("planted causes that `explain` names as the bottleneck", result["named"], result["causes"])


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=CAUSES,
    rounds_help="runs of each cause",
    by_machine=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all causes; 1 where a bottleneck is not what was planted."""
    options = BENCHMARK.parse(arguments)
    runs = [
        finding
        for name in track(options.only, "planting causes")
        for finding in findings(name, options.rounds)
    ]
    causes = {each["planted"] for each in runs}
    missed = {each["planted"] for each in runs if not each["named"]}
    return BENCHMARK.write({"causes": len(causes), "named": len(causes) - len(missed), "runs": runs})


def findings(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    """The bottleneck that `explain` names in each run of a cause."""
    planted, _, figures = name.rpartition(", ")
    cause = CAUSES[name]
    for _ in range(rounds):
        about = About(driver="virtual" if figures == "simulated" else "realtime")
        explained = explain(cause.recording(), about).bottleneck
        assert explained is not None
        yield {
            "planted": planted,
            "figures": figures,
            "truth": dict(cause.truth),
            "bottleneck": _told(explained),
            "named": all(getattr(explained, field) == value for field, value in cause.truth.items()),
        }


def _told(found: Bottleneck) -> dict[str, Any]:
    return {
        "lane": found.lane,
        "kind": found.kind,
        "cause": found.cause,
        "share": round(found.share, 3),
        "saved": round(found.saved, 3),
    }


if __name__ == "__main__":
    raise SystemExit(main())
