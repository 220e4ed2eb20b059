"""Trust in the simulator: replays of real runs, predictions of them, and the order of policies.

A setting is a model of random weights, a machine, a budget and a batch. In each, every policy that fits runs several
times, in turn with the others, and is simulated. Settings `disk-...` run on this machine, weights coming from its disk;
the simulation uses a thorough calibration made in turn with the runs, since a shared machine's speed drifts by more
than a prediction may be off. It sees neither models nor policies nor budgets. Settings `emulated-...` run on the
emulated accelerator, a T4 with lower rates; their durations are those of the cost model that the simulation uses: they
test schedules, not costs.

With coded weights, and for families at published widths, the runs are in rounds: the machine is calibrated thoroughly,
then each policy runs three times, and is predicted from that calibration. The simulation takes the choices of experts
from the run: single sequences of a random model choose the same ones again and again. The error is the median over the
rounds, and a round has the median of its three runs.

Runs during which other processes took more than a tenth of a core are done again, up to three times as many in all. So
are runs of settings `disk-...` with memory, the disk or the cores at another rate than at calibration, as others on a
shared host slow them down by the minute, and errors would be the host's. All cores read memory and multiply, and the
device reads the disk, for a moment before and after each run, and between the steps of a calibration for all runs, or
before and after that of a round. A run is done again if the two readings of a rate and those of its calibration, of one
for all runs the middle reading, differ by more than a tenth. A calibration for all runs during which a rate changed is
made again, up to twice; the one with the largest share of one rate counts. If the rates do not come back, the last ones
of the runs that others disturbed least are kept, and their figures say so. No run is chosen by its result: only the
load of others and these rates decide. The result file has all runs, also the repeated ones. Ctrl-C ends a setting's
runs; those so far count once each policy has run.

Three things come of it:

* replays: each measured run's graph and durations go through the virtual clock, which finds the start times anew. How
  far the time that it comes to is from the measured one, loading left out.
* predictions, on the disk: whether the time of the decode steps is within 10 % and inside the band that the prediction
  has, and the busy time of each lane in them within 15 %, in medians over the runs. By coded weights and of families at
  published widths: whether the median error of the time of the decode steps is within 15 %.
* ranking: pairs of schedules whose measured medians are further apart than their interquartile ranges together; how
  many of them the simulator puts in the same order; and how much slower than the fastest the schedule is that the
  simulator would choose. Policies with the same schedule count once, with all their runs.

Settings that are not measured stay in the result file. Each takes about five minutes where others leave the machine
alone, and one in rounds as long for each round.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fidelity._fidelity_tables import claims, tables
from benchmarks.fidelity._ranking import MEASURES, Times, distinct, ranking
from benchmarks.fidelity._runs import LANE, Bench
from benchmarks.fidelity._settings import SETTINGS, Case
from benchmarks.record.benchmark import Benchmark, progress, track
from benchmarks.shared.in_turn import Figures, InTurn, Rates, Taken, calibrate_in_turn
from moesched import plugins
from moesched.calibration.calibrate import calibrate_machine
from moesched.errors import BadInput
from moesched.system.cache import cache_folder

PREDICTED = "predicted "
"""Before the name of a measure, in the figures of a run in rounds."""
WHEN = ("before", "after", "before_calibration", "after_calibration")
"""The readings of a rate for a run; the last two in rounds."""
RUNS = 3
"""Number of runs of a policy in a round; their medians count."""
Results = tuple[dict[str, Taken], dict[str, Any]]
"""The runs of each case, and entries of the result file that follow from them."""
LEFT_OUT = ("adversarial", "ep_naive", "ep_busy_full", "ep_router_aided", "ep_balanced")
"""No schedule, and schedules for several nodes, which on one are what `resident` is."""


def measure(setting: str, names: Sequence[str], repeats: int) -> dict[str, Any]:
    """All policies in a setting.

    Raises:
        BadInput: none of them fits.
    """
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        bench = Bench(setting, Path(folder))
        cases = {bench.setting.name_of(case): case for case in bench.setting.cases(names)}
        left_out = unfit(cases, lambda case: bench.plan(case, bench.device(), bench.machine))
        fit = [name for name in cases if name not in left_out]
        if not bench.emulated:  # the first run of a process prepares products, and is not counted
            bench.measure(cases[fit[0]])
        way = in_rounds if bench.setting.observed else in_turn
        with bench.rates() as rates:
            taken, further = way(bench, {name: cases[name] for name in fit}, repeats, rates)
    runs = [each for done in taken.values() for each in done.kept]
    return {
        **described(bench),
        "repeats": repeats,
        "most_other_cores": round(max(each.others for each in runs), 2),
        "wall_seconds": round(sum(each.figures["wall"] for each in runs), 1),
        "left_out": left_out,
        **further,
    }


def in_turn(
    bench: Bench, cases: Mapping[str, Case], repeats: int, rates: Mapping[str, Callable[[], float]]
) -> Results:
    """Runs of all cases in turn, predicted from one calibration, with the order of the policies."""
    measures = {name: partial(bench.measure, case) for name, case in cases.items()}
    turns = InTurn(measures, repeats, rates)
    machine = bench.machine if bench.emulated else calibrate_in_turn(turns, repeats)
    taken, calibrated = turns.taken(), turns.calibration_rates
    predicted = {name: bench.predict(case, machine) for name, case in cases.items()}
    policies = [policy_result(name, taken[name], predicted[name], calibrated) for name in cases]
    return taken, {
        **{f"calibration_{name}": calibrated[name] for name in calibrated},
        "policies": [{key: each[key] for key in each if key != "runs"} for each in policies],
        "ranking": rankings(policies),
    }


def in_rounds(
    bench: Bench, cases: Mapping[str, Case], repeats: int, rates: Mapping[str, Callable[[], float]]
) -> Results:
    """Runs of all cases in rounds, each predicted from the round's calibration."""
    machine = bench.machine

    def calibrate() -> Rates:
        nonlocal machine
        progress.print("calibrating for the next round")
        before = rounds.rates()
        machine = calibrate_machine(thorough=True)
        return {name: (before[name], rate) for name, rate in rounds.rates().items()}

    def measured(case: Case) -> Figures:
        runs = [bench.measure(case) for _ in range(RUNS)]
        figures = {name: median(each[name] for each in runs) for name in runs[0]}
        predicted = bench.predict(case, machine)
        return figures | {f"{PREDICTED}{each}": predicted[each] for each in MEASURES}

    measures = {name: partial(measured, case) for name, case in cases.items()}
    rounds = InTurn(measures, repeats, rates, begin=calibrate)
    taken = rounds.taken()
    return taken, {"policies": [result_of_rounds(name, taken[name]) for name in cases]}


