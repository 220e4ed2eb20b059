"""Trust in the simulator: replays of real runs, predictions of them, and the order of policies.

A setting is a model of random weights, a machine, a budget and a batch. In each, every policy that fits runs several
times, in turn with the others, and is simulated. Runs during which other processes took more than a tenth of a core are
done again, up to twice as many. Settings `disk-...` run on this machine, weights coming from its disk; the simulation
uses a calibration made in turn with the runs, since a shared machine's speed drifts by more than a prediction may be
off. It sees neither models nor policies nor budgets. With coded weights, it takes the choices of experts from a run:
single sequences of a random model choose the same ones again and again. Settings `emulated-...` run on the emulated
accelerator, a T4 with lower rates; their durations are those of the cost model that the simulation uses: they test
schedules, not costs.

Three things come of it:

* replays: each measured run's graph and durations go through the virtual clock, which finds the start times anew. How
  far the time that it comes to is from the measured one, loading left out.
* predictions, on the disk: whether the time of the decode steps is within 10 % and inside the band that the prediction
  has, and the busy time of each lane in them within 15 %, in medians over the runs. By coded weights: whether the time
  of the decode steps is within 15 %.
* ranking: pairs of schedules whose measured medians are further apart than their interquartile ranges together; how
  many of them the simulator puts in the same order; and how much slower than the fastest the schedule is that the
  simulator would choose. Policies with the same schedule count once, with all their runs.

Settings that are not measured stay in the result file. Each takes about five minutes where others leave the machine
alone.
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import msgspec

from benchmarks.fidelity._ranking import Times, distinct, ranking, ranks
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of, at_most
from benchmarks.record.tables import across, markdown, shown, table_of
from benchmarks.shared.in_turn import InTurn, Run, calibrate_in_turn
from moesched import plugins
from moesched.analysis.replayed_run import replay_recording, without_loading
from moesched.errors import BadInput
from moesched.machines import Machine, Tier, load_machine
from moesched.machines.local import local_machine
from moesched.machines.staging import staged
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.coded_models import coded_as
from moesched.models.config import DType, ModelConfig
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.planner.uncertainty import Figures, uncertainty
from moesched.requests.batch import split_batch
from moesched.routing.observed import ObservedRouting
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.runs.simulation import simulate
from moesched.seams import Observer, Policy
from moesched.steps.plan import Plan
from moesched.system.cache import cache_folder
from moesched.tasks import Task
from moesched.trace import Recorder, Recording

SLOWED, HOST_SLOWED, LAUNCH_SLOWED = 100, 25, 40
"""By how much the emulated machine is slower than a T4: its rates, its host's besides, and the start of anything.

The last keeps time from being dilated a hundred times, since starting a product takes this machine some 100 µs.
"""
LEFT_OUT = ("adversarial", "ep_naive", "ep_busy_full", "ep_router_aided", "ep_balanced")
"""No schedule, and schedules for several nodes, which on one are what `resident` is."""
MEASURES = ("decode", "total")
EMULATED = "moesched.devices.emulated.device:EmulatedDevice"
LANE = "lane "
"""Before the name of a lane, in a run's figures."""
DECODE_BAR, LANE_BAR, CODED_BAR = 10.0, 15.0, 15.0
"""Percent."""


class Case(NamedTuple):
    """A policy with room for a share of the weights, and a number of requests."""

    policy: str
    share: float
    batch_size: int


class Setting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setting in which policies are compared; the file of settings explains the fields."""

    shape: dict[str, Any]
    dtype: DType
    share: float | dict[str, float]
    batch_size: int | list[int]
    micro_batch_size: int
    new_tokens: int
    prompts: tuple[int, int]
    weights: str = ""

    @property
    def config(self) -> ModelConfig:
        """The model."""
        config = SHAPES["mixtral-0.8b"].varied(**self.shape)
        return coded_as(config, self.weights) if self.weights else config

    def cases(self, policies: Sequence[str]) -> list[Case]:
        """Every policy with every batch size; only those policies that have a share of their own, where any has."""
        shares = self.share if isinstance(self.share, dict) else dict.fromkeys(policies, self.share)
        return [Case(name, share, size) for name, share in shares.items() for size in self.batch_sizes]

    @property
    def batch_sizes(self) -> list[int]:
        """Numbers of requests."""
        return self.batch_size if isinstance(self.batch_size, list) else [self.batch_size]

    def name_of(self, case: Case) -> str:
        """The name of a case in the result file."""
        return case.policy if isinstance(self.batch_size, int) else f"{case.policy}, batch {case.batch_size}"


SETTINGS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, Setting])
CODED = [name for name, setting in SETTINGS.items() if setting.weights]


class BusyLanes:
    """An observer of the seconds that each lane is busy in decode steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def ended(self, task: Task) -> None:
        """Add a task's time."""
        if task.phase == "decode":
            self.seconds[f"{LANE}{task.lane.name}"] += (task.end - task.start) / 1e9


