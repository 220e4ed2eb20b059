"""Predicted against measured: models, policies and budgets that the calibration never saw, on this machine.

The machine is calibrated once, unless a machine file is given; the calibration sees no model, policy or budget of
these cases. Each case runs once without being counted, since the first product of every size is prepared then, and then
in rounds, in turn with the other cases and with the parts of the calibration: a shared machine's speed drifts by
more than a prediction may be off, so that both must see the same minutes of it. Each case is predicted on the virtual
clock. Runs during which other processes took more than a tenth of a core are done again, up to MOST_RUNS of a case;
what they took is in the result. The models are random ones, written to the cache folder once.

The cases are those of models with 8, 16 and 64 experts under four policies. What is held to a bar, in medians over the
runs:

* the time of the decode steps: within 10 %, and inside the band that the prediction has;
* the busy time of each lane in them: within 15 %.

Other figures, prefill and the mean task of each kind, say where an error comes from. It takes about ten minutes. Cases
that are not measured stay in the result file. With `--only`, give a machine file that was calibrated just before, the
same for all.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator, Sequence
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

import msgspec

from benchmarks.record.benchmark import Benchmark, progress
from benchmarks.record.claims import Claim, Result, all_of
from benchmarks.record.tables import shown, table_of
from benchmarks.shared.in_turn import Figures, InTurn, Run, calibrate_in_turn
from moesched import plugins
from moesched.machines import Machine, load_machine
from moesched.machines.local import local_machine
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import DType, ModelConfig
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.planner.uncertainty import Figures as BandFigures
from moesched.planner.uncertainty import uncertainty
from moesched.requests.batch import Batch, split_batch
from moesched.runs.hardware import run
from moesched.runs.outcome import Report
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.runs.simulation import simulate
from moesched.steps.plan import Plan
from moesched.system.cache import cache_folder
from moesched.tasks import Task

MOST_RUNS = 18
BAR_PERCENT = 10.0
LANE_BAR_PERCENT = 15.0
DECODE, LANE = "decode", "decode lane "
DTYPE: DType = "bfloat16"

MIXTRAL = SHAPES["mixtral-0.8b"]
MODELS: dict[str, ModelConfig] = {
    shape.name: shape
    for shape in (
        MIXTRAL,
        MIXTRAL.varied(
            name="sixteen-experts",
            layers=6,
            hidden=896,
            intermediate=1280,
            heads=14,
            kv_heads=2,
            experts=16,
            top_k=4,
            vocabulary=8192,
        ),
        MIXTRAL.varied(
            name="sixty-four-experts",
            layers=6,
            hidden=768,
            intermediate=384,
            heads=12,
            kv_heads=4,
            experts=64,
            top_k=8,
            vocabulary=8192,
        ),
    )
}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    budget_share: of the weights' bytes, as fast memory's budget; None for all there is.
    """

    model: str
    policy: str
    batch_size: int
    micro_batch_size: int
    budget_share: float | None = None
    prompts: tuple[int, int] = (4, 12)
    new_tokens: int = 8

    @property
    def title(self) -> str:
        """The case in a few words."""
        budget = "all memory" if self.budget_share is None else f"{100 * self.budget_share:.0f} % as memory"
        return f"{self.model}, {self.policy}, {self.batch_size} by {self.micro_batch_size}, {budget}"


SIZES = {"mixtral-0.8b": (16, 8, 0.4), "sixteen-experts": (24, 8, 0.5), "sixty-four-experts": (12, 4, 0.5)}
"""Requests, those of a micro-batch, and the share of the weights that memory has room for."""


def cases_of(model: str) -> list[Case]:
    """The cases of a model: weights from the disk by pages, by layers and by experts, and all weights in memory."""
    requests, micro_batch, share = SIZES[model]
    return [
        Case(
            model=model,
            policy="cgopipe",
            batch_size=requests,
            micro_batch_size=micro_batch,
            budget_share=share,
        ),
        Case(
            model=model,
            policy="layer_streaming",
            batch_size=requests // 2,
            micro_batch_size=requests // 2,
            budget_share=share,
        ),
        Case(
            model=model,
            policy="expert_streaming",
            batch_size=micro_batch,
            micro_batch_size=micro_batch,
            budget_share=0.6,
        ),
        Case(
            model=model,
            policy="fastdecode",
            batch_size=requests,
            micro_batch_size=micro_batch,
            prompts=(60, 100),
        ),
    ]


