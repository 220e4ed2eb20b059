"""One request with too little GPU memory: four policies answer it on an emulated GPU, with the same text.

    python examples/one_request.py [--machine rtx6000] [--budget BYTES]

The model is the small Mixtral that ships. The machine's GPU is emulated in slow motion: the times shown are those of
the machine, and the run itself takes longer. Weights that do not fit into GPU memory are in host memory, where the CPU
can compute with them. An expert of this small model takes less time than handing over a task. So a second table
predicts a large model on the virtual clock: Mixtral 8x7B with all of the GPU's memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

import moesched

HERE = Path(__file__).parent
MODEL = HERE / "tiny-mixtral"
PROMPT = "Return a new"
NEW_TOKENS = 12
POLICIES = ("twiddler", "twiddler_makespan", "lru_offload", "layer_split")
LANES = {"gpu": "accelerator", "cpu": "host", "link to the gpu": "host->gpu"}

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def main() -> None:
    """Answer the request under each policy, and show the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="rtx6000", help="a profile of a machine with a GPU")
    parser.add_argument("--budget", default="7MB", help="the GPU's memory; the weights take 14 MB")
    parser.add_argument("--out", type=Path, default=HERE.parent / "out", help="folder for traces")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    reports = {}
    for policy in track(POLICIES, "One request", console=console, transient=True):
        reports[policy] = moesched.run_model(
            MODEL,
            [PROMPT],
            policy=policy,
            device="emulated",
            machine=arguments.machine,
            budgets={"gpu": arguments.budget},
            max_new_tokens=NEW_TOKENS,
            trace=arguments.out / f"one-request-{policy}.json",
        )
    show(f"tiny-mixtral on {arguments.machine}, {arguments.budget} of the GPU's memory: measured", reports)
    texts = {report.text[0] for report in reports.values() if report.text}
    console.print(
        f"All texts are equal: {PROMPT}{texts.pop()!r}" if len(texts) == 1 else f"They differ: {texts}"
    )
    console.print(
        f"To see a timeline, open {arguments.out}/one-request-POLICY.json at https://ui.perfetto.dev, or see why one "
        f"took longer: moesched compare {arguments.out}/one-request-layer_split.json "
        f"{arguments.out}/one-request-twiddler.json",
        soft_wrap=True,
    )
    predicted = {
        policy: moesched.simulate_model(
            "mixtral-8x7b",
            machine=arguments.machine,
            policy=policy,
            workload=moesched.given_lengths([32], NEW_TOKENS),
            routing="popularity",
            band=False,
        )
        for policy in track(POLICIES, "Mixtral 8x7B", console=console, transient=True)
    }
    show(f"Mixtral 8x7B on {arguments.machine}: predicted", predicted)


def show(title: str, reports: Mapping[str, moesched.JobReport]) -> None:
    """Print the runs as a table."""
    table = Table(title=title)
    for heading in ("policy", "first token", "tokens/s", *(f"{name} busy" for name in LANES)):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for policy, report in reports.items():
        assert report.first_token_seconds is not None, "every run generates a token"
        table.add_row(
            policy,
            f"{1e3 * report.first_token_seconds:,.2f} ms",
            f"{report.decode_tokens_per_second:,.1f}",
            *(f"{report.lanes[lane].utilization:.0%}" for lane in LANES.values()),
        )
    console.print(table)


if __name__ == "__main__":
    main()
