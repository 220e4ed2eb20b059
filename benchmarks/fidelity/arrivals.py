"""Requests that arrive over time, predicted beside measured: rates, times to the first token and per token.

A file has requests of random mixtral-0.8b with prompts and answers of several lengths. They arrive all at once; or at
random, at half the rate at which this machine completes them then, and at nine tenths of it, where queues make a small
error of a step's time a large one of the time to the first token. `simulate --arrivals` reads the file, and the engine
serves the same requests at the same times, all weights in memory. The prediction uses a calibration made in turn with
the runs, and the experts that each token chooses, which a batch job recorded before (`moesched profile-routing`); it
sees neither the weights nor a time of the requests. Runs during which other processes took more than a tenth of a core,
or memory had another rate than at calibration, are done again, up to three times as many in all: see
benchmarks/shared/in_turn.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

import msgspec
from safetensors.torch import load_file, save_file

import moesched
from benchmarks.record.benchmark import Benchmark
from benchmarks.record.claims import Claim, Result
from benchmarks.shared.in_turn import Figures, InTurn, calibrate_in_turn
from moesched.jobs.profiling import profile_routing
from moesched.jobs.served_model import served_model
from moesched.jobs.served_options import ServedOptions
from moesched.machines import Machine
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.routing.trace import RoutingTrace
from moesched.runs.service_report import ServiceReport, service_report
from moesched.serving.arrival_files import read_arrivals
from moesched.serving.arrivals import ListedArrivals
from moesched.serving.request import Request
from moesched.system.cache import cache_folder

MODEL, POLICY = "mixtral-0.8b", "resident"
REQUESTS, USERS, CONTEXT = 100, 16, 384
PROMPTS, ANSWERS = (8, 16, 40, 64, 100, 250), (4, 16, 32, 64, 100)
AT_ONCE = "all at once"
SHARES = {AT_ONCE: None, "at half of what it carries": 0.5, "at nine tenths of what it carries": 0.9}
"""The rate of each file's arrivals, as a share of the rate at which requests that come all at once are completed."""
MOST_OFF = 0.15


