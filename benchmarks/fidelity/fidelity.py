"""Measure how far the simulator can be trusted: replays of real runs, and simulated against measured order of policies.

A setting is a model of random weights, a machine, a budget and a batch. In each, every policy that fits runs several
times, in turn with the others, and is simulated. Runs during which other
processes took more than a tenth of a core are done again, up to twice as many runs. Settings `disk-...` run on
this machine, weights coming from its disk; the simulation uses a calibration made in turn with the runs, which sees
neither models nor policies nor budgets. Settings `emulated-...` run on the emulated accelerator, a T4 with lower rates.

Two things come of it:

* replays: each measured run's graph and durations go through the virtual clock, which finds the start times anew. How
  far the time that it comes to is from the measured one, loading left out.
* ranking: pairs of schedules whose measured medians are further apart than their interquartile ranges together; how
  many of them the simulator puts in the same order; and how much slower than the fastest the schedule is that the
  simulator would choose. Policies with the same schedule count once, with all their runs.

Emulated runs take their durations from the cost model that the simulation uses: they test schedules, not costs.

Settings that are not measured stay in the result file.
Each takes about five minutes where others leave the machine alone.
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.fidelity._ranking import Times, distinct, ranking, ranks
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most
from benchmarks.record.tables import across, markdown, table_of
from benchmarks.shared.in_turn import InTurn, calibrate_in_turn
from moesched import plugins
from moesched.analysis.replayed_run import replay_recording, without_loading
from moesched.errors import BadInput
from moesched.machines import Machine, Tier, load_machine
from moesched.machines.local import local_machine
from moesched.machines.staging import staged
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.config import DType, ModelConfig
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.steps.plan import Plan
from moesched.system.cache import cache_folder
from moesched.trace import Recorder, Recording

SLOWED, HOST_SLOWED, LAUNCH_SLOWED = 100, 25, 40
"""By how much the emulated machine is slower than a T4: its rates, its host's besides, and the start of anything.

The last keeps time from being dilated a hundred times, since starting a product takes this machine some 100 µs.
"""
LEFT_OUT = ("adversarial", "ep_naive", "ep_busy_full", "ep_router_aided", "ep_balanced")
"""No schedule, and schedules for several nodes, which on one are what `resident` is."""
MEASURES = ("decode", "total")
PLACES = ("disk", "emulated")
"""Settings begin with one of these."""
EMULATED = "moesched.devices.emulated.device:EmulatedDevice"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Setting in which policies are compared.

    Attributes:
        share: of the weights, that fast memory has room for; of all that a policy wants where it is over 1.
    """

    shape: ModelConfig
    dtype: DType
    emulated: bool
    share: float
    batch_size: int
    micro_batch_size: int
    new_tokens: int
    prompts: tuple[int, int]


def shape(name: str, **sizes: Any) -> ModelConfig:
    """A Mixtral of other sizes."""
    return SHAPES["mixtral-0.8b"].varied(name=name, **sizes)


CUT = shape("mixtral-0.8b-4-layers", layers=4)
SLIM = shape("mixtral-slim", layers=6, hidden=768, intermediate=2048, heads=12, vocabulary=8000)
MANY = shape(
    "mixtral-16-experts", layers=5, hidden=768, intermediate=1536, heads=12, experts=16, vocabulary=8000
)
SMALL = shape("mixtral-small", layers=6, hidden=192, intermediate=448, heads=4, head_dim=48, vocabulary=512)
WIDE = shape("mixtral-wide", layers=5, hidden=128, intermediate=896, heads=4, head_dim=32, vocabulary=512)


def on_disk(config: ModelConfig, dtype: DType, share: float, sizes: tuple[int, int, int]) -> Setting:
    """Sizes are those of the batch and its micro-batches, and new tokens."""
    batch, micro_batch, tokens = sizes
    return Setting(
        shape=config, dtype=dtype, emulated=False, share=share, batch_size=batch, micro_batch_size=micro_batch,
        new_tokens=tokens, prompts=(4, 13),
    )  # fmt: skip