class Bench:
    """One setting: its model, the machine that it runs on, its requests."""

    def __init__(self, name: str, folder: Path) -> None:
        self.setting = setting = SETTINGS[name]
        self.emulated = name.startswith("emulated")
        self.machine = slow_t4() if self.emulated else local_machine()
        model = write_random_model(setting.config, folder / setting.config.name, dtype=setting.dtype)
        self.checkpoint: Checkpoint = open_checkpoint(model)
        self.layout: WeightLayout = weight_layout(self.checkpoint.config, setting.dtype)
        chance = random.Random(1)
        self.prompts = [
            [chance.randrange(setting.config.vocabulary) for _ in range(chance.randrange(*setting.prompts))]
            for _ in range(max(setting.batch_sizes))
        ]
        self._routing: dict[Case, ObservedRouting] = {}

    def plan(self, case: Case, device: Any, machine: Machine) -> tuple[Plan, Policy]:
        """A policy made anew, and its plan.

        Raises:
            BadInput: the plan does not fit.
        """
        weights = self.layout.globals_bytes + sum(map(device.slot_bytes, self.layout.pages))
        batch = split_batch(
            [len(prompt) for prompt in self.prompts[: case.batch_size]],
            self.setting.new_tokens,
            self.setting.micro_batch_size,
        )
        policy = plugins.make_policy(case.policy)
        budgets = {machine.accelerator.memory: int(case.share * weights)}
        return plan_run(machine, self.layout, batch, policy, budgets, device.slot_bytes), policy

    def device(self) -> Any:
        """Made anew; the run closes it."""
        gc.collect()  # what the run before left, weights and all, in cycles
        name = EMULATED if self.emulated else "torch"
        return plugins.find("devices", name)(self.checkpoint, self.layout)

    def measure(self, case: Case) -> dict[str, float]:
        """One run and its replay, in seconds."""
        device = self.device()
        plan, policy = self.plan(case, device, self.machine)
        recorder, lanes = Recorder(), BusyLanes()
        observers: list[Observer] = [lanes]
        if self.setting.weights:
            self._routing[case] = ObservedRouting(self.setting.new_tokens)
            observers.append(self._routing[case])
        prompts = self.prompts[: case.batch_size]
        report = run(plan, policy, device, prompts, recorder=recorder, observers=observers)
        recording = without_loading(recorder.recording())
        return {
            **times(report.step_seconds),
            **lanes.seconds,
            "recorded": (recording.end - recording.start) / 1e9,
            "replayed": _seconds_of(replay_recording(recording, handovers=True)),
            "replayed bare": replay_recording(recording).end / 1e9,
            "wall": report.wall_seconds,
        }

    def predict(self, case: Case, machine: Machine) -> dict[str, float]:
        """The run on the virtual clock, in seconds; of plain weights on the disk with the band of the decode steps."""
        device, lanes = self.device(), BusyLanes()
        report = simulate(
            *self.plan(case, device, machine), observers=[lanes], routing=self._routing.get(case)
        )
        found = {**times(report.step_seconds), **lanes.seconds}
        if not self.emulated and not self.setting.weights:
            steps = report.step_seconds[1:]
            expected = Figures(report.throughput_tokens_per_second, mean(steps), report.prefill_seconds)
            band = uncertainty(lambda: [Rank(*self.plan(case, device, machine))], expected).band
            low, _, high = band["decode_step_seconds"]
            found |= {"low": low * len(steps), "high": high * len(steps)}
        return found


def _seconds_of(recording: Recording) -> float:
    """From the first task's start to the last one's end."""
    return (recording.end - min(each.start for each in recording.slices)) / 1e9


