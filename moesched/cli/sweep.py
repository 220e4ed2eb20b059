"""`moesched sweep`: simulates all combinations of policies, machines, models, workloads and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

from moesched.analysis.pictures import require_picture
from moesched.cli.command import Several, command
from moesched.cli.failures import FAILED, tell
from moesched.cli.files import require_safe_outputs
from moesched.cli.output import Bar, print_json, say
from moesched.cli.sweep_options import SweepArguments
from moesched.cli.tables import print_table
from moesched.errors import BadInput
from moesched.jobs.options import ScenarioOptions
from moesched.options import Option
from moesched.system.outputs import Output
from moesched.system.signals import exit_code_of_signal, interruption
from moesched.units import format_number

if TYPE_CHECKING:
    from moesched.sweeps.axes import Sweep
    from moesched.sweeps.figures import BestPolicy
    from moesched.sweeps.line import Line
    from moesched.sweeps.plots import Picture
    from moesched.sweeps.store import Store
    from moesched.sweeps.sweep import Prepared, SweepResult

EPILOGUE = """Examples:

  moesched sweep --policy all --machine t4,l4 --gen 16 \\
      --batch-size 1,2,4,8,16,32,64 --plot out/curves.png
  moesched sweep --policy cgopipe,expert_cache --machine t4 --batch-size 1,64 \\
      --gen 8 --machine-set "link.host->gpu=12GB/s,24GB/s,48GB/s" \\
      --x "machine_set.link.host->gpu" --plot out/link.png
  moesched sweep --policy all --machine t4,l4 --batch-size 1,8,64 --gen 8 \\
      --price t4=0.35 --price l4=0.71 \\
      --pareto latency,dollars --plot out/pareto.png
  moesched sweep my_sweep.toml --gen 8 --parquet out/results.parquet

A sweep's file has the keywords of moesched.simulate_model:

  policy = ["cgopipe", "my_policy.py:MyPolicy"]
  machine = ["t4", "l4"]
  batch_size = [1, 8, 64]
  [settings]
  ahead = [1, 2]
  [budgets]
  gpu = ["12GB", "16GB"]
  [machine_set]
  "link.host->gpu" = ["x1", "x2"]
  [price]
  t4 = 0.35"""

RESULTS = Path("out")
"""Folder of results if --out is not given."""

SHOWN_CASES = 40
SHOWN_FAILURES = 5
LONGEST_REASON = 200
"""Largest number of characters printed of a point's failure; its line in the results has the whole text."""


@command(EPILOGUE)
def sweep(
    axes: Annotated[Mapping[str, Sequence[str]], Several(ScenarioOptions)],
    given: SweepArguments,
    file: Annotated[Path | None, Option("Axes in a TOML file.", flag="FILE")] = None,
) -> int:
    """Simulate all combinations of policies, machines, models, workloads and settings, on all cores.

    Each option of `simulate` takes several values here, with commas between them. They can also stand in a TOML file;
    an option then replaces the file's axis of that name. --policy all stands for all shipped policies. By default the
    model is mixtral-8x7b and the workload mtbench.

    The result of each combination, called a point, is written as a line of --out as soon as it is done. The same
    command again runs only points that are missing or whose inputs have changed, such as a machine file or an edited
    policy. If a point fails, its line has the reason as `failure`, and the sweep goes on, unless the first 24 points
    all fail. The exit code is 1 if the sweep ended because of that, if a policy that you named failed at a point, or if
    all points failed. It is 0 if only points failed whose policy is in the sweep because of `--policy all`.
    """
    from moesched.sweeps.store import Store
    from moesched.sweeps.sweep import prepare, run_sweep

    asked = given.asked(file, axes)
    picture = given.picture(asked)
    out = _check_outputs(given, file, asked)
    with Bar("reading inputs"):
        prepared = prepare(asked)
    if given.dry_run:
        return _tell_axes(prepared, given.json)
    with Bar("sweeping") as bar, Store(out) as store:

        def progress(done: int, total: int) -> None:
            bar.update(done, total, f"{done:,} of {total:,} points")

        result = run_sweep(
            prepared,
            store,
            workers=given.workers,
            retry=given.retry,
            progress=progress,
            first_failure=lambda line: tell(f"a point failed, and the sweep goes on: {_reason(line)}"),
        )
        bar.close()
        code = _hand_out(given, out, prepared, result)  # first, as a picture may be refused
        if not result.interrupted:
            _write(given, picture, prepared, result, store)
    return code


def _check_outputs(given: SweepArguments, file: Path | None, asked: Sweep) -> Path:
    """Check the options for outputs and, unless --dry-run is given, the files; return the path of the results file.

    Args:
        file: the sweep's TOML file; None for none.
        asked: the sweep, whose values may name input files.

    Raises:
        BadInput: an output cannot be written or is an input, or --workers, --plot or --parquet cannot be used.
    """
    from moesched.sweeps.parquet import require_parquet

    out = given.out or RESULTS / f"{file.stem if file else 'sweep'}.jsonl"
    if given.workers is not None and given.workers < 1:
        raise BadInput(f"--workers is {given.workers}: give 1 or more")
    if given.plot is not None:
        require_picture(given.plot, "--plot")
    if given.parquet is not None:
        require_parquet()
    if given.dry_run:
        return out
    if given.out is None:
        try:
            out.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise BadInput(
                f"cannot make the folder {out.parent}: {error.strerror}: name a file with --out"
            ) from error
    outputs = {"results": out, "picture": given.plot, "Parquet file": given.parquet}
    written = [Output(kind, path) for kind, path in outputs.items() if path is not None]
    named = [str(value) for values in asked.axes.values() for value in values]
    require_safe_outputs(written, [*named, str(file or "")])
    return out