def emulated(config: ModelConfig, share: float, sizes: tuple[int, int, int]) -> Setting:
    """The same on the emulated accelerator."""
    batch, micro_batch, tokens = sizes
    return Setting(
        shape=config, dtype="float32", emulated=True, share=share, batch_size=batch, micro_batch_size=micro_batch,
        new_tokens=tokens, prompts=(16, 33),
    )  # fmt: skip


SETTINGS = {
    "disk-all-fits": on_disk(CUT, "bfloat16", 2.0, (8, 8, 20)),
    "disk-tight": on_disk(SLIM, "bfloat16", 0.6, (16, 8, 6)),
    "disk-float32": on_disk(MANY, "float32", 0.65, (16, 16, 4)),
    "emulated-roomy": emulated(SMALL, 0.75, (16, 4, 3)),
    "emulated-tight": emulated(SMALL, 0.45, (12, 4, 3)),
    "emulated-wide": emulated(WIDE, 0.6, (24, 8, 3)),
}


class Bench:
    """One setting: its model, the machine that it runs on, its requests."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting = setting
        self.machine = slow_t4() if setting.emulated else local_machine()
        model = write_random_model(setting.shape, folder / setting.shape.name, dtype=setting.dtype)
        self.checkpoint: Checkpoint = open_checkpoint(model)
        self.layout: WeightLayout = weight_layout(self.checkpoint.config, setting.dtype)
        chance = random.Random(1)
        self.prompts = [
            [chance.randrange(setting.shape.vocabulary) for _ in range(chance.randrange(*setting.prompts))]
            for _ in range(setting.batch_size)
        ]

    def plan(self, name: str, device: Any, machine: Machine) -> tuple[Plan, Any]:
        """A policy made anew, and its plan.

        Raises:
            BadInput: the plan does not fit.
        """
        weights = self.layout.globals_bytes + sum(map(device.slot_bytes, self.layout.pages))
        batch = split_batch(
            [len(prompt) for prompt in self.prompts], self.setting.new_tokens, self.setting.micro_batch_size
        )
        policy = plugins.make_policy(name)
        budgets = {machine.accelerator.memory: int(self.setting.share * weights)}
        return plan_run(machine, self.layout, batch, policy, budgets, device.slot_bytes), policy

    def device(self) -> Any:
        """Made anew; the run closes it."""
        gc.collect()  # what the run before left, weights and all, in cycles
        name = EMULATED if self.setting.emulated else "torch"
        return plugins.find("devices", name)(self.checkpoint, self.layout)

    def measure(self, name: str) -> dict[str, float]:
        """One run and its replay, in seconds."""
        device = self.device()
        plan, policy = self.plan(name, device, self.machine)
        recorder = Recorder()
        report = run(plan, policy, device, self.prompts, recorder=recorder)
        recording = without_loading(recorder.recording())
        return {
            **times(report.step_seconds),
            "recorded": (recording.end - recording.start) / 1e9,
            "replayed": _seconds_of(replay_recording(recording, handovers=True)),
            "replayed bare": replay_recording(recording).end / 1e9,
            "wall": report.wall_seconds,
        }

    def predict(self, name: str, machine: Machine) -> dict[str, float]:
        """The run on the virtual clock, in seconds."""
        return times(simulate(*self.plan(name, self.device(), machine)).step_seconds)


def _seconds_of(recording: Recording) -> float:
    """From the first task's start to the last one's end."""
    return (recording.end - min(each.start for each in recording.slices)) / 1e9


def times(step_seconds: Sequence[float]) -> dict[str, float]:
    """Seconds to rank by."""
    return {"decode": sum(step_seconds[1:]), "total": sum(step_seconds)}


def measure(setting: Setting, names: Sequence[str], repeats: int) -> dict[str, Any]:
    """All policies in a setting."""
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        bench = Bench(setting, Path(folder))
        for name in names:
            try:
                bench.plan(name, bench.device(), bench.machine)
            except BadInput as error:
                left_out[name] = str(error)
        fit = [name for name in names if name not in left_out]
        if not setting.emulated:  # the first run of a process prepares products, and is not counted
            bench.measure(fit[0])
        in_turn = InTurn({name: partial(bench.measure, name) for name in fit}, repeats)
        machine = bench.machine if setting.emulated else calibrate_in_turn(in_turn, repeats)
        taken = in_turn.up_to(2 * repeats)
        predicted = {name: bench.predict(name, machine) for name in fit}
    runs = {name: [each.figures for each in done] for name, done in taken.items()}
    policies = [policy_result(name, done, predicted[name]) for name, done in runs.items()]
    return {
        **described(setting),
        "repeats": repeats,
        "most_other_cores": round(max(each.others for done in taken.values() for each in done), 2),
        "wall_seconds": round(sum(each["wall"] for done in runs.values() for each in done), 1),
        "left_out": left_out,
        "policies": [{key: each[key] for key in each if key != "runs"} for each in policies],
        "ranking": rankings(policies),
    }


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


def described(setting: Setting) -> dict[str, Any]:
    """A setting as the result file has it."""
    config = setting.shape
    return {
        "model": f"{config.name}: {config.layers} layers, {config.hidden} / {config.routed.intermediate}, "
        f"{config.routed.experts} experts, {setting.dtype}",
        "machine": "emulated, a T4 with lower rates" if setting.emulated else "this one, weights on its disk",
        "share_of_weights": setting.share,
        "batch_size": setting.batch_size,
        "micro_batch_size": setting.micro_batch_size,
        "new_tokens": setting.new_tokens,
    }


def policy_result(
    name: str, runs: Sequence[Mapping[str, float]], predicted: Mapping[str, float]
) -> dict[str, Any]:
    """A policy's runs, its prediction and its replays."""
    errors, bare = (
        [100 * (each[replayed] / each["recorded"] - 1) for each in runs]
        for replayed in ("replayed", "replayed bare")
    )
    sides = {each: Times([one[each] for one in runs], predicted[each]) for each in MEASURES}
    return {
        "policy": name,
        "measured": {each: side.median for each, side in sides.items()},
        "spread": {each: side.spread for each, side in sides.items()},
        "predicted": {each: side.predicted for each, side in sides.items()},
        "error_percent": {
            each: round(100 * (side.predicted / side.median - 1), 2) for each, side in sides.items()
        },
        "runs": {each: list(side.measured) for each, side in sides.items()},
        "replay_error_percent": round(median(errors), 3),
        "bare_replay_error_percent": round(median(bare), 3),
    }


