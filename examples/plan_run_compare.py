"""Plan a run, run it, and see how far the plan's prediction was off and why. It takes some seconds and needs no GPU.

    python examples/plan_run_compare.py [--machine FILE]

The model is the small Mixtral that ships, with less memory than its weights need. The machine that the plan is made for
is a profile of another one, so the prediction will be off; `moesched calibrate --out FILE` measures this one, and
`--machine FILE` then plans for it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import moesched

HERE = Path(__file__).parent
MODEL = HERE / "tiny-mixtral"
BUDGET = {"host": "9MB"}
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 16, 12, 10

console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def main() -> None:
    """Plan, run, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="cpu-nvme", help="a profile's name, or a machine file")
    parser.add_argument("--out", type=Path, default=HERE.parent / "out", help="folder for traces")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    predicted, measured, both = (
        arguments.out / f"{name}.json" for name in ("predicted", "measured", "side-by-side")
    )

    console.rule("1. Plan")
    workload = moesched.given_lengths([PROMPT_TOKENS], NEW_TOKENS)
    proposal = moesched.plan_model(MODEL, machine=arguments.machine, workload=workload, budgets=BUDGET)
    plan = proposal.plan
    console.print(
        f"For {arguments.machine} with {BUDGET['host']} of memory the planner takes policy [bold]{plan.policy}[/bold], "
        f"batches of {plan.batch_size} in micro-batches of {plan.micro_batch_size}.\n"
        f"It expects {proposal.predicted.throughput_tokens_per_second:,.0f} tokens/s, bound by "
        f"{proposal.predicted.bound_by}.",
        soft_wrap=True,
    )

    console.rule("2. Run it, and simulate the same run")
    batch = min(REQUESTS, plan.batch_size)
    sizes: dict[str, Any] = {
        "batch_size": batch,
        "micro_batch_size": min(batch, plan.micro_batch_size),
        "budgets": BUDGET,
    }
    run = moesched.run_model(
        MODEL,
        prompts(batch),
        policy=plan.policy,
        max_new_tokens=NEW_TOKENS,
        trace=measured,
        **sizes,
    )
    simulated = moesched.simulate_model(
        MODEL,
        machine=arguments.machine,
        policy=plan.policy,
        workload=workload,
        requests=batch,
        trace=predicted,
        band=False,
        **sizes,
    )
    for report, what in ((run, "measured"), (simulated, "predicted")):
        console.print(f"{what} with {batch} requests: {report.throughput_tokens_per_second:,.0f} tokens/s")

    console.rule("3. Why was the prediction off?")
    comparison = moesched.compare_runs([predicted, measured], trace=both)
    console.print("\n".join(comparison.reasons()), soft_wrap=True)
    print_table("What makes the difference", *comparison.causes())
    print_table("By lane", *comparison.lane_causes())
    console.print(
        "A kind of task that is slower than predicted costs nothing while it hides behind another lane: its part of "
        "the gap is what the run would lose if that kind alone were as fast as predicted. The parts add up.",
        soft_wrap=True,
    )

    console.rule("4. Is the graph to blame, or the durations?")
    alone = moesched.compare_runs([measured], replayed=True)
    console.print(alone.reasons()[-1], soft_wrap=True)
    print_table("Longest waits on the critical path", *alone.waits())

    console.rule("Next")
    console.print(
        f"Both runs stand side by side in {both}: open it at https://ui.perfetto.dev.\n"
        "A prediction for this machine: moesched calibrate --out machine.toml, then --machine machine.toml here.\n"
        f"The same tables from the command line: moesched compare {predicted} {measured}",
        soft_wrap=True,
    )


def prompts(count: int) -> list[list[int]]:
    """Token ids, different in each prompt."""
    return [[1 + (7 * request + place) % 500 for place in range(PROMPT_TOKENS)] for request in range(count)]


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table of the comparison."""
    table = Table(title=title, title_justify="left")
    for column in header:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