def result_of_rounds(name: str, taken: Taken) -> dict[str, Any]:
    """A policy's runs, each with its own prediction, and its replays."""
    found = figures_of(taken)
    errors = {
        each: [percent(*pair) for pair in zip(found[f"{PREDICTED}{each}"], found[each], strict=True)]
        for each in MEASURES
    }
    return {
        "policy": name,
        "measured": {each: round(median(found[each]), 4) for each in MEASURES},
        "predicted": {each: round(median(found[f"{PREDICTED}{each}"]), 4) for each in MEASURES},
        "error_percent": {each: round(median(errors[each]), 3) for each in MEASURES},
        "errors_percent": errors["decode"],
        **kept_runs(taken, {}),
        **replays(found),
    }


def unfit(cases: Mapping[str, Case], plan: Callable[[Case], object]) -> dict[str, str]:
    """The cases that do not fit, and the reason of each.

    Raises:
        BadInput: none of them fits.
    """
    left_out: dict[str, str] = {}
    for name, case in cases.items():
        try:
            plan(case)
        except BadInput as error:
            left_out[name] = str(error)
    if len(left_out) == len(cases):
        name, why = next(iter(left_out.items()))
        raise BadInput(
            f"no case of the setting fits ({name}: {why}): give other --policies or another setting"
        )
    return left_out