def claims(result: Result) -> Iterator[Claim]:
    """The prediction over the measurement."""
    for row in result["cases"]:
        ratios = row["predicted_over_measured"]
        yield Claim(
            f"{REQUESTS} requests to {MODEL} that arrive {row['part']}, predicted over measured: "
            + ", ".join(ratios),
            ", ".join(f"{ratio:.2f}x" for ratio in ratios.values())
            + (" (memory at another rate)" if row.get("kept_at_another_rate") else ""),
            f"each within {100 * MOST_OFF:g} %",
            all(abs(ratio - 1) <= MOST_OFF for ratio in ratios.values()),
        )


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=SHARES,
    rounds=3,
    rounds_help="undisturbed runs of each file; medians count",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve and predict the arrivals of each part, and write what was found."""
    options = BENCHMARK.parse(arguments)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        bench = Bench(Path(folder))
        carried = bench.measure(bench.write(AT_ONCE, None))["requests a second"]
        rates = {part: share and share * carried for part, share in SHARES.items()}
        files = {part: bench.write(part, rates[part]) for part in options.only}
        routing = bench.routing()
        in_turn = InTurn({part: partial(bench.measure, file) for part, file in files.items()}, options.rounds)
        machine = calibrate_in_turn(in_turn, options.rounds)
        taken = in_turn.taken()
        cases = []
        for part, (runs, repeated) in taken.items():
            predicted = bench.predict(files[part], machine, routing)
            measured = {name: median(run.figures[name] for run in runs) for name in predicted}
            cases.append(
                {
                    "part": part,
                    "arriving_per_second": rates[part],
                    "most_other_cores": round(max(run.others for run in runs), 2),
                    "predicted_over_measured": {name: predicted[name] / measured[name] for name in predicted},
                    "predicted": predicted,
                    "measured": measured,
                    "runs": [run.figures for run in runs],
                    "kept_at_another_rate": sum(
                        not run.at_rates_of(in_turn.calibration_rates) for run in runs
                    ),
                    "repeated": len(repeated),
                    "memory_gbs": [run.rates["memory_gbs"] for run in runs],
                }
            )
    return BENCHMARK.write(
        {
            "carried": carried,
            "calibration_memory_gbs": in_turn.calibration_rates["memory_gbs"],
            "cases": cases,
        }
    )


class Bench:
    """The model and its requests.

    Args:
        folder: for the model and the files of arrivals.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._given = ServedOptions(
            model=written(folder / MODEL),
            policy=POLICY,
            batch_size=USERS,
            micro_batch_size=USERS,
            context=CONTEXT,
        )

    def write(self, name: str, rate: float | None) -> Path:
        """Write a file of arrivals, `rate` a second; None for all at once."""
        draw, at, lines = Random(3), 0.0, []
        for prompt, answer in lengths():
            at += draw.expovariate(rate) if rate else 0.0
            lines.append({"at": at, "prompt_tokens": prompt, "new_tokens": answer})
        file = self._folder / f"{name}.jsonl"
        file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        return file

    def routing(self) -> RoutingTrace:
        """Record the experts that each token of the requests chooses."""
        given = self._given
        return profile_routing(
            model=given.model,
            prompts=prompts(),
            max_new_tokens=max(ANSWERS),
            policy=POLICY,
            batch_size=USERS,
            micro_batch_size=USERS,
        ).trace

    def measure(self, file: Path) -> Figures:
        """Serve the requests of a file."""
        with served_model(self._given) as model:
            arrivals = ListedArrivals(with_ids(read_arrivals(file)))
            serving = model.serve(arrivals, keeps_history=True)
            assert all(each.ending == "length" for each in serving.requests.values()), "a stop token came"
            return figures_of(service_report(model.ran, serving, model.planned.capacity, None))

    def predict(self, file: Path, machine: Machine, routing: RoutingTrace) -> Figures:
        """Simulate the requests of a file."""
        given = self._given
        report = moesched.simulate_arrivals(
            given.model,
            machine=machine,
            policy=POLICY,
            arrivals=file,
            routing=routing,
            batch_size=given.batch_size,
            micro_batch_size=given.micro_batch_size,
            context=given.context,
        )
        return figures_of(report)


def written(folder: Path) -> Path:
    """A model of random weights, whose embeddings are 64 times as large.

    Else all tokens of a prompt choose the experts of its mean, which no trained model does.
    """
    model = write_random_model(SHAPES[MODEL], folder)
    [file] = model.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] *= 64
    changed = file.with_suffix(".changed")
    save_file(tensors, changed)
    changed.replace(file)
    return model


def lengths() -> list[tuple[int, int]]:
    """Tokens of each request's prompt and answer."""
    draw = Random(1)
    return [(draw.choice(PROMPTS), draw.choice(ANSWERS)) for _ in range(REQUESTS)]


def prompts() -> list[list[int]]:
    """The prompts of the requests: random tokens."""
    draw = Random(2)
    return [[draw.randrange(30_000) for _ in range(length)] for length, _ in lengths()]


def with_ids(requests: Iterable[Request]) -> list[Request]:
    """The requests with their prompts."""
    return [msgspec.structs.replace(each, ids=ids) for each, ids in zip(requests, prompts(), strict=True)]


def figures_of(report: ServiceReport) -> Figures:
    """The figures of a report that are compared: rates, and times in seconds."""
    assert report.ttft is not None and report.tpot is not None
    return {
        "requests a second": report.requests_per_second,
        "tokens a second": report.tokens_per_second,
        "TTFT p50": report.ttft.p50,
        "TTFT p90": report.ttft.p90,
        "TPOT p50": report.tpot.p50,
        "TPOT p90": report.tpot.p90,
    }


if __name__ == "__main__":
    sys.exit(main())
