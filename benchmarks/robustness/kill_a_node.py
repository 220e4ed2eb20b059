"""A node is killed (kill -9) at a random step: does the run end in time, in the same tokens or an error that names it?

Two to four processes on this machine, over ZeroMQ with CURVE, with every policy for several nodes; in some runs others
hold what the killed one held, in some nobody does.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import moesched
from benchmarks.exact.cluster_tokens import DBRX, MIXTRAL, PROMPTS
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of
from benchmarks.shared.forked_nodes import ForkServer, Killer
from moesched.cli.logs import send_logs_to_stderr
from moesched.cluster.cluster_jobs import run_local
from moesched.errors import NodeLost
from moesched.models.random_model import write_random_model

NEW_TOKENS = 12
SECONDS_TO_END = 2.0
POLICIES = ("ep_naive", "ep_busy_full", "ep_router_aided", "ep_balanced")


def claims(result: Result) -> Iterator[Claim]:
    """A node killed at a random step."""
    words = f"runs with a killed node that end in {SECONDS_TO_END:g} s with the same tokens, or by naming it"
    yield all_of(words, result["as_promised"], result["runs"])


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=POLICIES,
    rounds=200,
    rounds_help="runs, one by seed",
    by_machine=False,
)
BENCHMARK.parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print what came out, write the result."""
    options = BENCHMARK.parse(arguments)
    every = range(options.first, options.first + options.rounds)
    seeds = [seed for seed in every if draw(seed).policy in options.only]
    runs: list[dict[str, Any]] = []
    os.environ.setdefault("MOESCHED_LOG", "error")
    send_logs_to_stderr()
    server = ForkServer()
    with TemporaryDirectory() as folder:
        expected = {}
        for config in (MIXTRAL, DBRX):
            model = write_random_model(config, Path(folder) / config.name, dtype="float32")
            alone = moesched.run_model(
                model, PROMPTS, policy="resident", max_new_tokens=NEW_TOKENS, batch_size=len(PROMPTS)
            )
            expected[config.name] = alone.tokens or []
        for seed in track(seeds, "killing nodes"):
            runs.append(run_one(server, Path(folder), expected, seed))
    good = [run for run in runs if run["as_promised"]]
    seconds = [run["seconds_to_end"] for run in runs]
    figures = {
        "runs": len(runs),
        "as_promised": len(good),
        "ended": dict(Counter(run["ended"] for run in runs)),
        "seconds_to_end": {"median": round(median(seconds), 3), "longest": round(max(seconds), 3)},
        "fell_short": [run for run in runs if not run["as_promised"]],
    }
    return BENCHMARK.write(figures)


class Draw(NamedTuple):
    """The run that a seed stands for."""

    model: str
    nodes: int
    killed: int
    policy: str
    settings: dict[str, int]
    at_token: int


def draw(seed: int) -> Draw:
    """Choose a run at random."""
    chosen = Random(seed)
    model = chosen.choice(sorted((MIXTRAL.name, DBRX.name)))
    nodes = chosen.choice([2, 3, 4])
    killed = chosen.randrange(nodes)
    policy = chosen.choice(POLICIES)
    settings = {"experts": 1} if policy == "ep_balanced" and chosen.random() < 0.5 else {}
    return Draw(model, nodes, killed, policy, settings, chosen.randint(1, len(PROMPTS) * (NEW_TOKENS - 2)))


def run_one(
    server: ForkServer, folder: Path, expected: dict[str, list[list[int]]], seed: int
) -> dict[str, Any]:
    """One run, and whether it kept what is promised."""
    model, nodes, rank, policy, settings, at = draw(seed)
    killer = Killer(at, lambda: server.nodes[rank].process.kill())
    right = False
    try:
        report = run_local(
            folder / model,
            PROMPTS,
            nodes=nodes,
            start=server,
            policy=policy,
            settings=settings,
            max_new_tokens=NEW_TOKENS,
            listener=killer,
        )
        ended = "same tokens"
        right = report.tokens == expected[model] and report.members[rank].lost is not None
    except NodeLost as error:
        ended = "node lost"
        kept = error.report.tokens if error.report is not None else []
        right = error.rank == rank and bool(kept)
        right = right and all(
            whole[: len(part)] == part for whole, part in zip(expected[model], kept, strict=True)
        )
    except moesched.MoeschedError as error:
        ended = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - killer.since
    gone = all(node.process.exitcode is not None for node in server.nodes.values())
    return {
        "seed": seed,
        "model": model,
        "policy": policy,
        **settings,
        "nodes": nodes,
        "killed": rank,
        "at_token": at,
        "ended": ended,
        "seconds_to_end": round(seconds, 3),
        "no_process_left": gone,
        "as_promised": right and gone and seconds <= SECONDS_TO_END,
    }


if __name__ == "__main__":
    sys.exit(main())