def summary(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The bars: replays over all settings, rankings apart for the real disk and for the emulated accelerator."""
    errors = [abs(each["replay_error_percent"]) for one in settings.values() for each in one["policies"]]
    worst = max(errors)
    bars: dict[str, Any] = {
        "replays": {"value": worst, "bar": "<= 1 % in every run", "reached": worst <= 1.0},
        "replays_median": {"value": median(errors), "of": len(errors)},
    }
    for place in PLACES:
        there = [one["ranking"] for name, one in settings.items() if name.startswith(place)]
        for each in MEASURES if there else ():
            bars |= ranking_bars(f"{place}_{{}}_{each}", [one[each] for one in there])
    return bars


def ranking_bars(name: str, ranked: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Share of pairs in order, and the worst regret."""
    pairs = sum(one["pairs_beyond_noise"] for one in ranked)
    concordant = sum(one["concordant"] for one in ranked)
    share = 100 * concordant / pairs if pairs else 100.0
    regret = max(one["regret_percent"] for one in ranked)
    beyond_noise = max(one["regret_beyond_noise_percent"] for one in ranked)
    return {
        name.format("concordant_percent"): {
            "value": round(share, 1), "of": pairs, "bar": ">= 95 %", "reached": share >= 95.0,
        },
        name.format("worst_regret_percent"): {"value": regret, "bar": "<= 3 %", "reached": regret <= 3.0},
        name.format("worst_regret_beyond_noise_percent"): {"value": beyond_noise},
    }  # fmt: skip


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
    """Replays and rankings."""
    summary = result["summary"]
    yield at_most(
        "replay of a real run against its time, worst policy", summary["replays"]["value"], 1.0, "{:.2f} %"
    )
    for place, words in (("disk", "real disk"), ("emulated", "emulated, durations from the cost model")):
        if f"{place}_concordant_percent_total" not in summary:
            continue
        pairs = [summary[f"{place}_concordant_percent_{each}"] for each in ("decode", "total")]
        worst = min(pairs, key=lambda pair: float(pair["value"]))
        said = f"{worst['value']:g} % of {worst['of']} pairs"
        yield Claim(
            f"distinct schedules predicted in their order ({words})", said, "≥ 95 %", worst["reached"]
        )
        regret = max(summary[f"{place}_worst_regret_percent_{each}"]["value"] for each in ("decode", "total"))
        yield at_most(f"regret of the predicted choice, worst setting ({words})", regret, 3.0, "{:.1f} %")


COLUMNS = {
    "setting": "{setting}",
    "model": "{model}",
    "machine": "{machine}",
    "room for weights": "{share_of_weights:.0%}",
    "batch": "{batch_size}",
    "micro-batch": "{micro_batch_size}",
    "new tokens": "{new_tokens}",
    "left out": "{left out}",
}


def bars(result: Result) -> str:
    """The figures of a benchmark that have a bar."""
    rows = [
        [
            name.replace("_", " "),
            f"{bar['value']:.2f}" + (f", of {bar['of']}" if "of" in bar else ""),
            bar.get("bar", ""),
            bar.get("reached"),
        ]
        for name, bar in result["summary"].items()
    ]
    return markdown(["measure", "value", "bar", "reached"], rows)


def of_settings(result: Result) -> Iterator[dict[str, Any]]:
    """The settings of the fidelity benchmark, with their names."""
    for name, setting in result["settings"].items():
        yield {**setting, "setting": name, "left out": ", ".join(setting["left_out"])}


def replays(result: Result, error: str) -> str:
    """The error of each policy's replays, setting by setting."""
    rows = [
        {"setting": setting["setting"], "policy": each["policy"], "error": each[error]}
        for setting in of_settings(result)
        for each in setting["policies"]
        if error in each
    ]
    return across(rows, ["setting"], "{policy}", "{error:+.2f}") if rows else ""


def tables(result: Result) -> dict[str, str]:
    """The tables of docs/fidelity.md."""
    return {
        "bars": bars(result),
        "settings": table_of(of_settings(result), COLUMNS),
        "replays": replays(result, "replay_error_percent"),
        "bare_replays": replays(result, "bare_replay_error_percent"),
        "ranks": ranks(of_settings(result)),
    }


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    packages=("torch",),
    claims=claims,
    tables=tables,
    parts=SETTINGS,
    rounds=5,
    rounds_help="undisturbed runs of each policy",
    keeps_parts=True,
)
BENCHMARK.parser.add_argument("--policies", nargs="+", metavar="NAME", help="policies to compare")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the settings, print the tables, write the JSON."""
    options = BENCHMARK.parse(arguments)
    policies = options.policies or [name for name in plugins.names("policies") if name not in LEFT_OUT]
    settings: dict[str, Any] = BENCHMARK.stored().get("settings", {})
    cache_folder().mkdir(parents=True, exist_ok=True)
    for each in track(options.only, "settings", still=True):
        settings[each] = measure(SETTINGS[each], policies, options.rounds)
        write(settings)


def write(settings: Mapping[str, Any]) -> None:
    """The settings that are there, in the order of `SETTINGS`; those that it has no more are dropped."""
    known = {each: settings[each] for each in SETTINGS if each in settings}
    BENCHMARK.write(
        {
            "noise": "a pair counts when its medians differ by more than its interquartile ranges together",
            "summary": summary(known),
            "settings": known,
        }
    )


if __name__ == "__main__":
    main()
