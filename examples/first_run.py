"""The first run: text from a small model, then three schedules measured on a larger one and predicted.

    make run

1. Two small Mixtrals that ship write text, with less memory than their weights need; one is a GGUF file.
2. A random Mixtral of 0.5 billion parameters is written once, and this machine is calibrated once.
3. Three policies run the model, one with all weights in memory and two with 55 % of them. The same policies run on the
   virtual clock, which knows only the calibration, and the two are compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import moesched
from moesched.units import format_bytes

HERE = Path(__file__).parent
TEXTS = (("tiny-mixtral", "cgopipe", "9MB"), ("tiny-mixtral-256.gguf", "expert_cache", "7MB"))
"""Models with their policies and memory."""
POLICIES = ("resident", "layer_streaming", "cgopipe")
FIGURES = {
    "prefill": ("prefill", "time"),
    "decode step": ("decode step", "time"),
    "computing": ("accelerator", "busy"),
    "reading weights": ("disk->host", "busy"),
    "peak memory": ("host", "peak"),
}
"""Columns of the results: rows of `moesched compare`, by name and quantity."""
LAYERS, BATCH, PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 5, 16, 16, 8, 3

Update = Callable[[int, int], None]

console = Console(width=None if sys.stdout.isatty() else 110)


class Printer(moesched.Listener):
    """Prints text as it is generated."""

    def generated(self, request: int, token: int, text: str) -> None:
        console.print(text, end="", highlight=False, markup=False, soft_wrap=True)

    def finished(self, request: int, text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    """Run all sections."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE.parent / "out", help="folder for models and traces")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the larger model")
    parser.add_argument("--share", type=float, default=0.55, help="share of its weights that fit into memory")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measured runs of each policy")
    parser.add_argument("--machine", type=Path, help="a machine file; by default this machine is calibrated")
    arguments = parser.parse_args()
    traces = arguments.out / "traces"
    traces.mkdir(parents=True, exist_ok=True)
    try:
        write_text(traces)
        model = write_model(arguments.out / "models", arguments.layers)
        machine = calibrate(arguments.machine or arguments.out / "machine.toml")
        compare_policies(model, machine, traces, int(arguments.share * weight_bytes(model)), arguments.rounds)
    except moesched.MoeschedError as error:
        sys.exit(f"first_run.py: {error}")
    suggest(traces)


def write_text(traces: Path) -> None:
    """Generate text while weights stream under a budget that is smaller than they are."""
    section(
        "1. Text",
        "You will see two tiny Mixtrals write text. The weights of the first are 13 MB, and may use 9 MB of memory. "
        "The second is a file of llama.cpp's format Q4_K_M: its 4 MB and 5 MB of workspace may use 7 MB. What does "
        "not fit is read from the disk again for every token.",
    )
    for model, policy, budget in TEXTS:
        prompt = "Return a new"
        console.print(prompt, style="bold", end="")
        report = moesched.run_model(
            HERE / model,
            [prompt],
            policy=policy,
            max_new_tokens=60,
            sampling=moesched.Sampling(temperature=0.7, top_p=0.9, seed=1),
            budgets={"host": budget},
            trace=traces / f"{Path(model).stem}.json",
            listener=Printer(),
        )
        conclude(
            f"{model} wrote {report.decode_tokens_per_second:.0f} tokens per second and never held more than "
            f"{format_bytes(report.peak_bytes['host'])}. The text would be the same with all weights in memory."
        )


def write_model(models: Path, layers: int) -> Path:
    """Write the larger model, once."""
    section(
        "2. A larger model",
        f"A Mixtral with {layers} layers and random weights is written, so that weights stream for longer.",
    )
    model = models / f"mixtral-0.8b-{layers}-layers"
    if not model.exists():
        models.mkdir(parents=True, exist_ok=True)
        with progress("writing the model") as update:
            moesched.write_random_model("mixtral-0.8b", model, seed=0, layers=layers, progress=update)
    conclude(f"{model} holds {format_bytes(weight_bytes(model))}. `make clean` removes it.")
    return model


def calibrate(file: Path) -> moesched.Machine:
    """Measure this machine, once."""
    section(
        "3. This machine",
        "The speed of memory, disk, products, attention and experts is measured on small models of its own, so that "
        "runs can be predicted. Other programs that run now make it less exact.",
    )
    if not file.exists():
        with progress("calibrating, about half a minute") as update:
            moesched.calibrate_machine(file, update)
    machine = moesched.load_machine(str(file))
    conclude(f"{machine.description}. The costs are in {file}; remove it to measure again.")
    return machine


def compare_policies(model: Path, machine: moesched.Machine, traces: Path, budget: int, rounds: int) -> None:
    """Measure the policies, predict them, and name the bottleneck of each."""
    section(
        "4. Three schedules, measured and predicted",
        f"Three policies generate {NEW_TOKENS} tokens for {BATCH} prompts: `resident` with all weights in memory, "
        f"`layer_streaming` and `cgopipe` with room for {format_bytes(budget)} of them. You will see how long each "
        f"takes (the median of {rounds} runs), what the virtual clock predicted, and how long the lanes were busy.",
    )
    shared = {name: sizes(None if name == "resident" else budget) for name in POLICIES}
    measured = measure(model, traces, shared, rounds)
    with console.status("predicting"):
        predicted = {name: predict(name, model, machine, traces, shared[name]) for name in POLICIES}
    console.print(results(traces))
    conclude(moesched.compare_runs([traces / f"{name}-measured.json" for name in POLICIES]).answer())
    worst = max(abs(total(predicted[name]) / total(measured[name]) - 1) for name in POLICIES)
    conclude(
        f"Predicted totals are within {worst:.0%} of the measured ones, although the calibration never saw this model."
    )


