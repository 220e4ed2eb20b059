"""Predict runs that others measured and published, on machines that this project has never touched.

measured_rows.csv has the rows with their sources. Each machine is built from the names of its parts. Rows
marked `predict` set no rate of the project; those marked `fit` may, and are listed apart; those marked `shown` count in
no figure. Sources count once each, by their median error. The result does not depend on the machine that this script
runs on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.fidelity._validation_rows import PublishedRow, Run, Skipped, mapped, published_rows
from benchmarks.fidelity._validation_summary import FIGURES, counted, judged
from benchmarks.fidelity._validation_tables import tables
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of, at_most
from moesched import JobReport, simulate_model
from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.machines.build import build_machine
from moesched.machines.changes import changed
from moesched.machines.staging import staged
from moesched.models.shapes import SHAPES
from moesched.requests.workloads import given_lengths
from moesched.routing.popularity import GENERATORS, expected_profile
from moesched.routing.profile import RoutingProfile, write_profile

PINNED_SHARE = 4
"""The host's memory over the part of it that is page-locked: assumed."""


def claims(result: Result) -> Iterator[Claim]:
    """Published rows of machines that others measured."""
    of, rows = result["summary"], result["summary"]["decode"]["rows"]
    words = "predicted decode rates that others [measured and published](validation.md)"
    yield at_most(f"{words}: median error of the sources", 100 * of["decode"]["median_error"], 25, "{:.0f} %")
    reached = [bar["reached"] for bar in result["bars"]]
    yield all_of(
        f"bars of [predictions of {rows} such rows](validation.md) that are reached",
        sum(reached),
        len(reached),
    )


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    tables=tables,
    parts=dict.fromkeys(row.source for row in published_rows()),
    rounds_help="has no effect, since predictions do not vary",
    by_machine=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict all rows, print the bars, write the result."""
    options = BENCHMARK.parse(arguments)
    rows = [row for row in published_rows() if row.source in options.only]
    with ProcessPoolExecutor() as pool:
        found = pool.map(result_of, rows)
        results = [next(found) for _ in track(rows, "predicting")]
    return BENCHMARK.write({"rows": results, **counted(results)})


def result_of(row: PublishedRow) -> dict[str, Any]:
    """A row with its prediction, with the reason why it has none, or with what fails."""
    about = {name: getattr(row, name) for name in ("use", "source", "model", "quant", "machine", "setting")}
    run = mapped(row)
    if isinstance(run, Skipped):
        return {**about, "use": "skip", "why": run.why}
    about |= {"policy": shown_policy(run), "why": run.why}
    try:
        report = predicted_by(run)
    except BadInput as error:
        return {**about, "fails": str(error)}
    batch, band = report.plan.batch_size, report.band or {}
    tokens = {"decode": batch, "prefill": batch * run.prompt}
    seconds = {"decode": "decode_step_seconds", "prefill": "prefill_seconds"}
    for name in FIGURES:
        measured = row.measured(name)
        if measured is not None:
            shortest, expected, longest = band[seconds[name]]
            rates = [tokens[name] / each for each in (longest, expected, shortest)]
            about[name] = judged(measured, *rates)
    return {**about, "widest_rate": report.widest_rate}


def predicted_by(run: Run) -> JobReport:
    """The report of a simulated run.

    Raises:
        BadInput: it does not fit, or a part is not known.
    """
    options: dict[str, Any] = {"batch_size": 1, **run.options}
    with TemporaryDirectory() as folder:
        if run.popular:
            path = Path(folder) / "popularity.csv"
            write_profile(profile_of(run.model), path)
            options["settings"] = {**options["settings"], "popularity": str(path)}
        return simulate_model(
            run.model,
            machine=machine_of(run),
            policy=run.policy,
            workload=given_lengths([run.prompt] * options["batch_size"], run.new_tokens),
            **options,
        )


@cache
def profile_of(model: str) -> RoutingProfile:
    """The popularity that a model's experts are expected to have."""
    return expected_profile(GENERATORS["popularity"](), SHAPES[model], 0, 10**6)


def machine_of(run: Run) -> Machine:
    """The machine that is built from a run's parts; these programs page-lock a part of the host's memory, if any."""
    machine = build_machine(run.parts).machine
    if machine.page_locked:
        machine = staged(machine, machine.memories[machine.host.memory].nbytes // PINNED_SHARE, ring=False)
    return changed(machine, [f"{what}={value}" for what, value in run.capacity.items()])


def shown_policy(run: Run) -> str:
    """The policy with its settings, as the command line has them."""
    return " ".join(
        [run.policy, *(f"{key}={value}" for key, value in run.options.get("settings", {}).items())]
    )


if __name__ == "__main__":
    sys.exit(main())