CASES = [case for model in SIZES for case in cases_of(model)]


class Times:
    """Durations of tasks, by phase and verb and, in decode steps, by lane, and when the first one started."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.lanes: dict[str, float] = {}
        self.first = float("inf")

    def ended(self, task: Task) -> None:
        """Note a task, unless it loads what stays."""
        phase = task.phase
        if phase is None:
            return
        seconds = (task.end - task.start) / 1e9
        self.first = min(self.first, task.start / 1e9)
        self.seconds.setdefault(f"{phase} {task.verb}", []).append(seconds)
        if phase == "decode":
            self.lanes[task.lane.name] = self.lanes.get(task.lane.name, 0.0) + seconds


def figures(report: Report, times: Times) -> Figures:
    """Figures to compare, in seconds: the whole, the phases, the lanes in decode steps, the mean task of each kind."""
    prefill, *steps = report.step_seconds
    prefill += report.load_seconds - times.first  # starting the driver is nobody's work
    return {
        "total": prefill + sum(steps),
        "prefill": prefill,
        DECODE: sum(steps),
        **{f"{LANE}{name}": seconds for name, seconds in sorted(times.lanes.items())},
        **{name: mean(seconds) for name, seconds in sorted(times.seconds.items())},
    }


class Prediction(NamedTuple):
    """Predicted figures, and the band of the decode steps' time in seconds."""

    figures: Figures
    low: float
    high: float


class Setting:
    """A case with all that its runs have in common."""

    def __init__(self, case: Case) -> None:
        self.case = case
        directory = cache_folder() / case.model
        if not directory.exists():
            write_random_model(MODELS[case.model], directory, dtype=DTYPE)
        self.directory = directory
        self.layout: WeightLayout = weight_layout(MODELS[case.model], DTYPE)
        chance = random.Random(1)
        self.prompts = [
            [chance.randrange(MODELS[case.model].vocabulary) for _ in range(chance.randint(*case.prompts))]
            for _ in range(case.batch_size)
        ]

    def _plan(self, machine: Machine, slot_bytes: Any = None) -> tuple[Plan, Any]:
        """A fresh policy and its plan."""
        case = self.case
        lengths = [len(prompt) for prompt in self.prompts]
        batch: Batch = split_batch(lengths, case.new_tokens, case.micro_batch_size)
        budgets = {}
        if case.budget_share is not None:
            weights = self.layout.globals_bytes + sum(page.nbytes for page in self.layout.pages)
            budgets[machine.accelerator.memory] = int(case.budget_share * weights)
        policy = plugins.make_policy(case.policy)
        return plan_run(machine, self.layout, batch, policy, budgets, slot_bytes), policy

    def measure(self) -> Figures:
        """One run on the device."""
        gc.collect()  # what the run before left, weights and all, in cycles
        checkpoint = open_checkpoint(self.directory)
        device = plugins.find("devices", "torch")(checkpoint, self.layout)
        plan, policy = self._plan(local_machine(), device.slot_bytes)
        times = Times()
        return figures(run(plan, policy, device, self.prompts, observers=[times]), times)

    def predict(self, machine: Machine) -> Prediction:
        """The same run on the virtual clock."""
        plan, policy = self._plan(machine)
        times = Times()
        report = simulate(plan, policy, observers=[times])
        steps = report.step_seconds[1:]
        expected = BandFigures(report.throughput_tokens_per_second, mean(steps), report.prefill_seconds)
        found = uncertainty(lambda: [Rank(*self._plan(machine))], expected)
        low, _, high = found.band["decode_step_seconds"]
        return Prediction(figures(report, times), low * len(steps), high * len(steps))


def summary(case: Case, said: Prediction, runs: Sequence[Run]) -> dict[str, Any]:
    """A case as the result file has it."""
    predicted = said.figures
    measured = {name: median(run.figures[name] for run in runs) for name in runs[0].figures}
    errors = {
        name: round(100 * (predicted[name] / seconds - 1), 1)
        for name, seconds in measured.items()
        if seconds and name in predicted
    }
    decodes = [run.figures[DECODE] for run in runs]
    first, _, third = quantiles(decodes, n=4, method="inclusive")
    lanes = [error for name, error in errors.items() if name.startswith(LANE)]
    return {
        **msgspec.to_builtins(case),
        "other_cores": [round(run.others, 2) for run in runs],
        "measured_decodes": decodes,
        "interquartile_range_percent": round(100 * (third - first) / measured[DECODE], 1),
        "bar_percent": BAR_PERCENT,
        "decode_holds": abs(errors[DECODE]) <= BAR_PERCENT,
        "band": [said.low, said.high],
        "inside": said.low <= measured[DECODE] <= said.high,
        "lanes_hold": all(abs(error) <= LANE_BAR_PERCENT for error in lanes),
        "measured": measured,
        "predicted": predicted,
        "error_percent": errors,
    }


