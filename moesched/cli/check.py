"""`moesched check`: finds a policy's faults, and compares its speed with shipped policies, in about a minute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.failures import FAILED, WHOLE_TRACEBACK
from moesched.cli.output import Bar, print_json, say
from moesched.cli.tables import print_table
from moesched.inputs.options import PolicyOptions
from moesched.options import Option
from moesched.units import format_seconds

if TYPE_CHECKING:
    from moesched.testing.grid.results import Advice, CellResult, Fault, GridReport

EPILOGUE = """Examples:

  moesched check my_policy.py:MyPolicy
  moesched check expert_cache --model mixtral-8x7b --machine t4 --machine l4 \\
      --batch-size 1 --batch-size 64"""

MOST_PROBLEMS = 3
"""Largest number of cells without figures for which the reason is printed."""


class CheckArguments(PolicyOptions):
    """All options of `moesched check`. Those for models, machines and batch sizes may be given several times."""

    policy: Annotated[
        str,
        Option(
            "A name of `moesched list policies`, file.py:Class, or package.module:Class (also in the current folder).",
            flag="POLICY",
        ),
    ]
    models: Annotated[
        tuple[str, ...],
        Option(
            "A model of the grid; repeatable. By default mixtral-8x7b, qwen3-30b-a3b and mixtral-0.8b.",
            "NAME|PATH",
            flag="--model",
        ),
    ] = ()
    machines: Annotated[
        tuple[str, ...],
        Option(
            "A machine of the grid; repeatable. By default t4, a100-80g and cpu-nvme.",
            "NAME|FILE",
            flag="--machine",
        ),
    ] = ()
    batch_sizes: Annotated[
        tuple[int, ...],
        Option(
            "A batch size of the grid; repeatable. By default 1 and 16; for qwen3-30b-a3b, 1.",
            "N",
            flag="--batch-size",
            ge=1,
            le=65_536,
        ),
    ] = ()
    limit: Annotated[
        float,
        Option("Time after which the remaining cases are named as unchecked.", "SECONDS", ge=1, le=86_400),
    ] = 60.0
    json: options.Json = False


@command(EPILOGUE)
def check(given: CheckArguments) -> int:
    """Find the faults of a policy, and compare its speed with that of shipped policies, on the virtual clock.

    Small models come first, with tight memory, random shapes and uneven durations. Wrong tokens, more memory than the
    budget, illegal tasks and errors are faults. Then come real models on real machines: the prompts of mtbench in four
    micro-batches, with 64 new tokens each. Output that the policy prints is dropped.

    A fault is reported with the policy's line. Pages that nothing read, pages that moved twice and idle lanes are
    reported as advice. The column "bound" has the least time that the same tasks could take in any order. It is the sum
    of two times: one for the prefill, one for all decode steps. Each is the time of the busiest lane or, if that is
    longer, of the longest chain of tasks that wait for each other.

    Exit code 1 if there are faults.
    """
    from moesched.testing.grid.cells import cells_of
    from moesched.testing.grid.check import check_on_grid

    with Bar("checking") as bar:
        report = check_on_grid(
            given.policy,
            given.settings,
            cells=cells_of(given.models, given.machines, given.batch_sizes),
            limit=given.limit,
            whole_traceback=WHOLE_TRACEBACK.get(),
            on_progress=lambda done, total, what: bar.update(done, total, what),
        )
    print_json(report) if given.json else print_grid(report)
    return FAILED if report.faults else 0


def print_grid(report: GridReport) -> None:
    """Print the faults, then the advice, then the times of each model and machine on which the policy was checked."""
    say(_summary(report))
    for fault in report.faults:
        say()
        for line in _lines(fault):
            say(line)
    if report.advice:
        say("\nadvice:")
        for advice in report.advice:
            say(f"  {_advice(advice)}")
    if any(cell.seconds for cell in report.cases):
        say()
        _print_cells(report.cases)
    _print_problems([cell for cell in report.cases if cell.problem and not cell.seconds])
    if report.unchecked:
        first, more = report.unchecked[0], len(report.unchecked) - 1
        say(f"\nnot checked: {first}" + (f", and {more} more" if more else "") + f": {report.reason}")


def _summary(report: GridReport) -> str:
    faults = len(report.faults)
    fitting = report.trials - report.unfit
    cells = sum(cell.seconds is not None for cell in report.cases)
    return (
        f"{report.policy}: {faults or 'no'} fault{'' if faults == 1 else 's'} in {fitting} small cases "
        f"({report.unfit} do not fit) and {cells} of {len(report.cases)} cells, {report.seconds:.0f} s"
    )


def _lines(fault: Fault) -> Iterator[str]:
    yield f"{fault.line}: {fault.message}"
    yield f"  in {_cases(fault)}"
    yield from fault.more


def _advice(advice: Advice) -> str:
    place = f"{advice.line}: " if advice.line else ""
    return f"{place}{advice.message} (in {_cases(advice)})"


def _cases(found: Fault | Advice) -> str:
    more = found.cases - 1
    return found.case + (f", and {more} more case{'' if more == 1 else 's'}" if more else "")


def _print_cells(cells: list[CellResult]) -> None:
    rows = [
        [
            cell.model,
            cell.machine,
            str(cell.batch_size),
            format_seconds(cell.seconds),
            format_seconds(cell.lower_bound_seconds),
            f"{cell.seconds / cell.lower_bound_seconds:.2f}",
            "" if cell.rank is None else f"{cell.rank} of {cell.fitting}",
            "" if cell.fastest is None else cell.fastest,
            "" if cell.fastest_seconds is None else format_seconds(cell.fastest_seconds),
        ]
        for cell in cells
        if cell.seconds is not None and cell.lower_bound_seconds
    ]
    columns = ["model", "machine", "batch", "seconds", "bound", "ratio", "rank", "fastest", "its seconds"]
    print_table(columns, rows, spare=["its seconds", "ratio"])


def _print_problems(cells: list[CellResult]) -> None:
    for cell in cells[:MOST_PROBLEMS]:
        say(f"\n{cell.model} on {cell.machine}, batch of {cell.batch_size}: {cell.problem}")
    if len(cells) > MOST_PROBLEMS:
        say(f"... and {len(cells) - MOST_PROBLEMS} more cells without figures; --json lists them all")