def measure(
    model: Path, traces: Path, shared: dict[str, dict[str, Any]], rounds: int
) -> dict[str, moesched.JobReport]:
    """Run the policies in turn on this machine; return the median run of each, and keep its trace."""
    runs: dict[str, list[tuple[moesched.JobReport, Path]]] = {name: [] for name in shared}
    with progress("measuring") as update:
        for number in range(rounds):
            for index, (name, options) in enumerate(shared.items()):
                update(number * len(shared) + index, rounds * len(shared))
                trace = traces / f"{name}-measured-{number}.json"
                report = moesched.run_model(model, prompts(), policy=name, trace=trace, **options)
                runs[name].append((report, trace))
        update(rounds * len(shared), rounds * len(shared))
    return {name: median(found, traces / f"{name}-measured.json") for name, found in runs.items()}


def median(runs: list[tuple[moesched.JobReport, Path]], file: Path) -> moesched.JobReport:
    """The median run, whose trace is moved to `file`; the other traces are removed."""
    report, trace = sorted(runs, key=lambda run: total(run[0]))[len(runs) // 2]
    trace.replace(file)
    for _, other in runs:
        other.unlink(missing_ok=True)
    return report


def predict(
    policy: str, model: Path, machine: moesched.Machine, traces: Path, shared: dict[str, Any]
) -> moesched.JobReport:
    """Run the same policy on the virtual clock."""
    others = dict(shared)
    new_tokens = others.pop("max_new_tokens")
    return moesched.simulate_model(
        model,
        machine=machine,
        policy=policy,
        workload=moesched.given_lengths([PROMPT_TOKENS] * BATCH, new_tokens),
        gen=new_tokens,
        trace=traces / f"{policy}-predicted.json",
        band=False,
        **others,
    )


def sizes(budget: int | None) -> dict[str, Any]:
    """Options that a measured run and its prediction have in common."""
    budgets = {} if budget is None else {"host": budget}
    return {"batch_size": BATCH, "micro_batch_size": BATCH, "max_new_tokens": NEW_TOKENS, "budgets": budgets}


def prompts() -> list[list[int]]:
    """Token ids, different in each prompt."""
    return [
        [(7919 * request + 31 * place) % 32000 for place in range(PROMPT_TOKENS)] for request in range(BATCH)
    ]


def total(report: moesched.JobReport) -> float:
    """Seconds of all steps."""
    return sum(report.step_seconds)


def results(traces: Path) -> Table:
    """Measured, predicted and the error below each other, policy by policy.

    Computing and reading weights are the times that these lanes were busy.
    """
    table = Table()
    for column in ("policy", "", *FIGURES):
        table.add_column(
            column, justify="left" if column in ("policy", "") else "right", no_wrap=column != ""
        )
    for name in POLICIES:
        compared = moesched.compare_runs(
            [traces / f"{name}-{clock}.json" for clock in ("measured", "predicted")]
        )
        rows = {(row[0], row[1]): row[2:] for row in compared.table()}
        measured, predicted, _, errors = zip(*(rows[figure] for figure in FIGURES.values()), strict=True)
        table.add_row(name, "measured", *measured)
        table.add_row("", "predicted", *predicted)
        table.add_row("", "error", *errors, end_section=True)
    return table


def suggest(traces: Path) -> None:
    """Name three things to try next."""
    section(
        "Try next", f"{traces} has a trace of each run; open one at https://ui.perfetto.dev to see its lanes."
    )
    measured, predicted = (shown(traces / f"cgopipe-{clock}.json") for clock in ("measured", "predicted"))
    moesched_command = shown(Path(sys.executable).parent / "moesched")
    for does, command in (
        ("why the prediction was off, kind by kind", f"compare {predicted} {measured}"),
        ("a paper's model on a GPU that you may not have", "plan --model mixtral-8x7b --machine t4"),
        ("a policy of your own, with its test", "new-policy my_policy"),
    ):
        console.print(
            f"{does}:\n    {moesched_command} {command}", highlight=False, markup=False, soft_wrap=True
        )


def section(title: str, sentence: str) -> None:
    """Print the heading and the purpose of a section."""
    console.print()
    console.rule(title)
    console.print(sentence, style="italic", highlight=False, markup=False)


def conclude(sentence: str) -> None:
    """Print the conclusion of a section."""
    console.print(sentence, style="green", highlight=False, markup=False, soft_wrap=True)


def shown(path: Path) -> str:
    """The shortest form of a path from the current folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def weight_bytes(model: Path) -> int:
    """Bytes of a model's files."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


@contextmanager
def progress(title: str) -> Iterator[Update]:
    """A progress bar as a callback of (done, total)."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


if __name__ == "__main__":
    main()
