"""`moesched latencies`: an expert's latency on each processor, and that of its transfer."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App

from moesched.cli import options
from moesched.cli.output import say

HELP = options.paragraphs(
    "Show the latencies that decide where an expert runs, by number of tokens: transfer of its weights and "
    "inputs, and computation on each processor (Twiddler, Appendix A and Fig. 7).",
    "Policies use the same figures: measurements of `moesched calibrate` if the machine has them, else "
    "estimates from its profile. --out draws them, and needs matplotlib: pip install 'moesched[plots]'.",
)

EPILOGUE = """Examples:

  moesched latencies --model mixtral-8x7b --machine rtx6000
  moesched latencies --model models/mixtral-0.8b --machine auto \\
      --out latencies.svg"""


def add_to(app: App) -> None:
    """Add the command."""
    app.command(latencies, name="latencies", help=HELP, help_epilogue=EPILOGUE, sort_key=7)


def latencies(
    *,
    model: options.Model,
    machine: options.Machine,
    dtype: options.DType = None,
    tokens: Annotated[
        tuple[options.Whole, ...],
        options.repeatable(
            metavar="N",
            help="Number of tokens of an expert; repeatable. By default 1 to 1024.",
        ),
    ] = (),
    out: options.Picture = None,
    json: options.Json = False,
) -> None:
    """See HELP."""
    from moesched.analysis.latency_picture import draw_latencies
    from moesched.analysis.latency_table import latencies_of
    from moesched.analysis.pictures import require_picture
    from moesched.cli.output import print_json
    from moesched.cli.tables import print_table
    from moesched.units import format_seconds

    if out is not None:
        require_picture(out)
    report = latencies_of(model, machine, dtype=dtype, tokens=tokens)
    if out is not None:
        draw_latencies(report, out)
    if json:
        print_json(report)
        return
    say(f"\n{report.model} ({report.dtype}) on {report.machine}, one expert, {report.source}\n")
    print_table(["", "takes"], [[each.name, format_seconds(each.seconds)] for each in report.rows], figures=1)
    if report.cheaper_moved is not None:
        say(
            f"\nFrom {report.cheaper_moved} tokens on, a single expert is faster if it is moved to "
            f"{report.accelerator}."
        )