def times(step_seconds: Sequence[float]) -> dict[str, float]:
    """Seconds to rank by."""
    return {"decode": sum(step_seconds[1:]), "total": sum(step_seconds)}


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
        in_turn = InTurn({name: partial(bench.measure, cases[name]) for name in fit}, repeats)
        machine = bench.machine if bench.emulated else calibrate_in_turn(in_turn, repeats)
        taken = in_turn.up_to(2 * repeats)
        policies = [policy_result(name, taken[name], bench.predict(cases[name], machine)) for name in fit]
    runs = [each for done in taken.values() for each in done]
    return {
        **described(bench),
        "repeats": repeats,
        "most_other_cores": round(max(each.others for each in runs), 2),
        "wall_seconds": round(sum(each.figures["wall"] for each in runs), 1),
        "left_out": left_out,
        "policies": [{key: each[key] for key in each if key != "runs"} for each in policies],
        **({} if bench.setting.weights else {"ranking": rankings(policies)}),
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


def policy_result(name: str, runs: Sequence[Run], predicted: Mapping[str, float]) -> dict[str, Any]:
    """A policy's runs, its prediction and its replays."""
    found = {key: [each.figures[key] for each in runs] for key in runs[0].figures}
    replay, bare = (
        round(
            median(percent(ours, theirs) for ours, theirs in zip(found[key], found["recorded"], strict=True)),
            3,
        )
        for key in ("replayed", "replayed bare")
    )
    sides = {each: Times(found[each], predicted[each]) for each in MEASURES}
    result = {
        "policy": name,
        "measured": {each: side.median for each, side in sides.items()},
        "spread": {each: side.spread for each, side in sides.items()},
        "predicted": {each: side.predicted for each, side in sides.items()},
        "error_percent": {each: percent(side.predicted, side.median) for each, side in sides.items()},
        "runs": {each: list(side.measured) for each, side in sides.items()},
        "replay_error_percent": replay,
        "bare_replay_error_percent": bare,
    }
    if "low" in predicted:
        result["inside"] = predicted["low"] <= sides["decode"].median <= predicted["high"]
        result["lane_error_percent"] = {
            key.removeprefix(LANE): percent(predicted[key], median(found[key]))
            for key in found
            if key.startswith(LANE) and key in predicted
        }
    return result


def percent(value: float, of: float) -> float:
    """A relative difference."""
    return round(100 * (value / of - 1), 3)


def slow_t4() -> Machine:
    """The shipped T4, staged, with rates that are to small models what a T4's are to large ones.

    Its host is slower still, so that attention over a few tokens takes what attention over many takes there.
    """
    t4 = staged(load_machine("t4"), "16GB", ring=False)

    def slower(memory: str) -> float:
        return SLOWED * HOST_SLOWED if memory == "host" else SLOWED

    return msgspec.structs.replace(
        t4,
        name="slow-t4",
        description=f"t4 with rates {SLOWED} times lower, its host's {SLOWED * HOST_SLOWED} times",
        processors={
            name: msgspec.structs.replace(
                each,
                flops={dtype: rate / slower(each.memory) for dtype, rate in each.flops.items()},
                launch_seconds=each.launch_seconds * LAUNCH_SLOWED,
            )
            for name, each in t4.processors.items()
        },
        memories={
            name: Tier(capacity=each.capacity, bandwidth=each.bandwidth / slower(name))
            for name, each in t4.memories.items()
        },
        links=[
            msgspec.structs.replace(
                each, bandwidth=each.bandwidth / SLOWED, latency=each.latency * LAUNCH_SLOWED
            )
            for each in t4.links
        ],
    )


def claims(result: Result) -> Iterator[Claim]:
    """Replays, predictions on the disk, and rankings, those on the emulated accelerator apart."""
    settings = result["settings"]
    errors = [abs(each["replay_error_percent"]) for one in settings.values() for each in one["policies"]]
    yield at_most("replay of a real run against its time, worst policy", max(errors), 1.0, "{:.2f} %")
    told = [each for one in settings.values() for each in one["policies"] if "inside" in each]
    if told:
        near = sum(abs(each["error_percent"]["decode"]) <= DECODE_BAR for each in told)
        yield all_of("unseen runs whose decode time is predicted within 10 %", near, len(told))
        inside = sum(each["inside"] for each in told)
        yield all_of("unseen runs whose decode time is inside its band", inside, len(told))
        lanes = sum(abs(worst_lane(each)[1]) <= LANE_BAR for each in told)
        yield all_of("unseen runs whose lanes are all within 15 %", lanes, len(told))
    coded = [each for name in CODED for each in settings.get(name, {"policies": ()})["policies"]]
    if coded:
        near = sum(abs(each["error_percent"]["decode"]) <= CODED_BAR for each in coded)
        yield all_of("runs by coded weights whose decode time is predicted within 15 %", near, len(coded))
    for place, words in (("disk", "real disk"), ("emulated", "emulated, durations from the cost model")):
        if there := [
            one["ranking"] for name, one in settings.items() if name.startswith(place) and "ranking" in one
        ]:
            yield from _order(words, there)


def _order(words: str, there: Sequence[Mapping[str, Any]]) -> Iterator[Claim]:
    """The worse one of the two measures."""
    pairs = {each: sum(one[each]["pairs_beyond_noise"] for one in there) for each in MEASURES}
    right = {each: sum(one[each]["concordant"] for one in there) for each in MEASURES}
    share, count = min(
        (100 * right[each] / pairs[each] if pairs[each] else 100.0, pairs[each]) for each in MEASURES
    )
    said = f"{share:.1f} % of {count} pairs"
    yield Claim(f"distinct schedules predicted in their order ({words})", said, "≥ 95 %", share >= 95)
    regret = max(one[each]["regret_percent"] for one in there for each in MEASURES)
    yield at_most(f"regret of the predicted choice, worst setting ({words})", regret, 3.0, "{:.1f} %")


def worst_lane(policy: Mapping[str, Any]) -> tuple[str, float]:
    """The lane whose busy time is off the most, and its error in percent."""
    errors: dict[str, float] = policy["lane_error_percent"]
    return max(errors.items(), key=lambda each: abs(each[1]))


SETTING = {
    "setting": "{setting}",
    "model": "{model}",
    "machine": "{machine}",
    "room for weights": "{share_of_weights:.0%}",
    "batch": "{batch_size}",
    "micro-batch": "{micro_batch_size}",
    "new tokens": "{new_tokens}",
    "left out": "{left out}",
}
PREDICTION = {
    "setting": "{setting}",
    "policy": "{policy}",
    "decode measured, s": "{measured[decode]:.3f}",
    "predicted, s": "{predicted[decode]:.3f}",
    "error": "{error_percent[decode]:+.1f} %",
    "inside its band": "{band}",
    "lane that is off the most": "{worst}",
}
CODED_PREDICTION = {
    "weights": "{weights}",
    "policy": "{policy}",
    "decode measured, s": "{measured[decode]:.3f}",
    "predicted, s": "{predicted[decode]:.3f}",
    "error": "{error_percent[decode]:+.1f} %",
}


def tables(result: Result) -> dict[str, str]:
    """The tables of docs/fidelity.md."""
    settings = result["settings"]
    named = [{**each, "setting": name} for name, each in settings.items() if name not in CODED]
    coded = [
        {**each, "weights": SETTINGS[name].weights}
        for name in CODED
        for each in settings.get(name, {"policies": ()})["policies"]
    ]
    policies = [{**each, "setting": one["setting"]} for one in named for each in one["policies"]]
    told = [
        {**each, "band": shown(each["inside"]), "worst": "{} {:+.1f} %".format(*worst_lane(each))}
        for each in policies
        if "inside" in each
    ]
    bars = [[each.words, each.figure, each.bar, each.reached] for each in claims(result)]
    return {
        "bars": markdown(["measure", "value", "bar", "reached"], bars),
        "settings": table_of(({**each, "left out": ", ".join(each["left_out"])} for each in named), SETTING),
        "replays": across(policies, ["setting"], "{policy}", "{replay_error_percent:+.2f}"),
        "bare_replays": across(policies, ["setting"], "{policy}", "{bare_replay_error_percent:+.2f}"),
        "predictions": table_of(told, PREDICTION),
        "coded": table_of(coded, CODED_PREDICTION),
        "ranks": ranks(named),
    }


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    tables=tables,
    parts=SETTINGS,
    rounds=5,
    rounds_help="undisturbed runs of each policy",
    keeps_parts=True,
    replaces=("prediction",),
)
BENCHMARK.parser.add_argument("--policies", nargs="+", metavar="NAME", help="policies to compare")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the settings; each joins those of earlier runs in the result at once."""
    options = BENCHMARK.parse(arguments)
    policies = options.policies or [name for name in plugins.names("policies") if name not in LEFT_OUT]
    settings: dict[str, Any] = BENCHMARK.stored().get("settings", {})
    cache_folder().mkdir(parents=True, exist_ok=True)
    try:
        for each in track(options.only, "settings", still=True):
            settings[each] = measure(each, policies, options.rounds)
            BENCHMARK.write({"settings": {name: settings[name] for name in SETTINGS if name in settings}})
    except BadInput as error:
        BENCHMARK.parser.error(str(error))


if __name__ == "__main__":
    main()
