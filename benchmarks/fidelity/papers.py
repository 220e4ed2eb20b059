"""Policies of five papers beside the policies that they improve on, simulated on the nearest profiles that ship.

The ratio is that of decoded tokens per second, or of the times to the first token; above 1, the paper's policy is the
faster one. Requests are as in MTBench. Experts are chosen by a zipf distribution, and half of the tokens repeat the
experts of the token before them. Previews of the router are right with the default probability. Nothing here was
measured on a GPU: transfers and kernels take the time that the machine's profile says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

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


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy of a paper and the one that it improves on; the file of cases explains the fields."""

    paper: str
    policy: str
    other: str
    model: str
    machine: str
    of: list[Literal["decode", "first token"]]
    claim: str
    settings: tuple[dict[str, Any], ...] = ({},)
    other_settings: tuple[dict[str, Any], ...] = ({},)
    batch_size: int = 1
    micro_batch_size: int | None = None


CASES = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[Literal["cases"], list[Case]]
)["cases"]


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
        {
            "routing": ROUTING,
            "cases": [row for case in track(chosen, "simulating") for row in compared(case)],
        }
    )


def compared(case: Case) -> Iterator[dict[str, Any]]:
    """Both policies of a case, with each of their settings."""
    for settings, other_settings in zip(case.settings, case.other_settings, strict=True):
        mine = figures(case, case.policy, settings)
        others = figures(case, case.other, other_settings)
        for of in case.of:
            yield {
                "paper": case.paper,
                "policy": named(case.policy, settings),
                "over": named(case.other, other_settings),
                "model": case.model,
                "machine": case.machine,
                "of": of,
                "policy_figures": mine,
                "over_figures": others,
                "ratio": mine[of] / others[of] if of == "decode" else others[of] / mine[of],
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
        batch_size=case.batch_size,
        micro_batch_size=case.micro_batch_size,
        band=False,
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