def rankings(policies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The order of a setting's schedules, measured and predicted.

    Policies whose predictions are equal to the nanosecond, in every measure, have the same schedule.
    """
    by_name = {each["policy"]: each for each in policies}
    schedules = distinct({name: tuple(each["predicted"].values()) for name, each in by_name.items()})

    def times(measure: str, names: Sequence[str]) -> Times:
        runs = [run for name in names for run in by_name[name]["runs"][measure]]
        return Times(runs, by_name[names[0]]["predicted"][measure])

    return {
        "same_schedule": [names for names in schedules.values() if len(names) > 1],
        **{
            each: ranking({first: times(each, names) for first, names in schedules.items()})
            for each in MEASURES
        },
    }


def described(bench: Bench) -> dict[str, Any]:
    """A setting as the result file has it."""
    setting, config = bench.setting, bench.setting.config
    return {
        "model": f"{config.name}: {config.layers} layers, {config.hidden} / {config.routed.intermediate}, "
        f"{config.routed.experts} experts, {setting.weights or setting.dtype}",
        "machine": "emulated, a T4 with lower rates" if bench.emulated else "this one, weights on its disk",
        "share_of_weights": setting.share,
        "batch_size": setting.batch_size,
        "micro_batch_size": setting.micro_batch_size,
        "new_tokens": setting.new_tokens,
    }


def policy_result(
    name: str, taken: Taken, predicted: Mapping[str, float], calibration_rates: Rates
) -> dict[str, Any]:
    """A policy's runs, its prediction and its replays."""
    found = figures_of(taken)
    sides = {each: Times(found[each], predicted[each]) for each in MEASURES}
    result = {
        "policy": name,
        "measured": {each: side.median for each, side in sides.items()},
        "spread": {each: side.spread for each, side in sides.items()},
        "predicted": {each: side.predicted for each, side in sides.items()},
        "error_percent": {each: percent(side.predicted, side.median) for each, side in sides.items()},
        "runs": {each: list(side.measured) for each, side in sides.items()},
        **kept_runs(taken, calibration_rates),
        **replays(found),
    }
    if "low" in predicted:
        result["inside"] = predicted["low"] <= sides["decode"].median <= predicted["high"]
        result["lane_error_percent"] = {
            key.removeprefix(LANE): percent(predicted[key], median(found[key]))
            for key in found
            if key.startswith(LANE) and key in predicted
        }
    return result


def figures_of(taken: Taken) -> dict[str, list[float]]:
    """The kept runs' values of each figure."""
    return {key: [each.figures[key] for each in taken.kept] for key in taken.kept[0].figures}


def kept_runs(taken: Taken, calibration_rates: Rates) -> dict[str, Any]:
    """Numbers of runs that were kept and repeated, and all runs."""
    return {
        "kept": len(taken.kept),
        "kept_at_another_rate": sum(not run.at_rates_of(calibration_rates) for run in taken.kept),
        "repeated": len(taken.repeated),
        "every_run": every_run(taken),
    }


def replays(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median errors of the replays with the times between tasks, and without them."""
    errors = {
        name: [percent(*pair) for pair in zip(found[key], found["recorded"], strict=True)]
        for name, key in (("replay", "replayed"), ("bare_replay", "replayed bare"))
    }
    return {f"{name}_error_percent": round(median(each), 3) for name, each in errors.items()}


def every_run(taken: Taken) -> dict[str, list[Any]]:
    """All runs, a list for each figure: those that were kept come first."""
    runs = [*taken.kept, *taken.repeated]
    return {
        "decode": [run.figures["decode"] for run in runs],
        "other_cores": [round(run.others, 2) for run in runs],
        **{
            f"{name}_{when}": [run.rates[name][place] for run in runs]
            for name, readings in runs[0].rates.items()
            for place, when in enumerate(WHEN[: len(readings)])
        },
    }


def percent(value: float, of: float) -> float:
    """A relative difference."""
    return round(100 * (value / of - 1), 3)


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    tables=tables,
    parts=SETTINGS,
    rounds=5,
    rounds_help="undisturbed runs of each policy, or rounds of three",
    keeps_parts=True,
    replaces=("prediction",),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the settings; each joins those of earlier runs in the result at once."""
    options = BENCHMARK.parse(arguments)
    policies = [name for name in plugins.names("policies") if name not in LEFT_OUT]
    settings: dict[str, Any] = BENCHMARK.stored().get("settings", {})
    cache_folder().mkdir(parents=True, exist_ok=True)
    try:
        for each in track(options.only, "settings", still=True):
            settings[each] = measure(each, policies, options.rounds)
            BENCHMARK.done(each)
            BENCHMARK.write({"settings": {name: settings[name] for name in SETTINGS if name in settings}})
    except BadInput as error:
        BENCHMARK.parser.error(str(error))


if __name__ == "__main__":
    main()
