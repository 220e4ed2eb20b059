"""Requests that join and leave beside a batch job of the same requests, and the time that simulating them takes.

16 users of a random mixtral-0.8b send a request, and the next one when they have their answer: as many requests as two
batches of 16 have. Both ways run in turn in this process, with all weights in memory, and with memory for 40 % of them
and the rest on the disk. What counts is tokens a second from the first prompt to the last token.

The part `simulated` predicts ten minutes of arrivals of Mixtral 8x7B on a T4, with 16 requests at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import moesched
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_least, at_most
from benchmarks.shared.kept_models import kept_model
from moesched.jobs.served_model import served_model
from moesched.jobs.served_options import ServedOptions
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.runs.serving import Served, Serving, ServingListener
from moesched.serving.live import LiveArrivals
from moesched.serving.request import Request

MODEL = "mixtral-0.8b"
USERS, TURNS, PROMPT, NEW_TOKENS = 16, 2, 64, 48
BAR = 0.9
DISK_SHARE = 0.4
MINUTES, MOST_SECONDS = 10, 60.0
SIMULATED = "simulated"


class Way(NamedTuple):
    """A policy, and the share of the weights that the host has memory for."""

    policy: str
    share: float | None


WAYS = {"resident": Way("resident", None), "disk": Way("expert_streaming", DISK_SHARE)}


def claims(result: Result) -> Iterator[Claim]:
    """The rate of each way over a batch job's, and the time of a simulation."""
    for name in WAYS:
        if name in result:
            words = f"{USERS} users of {MODEL}, {name}: tokens a second, served over a batch job"
            yield at_least(words, result[name]["ratio"], BAR, "{:.2f}x")
    if SIMULATED in result:
        words = f"{MINUTES} minutes of arrivals simulated, Mixtral 8x7B on a T4"
        yield at_most(words, result[SIMULATED]["seconds"], MOST_SECONDS, "{:.1f} s")


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=(*WAYS, SIMULATED),
    rounds=5,
    rounds_help="run both ways this often, in turn",
    keeps_parts=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the JSON after each part."""
    options = BENCHMARK.parse(arguments)
    found = BENCHMARK.stored_parts()
    code = 0
    for name in options.only:
        found[name] = simulated() if name == SIMULATED else beside_a_batch(WAYS[name], options.rounds)
        BENCHMARK.done(name)
        code = BENCHMARK.write(found)
    return code


def simulated() -> Result:
    """Predict ten minutes of arrivals, at a rate that keeps 16 requests busy."""
    before = time.perf_counter()
    report = moesched.simulate_arrivals(
        "mixtral-8x7b",
        machine="t4",
        policy="expert_cache",
        workload="mtbench",
        gen=64,
        arrivals="poisson:0.25",
        requests=round(0.25 * 60 * MINUTES),
        batch_size=USERS,
    )
    return {
        "seconds": time.perf_counter() - before,
        "simulated_seconds": report.seconds,
        "requests": report.requests,
        "running": report.running[0],
    }


def beside_a_batch(way: Way, rounds: int) -> Result:
    """Rounds of a batch job and of serving, in turn."""
    model = kept_model(MODEL)
    given = ServedOptions(
        model=model, policy=way.policy, batch_size=USERS, budgets=budgets(model, way), context=128
    )
    prompts = [[(7 * place + number) % 30_000 for place in range(PROMPT)] for number in range(USERS * TURNS)]
    batches, services = [], []
    with moesched.Session(model, policy=way.policy, batch_size=USERS, budgets=given.budgets) as session:
        for _ in track(range(rounds), f"{way.policy}, rounds", still=True):
            report = session.run(prompts, max_new_tokens=NEW_TOKENS)
            batches.append(report.throughput_tokens_per_second)
            services.append(served(given, prompts))
    ratios = [mine / theirs for mine, theirs in zip(services, batches, strict=True)]
    return {
        "policy": way.policy,
        "batch_tokens_per_second": median(batches),
        "served_tokens_per_second": median(services),
        "ratio": median(ratios),
        "ratios": ratios,
    }


def budgets(model: Path, way: Way) -> dict[str, int] | None:
    """Bytes of the host for a way; None for all."""
    if way.share is None:
        return None
    layout = weight_layout(open_checkpoint(model).config)
    return {"host": int(way.share * sum(page.nbytes for page in layout.pages)) + 300_000_000}


class Users(ServingListener):
    """Users who each send a request when they have the answer to the one before."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.arrivals = LiveArrivals()
        self._waiting = [
            Request(number=number, prompt=len(ids), new_tokens=NEW_TOKENS, ids=ids)
            for number, ids in enumerate(prompts)
        ]
        self._open = len(self._waiting)
        self.began = self.ended = 0.0

    def loaded(self, serving: Serving) -> None:
        """Send the first requests."""
        self.began = time.perf_counter()
        for _ in range(USERS):
            self.arrivals.add(self._waiting.pop(0))

    def token(self, served: Served) -> None:
        """Send the next request of a user whose answer is complete."""
        if served.ending is None:
            return
        self._open -= 1
        if self._waiting:
            self.arrivals.add(self._waiting.pop(0))
        elif self._open == 0:
            self.ended = time.perf_counter()
            self.arrivals.close()


def served(given: ServedOptions, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens a second of users who are served."""
    users = Users(prompts)
    with served_model(given) as model:
        model.serve(users.arrivals, users)
    return len(prompts) * NEW_TOKENS / (users.ended - users.began)


if __name__ == "__main__":
    sys.exit(main())
