"""`moesched latencies`: shows the latency of an expert on each processor, and of the transfer of its weights."""

from __future__ import annotations

from moesched.analysis.options import LatencyOptions
from moesched.analysis.pictures import require_picture
from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.output import print_json, say
from moesched.cli.tables import print_table
from moesched.options import part_of
from moesched.units import format_seconds

EPILOGUE = """Examples:

  moesched latencies --model mixtral-8x7b --machine rtx6000
  moesched latencies --model models/mixtral-0.8b --machine auto \\
      --out latencies.svg"""


@command(EPILOGUE)
def latencies(given: LatencyOptions, out: options.Picture = None, json: options.Json = False) -> None:
    """Show what moving and computing an expert cost, by number of tokens.

    The figures are the times of the transfer of an expert's weights and inputs, and of its computation on each
    processor (Twiddler, Appendix A and Fig. 7). Policies use such times to decide where an expert runs.

    The times follow from the costs that `moesched calibrate` measured, or else from the rates in the machine's profile.
    --out draws them as bars, and needs matplotlib: pip install 'moesched[plots]'.
    """
    from moesched.analysis.latency_picture import draw_latencies
    from moesched.analysis.latency_table import latencies_of

    if out is not None:
        require_picture(out)
    report = latencies_of(**part_of(given, LatencyOptions))
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
