"""Policies of five papers beside the policies that they improve on, simulated on the nearest profiles that ship.

The ratio is that of decoded tokens per second, or of the times to the first token; above 1, the paper's policy is the
faster one. Requests are as in MTBench. Experts are chosen by a zipf distribution, and half of the tokens repeat the
experts of the token before them. Previews of the router are right with the default probability. Nothing here was
measured on a GPU: transfers and kernels take the time that the machine's profile says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of
from benchmarks.record.tables import table_of
from moesched import load_machine, simulate_model
from moesched.dispatch import LeastRecentlyUsed
from moesched.machines.staging import staged
from moesched.policies.least_stale import LeastStaleCache

LRU = "benchmarks.fidelity.papers:LruPrefetching"
PINNED = "16GB"
"""Page-locked memory: the papers' systems stage weights, or copy them from pageable memory."""
ROUTING: dict[str, Any] = {"routing": "zipf", "routing_settings": {"locality": 0.5}}


class LruPrefetching(LeastStaleCache):
    """The baseline of Least-Stale: the same prefetches, into a cache that evicts the least recently used expert."""

    rule = LeastRecentlyUsed


class Case(NamedTuple):
    """A policy of a paper, the one that it improves on, and the paper's claim.

    Attributes:
        of: "decode" or "first token".
        claim: the paper's ratio, with its own machine and rival.
    """

    paper: str
    policy: tuple[str, Mapping[str, Any]]
    other: tuple[str, Mapping[str, Any]]
    model: str
    machine: str
    of: str
    claim: str
    sizes: Mapping[str, Any] = {"batch_size": 1}

    @property
    def name(self) -> str:
        settings = ", ".join(f"{key} {value}" for key, value in self.policy[1].items())
        return f"{self.paper}: {self.of}" + (f", {settings}" if settings else "")


KTRANSFORMERS = "1.70x decoding, 1.33x prefill over kTransformers (RTX A6000; mean of three models)"
LLAMA = "1.21x and 1.44x over all experts on the CPU (RTX 3060; llama.cpp forks, 4-bit models)"
SPECMD = "up to 34.7 % less time to the first token than LRU (OLMoE, 5 % of its experts)"
ON_DEMAND = "4.1x decoding, 4.5x prefill over loading on demand (at most)"
MODEL_BASED = "8x to 31x the throughput of FlexGen, MoE-Lightning and DeepSpeed (RTX A5000)"
LARGE = {"batch_size": 640, "micro_batch_size": 64}

CASES = [
    *(
        Case(
            "HybriMoE", ("hybrimoe", {"experts": count}), ("twiddler", {"experts": count}),
            "mixtral-8x7b", "rtx6000-ada", of, KTRANSFORMERS,
        )
        for count in (64, 112)
        for of in ("decode", "first token")
    ),
    Case("llama.cpp", ("frequency_cache", {}), ("cpu_ffn", {}), "qwen3-30b-a3b", "t4", "decode", LLAMA),
    *(
        Case(
            "Least-Stale", ("least_stale", {"experts": count}), (LRU, {"experts": count}),
            "olmoe-1b-7b", "a100-80g", of, SPECMD,
        )
        for count in (51, 102)
        for of in ("decode", "first token")
    ),
    *(
        Case(
            "Fate", ("fate", {"offload_per_layer": 40}), ("lru_offload", {"offload_per_layer": 64}),
            "olmoe-1b-7b", "rtx6000", of, ON_DEMAND,
        )
        for of in ("decode", "first token")
    ),
    *(
        Case("MoE-Gen", ("moe_gen", {}), (other, {}), "mixtral-8x7b", "l4", "decode", MODEL_BASED, LARGE)
        for other in ("cgopipe", "flexgen")
    ),
]  # fmt: skip


def claims(result: Result) -> Iterator[Claim]:
    """Policies of papers beside those that they improve on, simulated."""
    decoding = [case for case in result["cases"] if case["of"] == "decode"]
    words = "simulated: policies of papers that decode faster than what they improve on"
    yield all_of(words, sum(case["ratio"] > 1 for case in decoding), len(decoding))


PAPERS = {
    "policy": "`{policy}`",
    "over": "`{over}`",
    "model": "{model}",
    "machine": "{machine}",
    "of": "{of}",
    "ratio": "{ratio:.2f}x",
    "the paper's claim": "{claim}",
}


def tables(result: Result) -> dict[str, str]:
    """The table of docs/papers.md."""
    return {"papers": table_of(result["cases"], PAPERS)}


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    tables=tables,
    parts=dict.fromkeys(case.paper for case in CASES),
    by_machine=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate both policies of each case, and write the JSON."""
    options = BENCHMARK.parse(arguments)
    chosen = [case for case in CASES if case.paper in options.only]
    return BENCHMARK.write(
        {"routing": ROUTING, "cases": [compared(case) for case in track(chosen, "simulating")]}
    )


def compared(case: Case) -> dict[str, Any]:
    """Both policies of a case."""
    mine, others = (figures(case, *each) for each in (case.policy, case.other))
    ratio = mine["decode"] / others["decode"]
    if case.of == "first token":
        ratio = others["first token"] / mine["first token"]
    return {
        "paper": case.paper,
        "policy": named(*case.policy),
        "over": named(*case.other),
        "model": case.model,
        "machine": case.machine,
        "of": case.of,
        "policy_figures": mine,
        "over_figures": others,
        "ratio": ratio,
        "claim": case.claim,
    }


def figures(case: Case, policy: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens per second, seconds to the first token, and the share of uses that found their page."""
    report = simulate_model(
        case.model,
        machine=staged(load_machine(case.machine), PINNED, ring=False),
        policy=policy,
        settings=dict(settings),
        workload="mtbench",
        gen=24,
        **case.sizes,
        **ROUTING,
    )
    uses = sum(pool.hits + pool.misses for pool in report.pools)
    return {
        "decode": report.decode_tokens_per_second,
        "first token": report.first_token_seconds,
        "hits": sum(pool.hits for pool in report.pools) / max(1, uses),
    }


def named(policy: str, settings: Mapping[str, Any]) -> str:
    """A policy with its settings, as on the command line."""
    name = "least_stale with LRU" if policy == LRU else policy
    return " ".join([name, *(f"{key}={value}" for key, value in settings.items())])


if __name__ == "__main__":
    sys.exit(main())
