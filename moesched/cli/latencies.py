"""`moesched latencies`: what an expert takes here or there, and what moving it takes."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from moesched.cli import options

HELP = options.paragraphs(
    "Say what decides where an expert runs: copying its weights and its inputs, and computing it on either processor, "
    "for more and more tokens (Twiddler, Appendix A and Fig. 7).",
    "These are the figures that the policies decide by: measured ones of a machine that `moesched calibrate` has "
    "measured, else what the machine's profile states. With --out they are drawn; that takes matplotlib: "
    "pip install 'moesched[plots]'.",
)

EPILOGUE = """Examples:

  moesched latencies --model mixtral-8x7b --machine rtx6000
  moesched latencies --model models/mixtral-0.8b --machine auto --out latencies.svg"""


def add_to(app: App) -> None:
    """Add the command."""
    app.command(latencies, name="latencies", help=HELP, help_epilogue=EPILOGUE, sort_key=7)


def latencies(
    *,
    model: options.Model,
    machine: options.Machine,
    dtype: options.DType = None,
    tokens: Annotated[
        tuple[int, ...],
        Parameter(
            negative="",
            metavar="N",
            show_default=False,
            help="Of an expert; again for more. By default 1 to 1024.",
        ),
    ] = (),
    out: options.Picture = None,
    json: options.Json = False,
) -> None:
    """See HELP."""
    from moesched.analysis.latency_picture import draw_latencies
    from moesched.analysis.latency_table import latencies_of
    from moesched.analysis.pictures import require_picture
    from moesched.cli.output import print_json, print_table
    from moesched.units import format_seconds

    if out is not None:
        require_picture(out)
    report = latencies_of(model, machine, dtype=dtype, tokens=tokens)
    if out is not None:
        draw_latencies(report, out)
    if json:
        print_json(report)
        return
    print(f"\n{report.model} ({report.dtype}) on {report.machine}, one expert, {report.source}\n")
    print_table(["", "takes"], [[each.name, format_seconds(each.seconds)] for each in report.rows], figures=1)
    if report.cheaper_moved is not None:
        print(
            f"\nFrom {report.cheaper_moved} tokens on, moving it to {report.accelerator} is faster for it alone."
        )