def claims(result: Result) -> Iterator[Claim]:
    """Predicted against measured."""
    if "decode_inside_band" not in result:  # other runs, held to other bars
        return
    cases = result["cases"]
    yield all_of("unseen runs whose decode time is predicted within 10 %", result["decode_within_bar"], cases)
    yield all_of("unseen runs whose decode time is inside its band", result["decode_inside_band"], cases)
    yield all_of("unseen runs whose lanes are all within 15 %", result["lanes_within_bar"], cases)


PREDICTIONS = {
    "model": "{model}",
    "policy": "{policy}",
    "batch": "{batch_size} by {micro_batch_size}",
    "decode measured, s": "{measured[decode]:.3f}",
    "predicted, s": "{predicted[decode]:.3f}",
    "error": "{error_percent[decode]:+.1f} %",
    "bar": "{bar_percent:.0f} %",
    "holds": "{holds}",
    "inside its band": "{inside}",
    "lane that is off the most": "{worst}",
}


def predictions(result: Result) -> str:
    """Decode time and lanes of runs that were never seen."""
    rows = []
    for each in result["runs"]:
        lanes = {k.removeprefix("decode lane "): v for k, v in each["error_percent"].items() if "lane" in k}
        if "decode_holds" in each:
            worst = max(lanes, key=lambda name: abs(lanes[name]))
            told = {
                "holds": shown(each["decode_holds"]),
                "inside": shown(each["inside"]) if "inside" in each else "",
                "worst": f"{worst} {lanes[worst]:+.1f} %",
            }
            rows.append({**each, **told})
    return table_of(rows, PREDICTIONS)


def tables(result: Result) -> dict[str, str]:
    """The table of docs/fidelity.md."""
    return {"predictions": predictions(result)}


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    packages=("torch",),
    claims=claims,
    tables=tables,
    parts=[case.title for case in CASES],
    rounds=9,
    rounds_help="undisturbed runs of each case",
    keeps_parts=True,
)
BENCHMARK.parser.add_argument("--machine", help="a calibrated machine file; by default one is made")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all cases, print the tables, write the JSON."""
    options = BENCHMARK.parse(arguments)
    known = {msgspec.convert(each, Case): each for each in BENCHMARK.stored().get("runs", [])}
    cases = [case for case in CASES if case.title in options.only]
    settings = [Setting(case) for case in cases]
    for setting in settings:
        setting.measure()
    in_turn = InTurn({setting.case: setting.measure for setting in settings}, options.rounds, show)
    machine = load_machine(options.machine) if options.machine else calibrate_in_turn(in_turn, options.rounds)
    runs = in_turn.up_to(MOST_RUNS)
    predicted = [setting.predict(machine) for setting in settings]
    summaries = [summary(case, said, runs[case]) for case, said in zip(cases, predicted, strict=True)]
    known |= dict(zip(cases, summaries, strict=True))
    summaries = [known[case] for case in CASES if case in known]
    held = sum(each["decode_holds"] for each in summaries)
    inside = sum(each["inside"] for each in summaries)
    lanes = sum(each["lanes_hold"] for each in summaries)
    return BENCHMARK.write(
        {
            "calibration": {
                "name": machine.name,
                "description": machine.description,
                "in_turn_with_the_runs": options.machine is None,
            },
            "repeats": options.rounds,
            "decode_within_bar": held,
            "decode_inside_band": inside,
            "lanes_within_bar": lanes,
            "cases": len(summaries),
            "largest_decode_error_percent": max(abs(each["error_percent"][DECODE]) for each in summaries),
            "runs": summaries,
        }
    )


def show(case: Case, run: Run) -> None:
    """Print a run as it ends."""
    progress.print(f"{case.title}: {run.figures[DECODE]:.3f} s, others on {run.others:.2f} cores")


if __name__ == "__main__":
    sys.exit(main())