def _tell_axes(prepared: Prepared, json: bool) -> int:
    """Print the number of simulations and the values of each axis, for --dry-run; return exit code 0."""
    axes = prepared.sweep.axes
    if json:
        print_json({"points": len(prepared.points), "axes": axes})
        return 0
    say(f"{len(prepared.points):,} points")
    rows = [[name, f"{len(values):,}", ", ".join(map(str, values))] for name, values in axes.items()]
    print_table(["axis", "values", ""], rows)
    return 0


def _write(
    given: SweepArguments, picture: Picture, prepared: Prepared, result: SweepResult, store: Store
) -> None:
    """Write the Parquet file and, if a point succeeded, the picture, where they are asked for; print their paths."""
    from moesched.sweeps.parquet import write_parquet
    from moesched.sweeps.plots import draw_sweep

    if given.parquet is not None:
        whole = store.whole_lines(line.key for line in result.lines)
        write_parquet(given.parquet, whole, result.lines, prepared.figures)
        _say_written(given, given.parquet)
    if given.plot is not None and not result.all_failed:
        draw_sweep(given.plot, picture, result.lines, prepared.sweep.axes, prepared.figures)
        _say_written(given, given.plot)


def _say_written(given: SweepArguments, path: Path) -> None:
    if not given.json:
        say(f"written: {path}")


def _hand_out(given: SweepArguments, out: Path, prepared: Prepared, result: SweepResult) -> int:
    """Print the best policies and the failures, and return the exit code."""
    from moesched.sweeps.figures import best_by_case
    from moesched.sweeps.sweep import TRIED_FIRST

    best = best_by_case(result.lines, prepared.sweep.axes, prepared.figures)
    if given.json:
        print_json(
            {
                "points": result.points,
                "done": len(result.lines),
                "reused": result.reused,
                "failed": len(result.failures),
                "interrupted": result.interrupted,
                "out": str(out),
                "axes": prepared.sweep.axes,
                "best": [each._asdict() for each in best],
                "failures": [{"inputs": line.inputs, "failure": line.failure} for line in result.failures],
            }
        )
    else:
        _print_best(best, dollars=bool(prepared.sweep.prices))
        _print_result(given, out, result)
    if result.interrupted:
        done = f"{len(result.lines):,} of {result.points:,} points"
        tell(f"{interruption()} after {done}: run the same command again to go on")
        return exit_code_of_signal()
    if result.hopeless:
        tell(f"all {TRIED_FIRST} points that ran failed: the sweep ended early; the same command goes on")
    named = prepared.sweep.axes["policy"]  # "all" also stands for policies that cannot run there
    failed = any(line.inputs["policy"] in named for line in result.failures)
    return FAILED if failed or result.hopeless or result.all_failed else 0


def _reason(line: Line) -> str:
    """Describe a failed simulation in one line: its policy, its machine, and the reason."""
    return (
        f"{line.inputs['policy']} on {line.inputs['machine']}: {shorten(line.failure or '', LONGEST_REASON)}"
    )


def _print_best(best: list[BestPolicy], *, dollars: bool) -> None:
    """Print a table of the best policy in each case.

    A case is a combination of values of the axes other than policy and its settings.

    Args:
        dollars: whether to add a column with dollars per million tokens.
    """
    from moesched.sweeps.figures import title_of

    if not best:
        return
    figures = {"throughput": "tokens/s", "latency": "s/token", "memory": "GB"}
    if dollars:
        figures["dollars"] = "$/million"
    names = list(best[0].case)
    rows = []
    for each in best[:SHOWN_CASES]:
        settings = "".join(f" {key}={value}" for key, value in each.settings.items())
        values = [each.beside[name] for name in figures]
        rows.append(
            [
                *("" if value is None else str(value) for value in each.case.values()),
                each.policy + settings,
                "" if each.next_best is None else f"{each.next_best[0]} {format_number(each.next_best[1])}",
                *("" if value is None else format_number(value) for value in values),
            ]
        )
    header = [*map(title_of, names), "best policy", "next, tokens/s", *figures.values()]
    print_table(header, rows, figures=len(figures))
    if len(best) > SHOWN_CASES:
        say(f"and {len(best) - SHOWN_CASES:,} more cases: --json has all")
    say()


def _print_result(given: SweepArguments, out: Path, result: SweepResult) -> None:
    """Print the path of the results, the numbers of simulations, and the reasons of the first failures."""
    reused = f", {result.reused:,} of them from earlier" if result.reused else ""
    others = f"; it has {result.others:,} lines of other sweeps, too" if result.others else ""
    say(f"{len(result.lines):,} of {result.points:,} points done{reused}: {out}{others}")
    failures = {line.inputs["policy"]: line for line in reversed(result.failures)}
    if not failures:
        return
    count = len(result.failures)
    say(f"\n{count:,} point{'s' if count > 1 else ''} failed; the first reasons by policy:")
    for line in list(reversed(failures.values()))[:SHOWN_FAILURES]:
        say(f"  {_reason(line)}")
    if len(failures) > SHOWN_FAILURES:
        say(f"  and {len(failures) - SHOWN_FAILURES:,} more policies; each line has its reason as `failure`")
