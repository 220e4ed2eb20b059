"""`moesched roofline`: shows the bottlenecks of a model on a machine, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moesched.analysis.options import RooflineOptions
from moesched.analysis.pictures import require_picture
from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.output import Bar, print_json, say
from moesched.cli.tables import print_table
from moesched.options import part_of
from moesched.units import format_bytes, format_flops, format_seconds

if TYPE_CHECKING:
    from moesched.analysis.roofline import Computation, RooflineReport

EPILOGUE = """Examples:

  moesched roofline --model mixtral-8x7b --machine l4
  moesched roofline --model mixtral-8x22b --machine t4x4 --kv-dtype int8 \\
      --batch-size 2048 --micro-batch-size 64 --out roofline.svg"""


@command(EPILOGUE)
def roofline(given: RooflineOptions, out: options.Picture = None, json: options.Json = False) -> None:
    """Show the bottlenecks of attention and experts on a machine, by MoE-Lightning's Hierarchical Roofline Model.

    Gives the batch size from which fetching weights pays, and the size from which the link is no longer the bottleneck.
    --out draws the rooflines, and needs matplotlib: pip install 'moesched[plots]'.
    """
    from moesched.analysis.roofline import roofline_of
    from moesched.analysis.roofline_picture import draw_roofline

    if out is not None:
        require_picture(out)
    report = roofline_of(**part_of(given, RooflineOptions))
    if out is not None:
        with Bar(f"drawing {out}"):
            draw_roofline(report, out)
    if json:
        print_json(report)
    else:
        print_roofline(report)


def print_roofline(report: RooflineReport) -> None:
    """Print the rates of the two memory levels, the bottleneck of each computation, and the time of one layer."""
    say(f"\n{report.model} ({report.dtype}) on {report.machine}, one layer of a decode step\n")
    print_table(["", "compute", "memory or link", "ridge, FLOP/byte"], list(_levels(report)), figures=3)
    say()
    upper, lower = report.hierarchy.upper.name, report.hierarchy.lower.name
    computations = {f"attention, {each.variant} KV": each for each in report.attention}
    computations |= {f"FFN, {each.variant}": each for each in report.ffn}
    rates = ["", f"fetched to {upper}", "bound by", f"on {lower}", "bound by"]
    print_table(rates, [[name, *_rates(each)] for name, each in computations.items()])
    say()
    points = ["", f"I {upper}", f"I {lower}", "P1", "P2", "balance", "better on"]
    print_table(points, [[name, *_points(each)] for name, each in computations.items()])
    say(f"\nI (operational intensity), P1, P2 and balance point in FLOP/byte, the last three of {lower}")
    say(f"attention: context {report.context}; FFN: µ = {report.micro_batch_size}\n")
    for line in _conclusions(report):
        say(line)


def _levels(report: RooflineReport) -> Iterator[list[str]]:
    from moesched.analysis.hrm import ridge

    hierarchy = report.hierarchy
    for level in (hierarchy.upper, hierarchy.lower):
        compute = [format_flops(level.peak), _figure(ridge(level))] if level.peak else ["-", "-"]
        yield [level.name, compute[0], f"{format_bytes(level.bandwidth)}/s", compute[1]]
    yield [hierarchy.link_name, "-", f"{format_bytes(hierarchy.link)}/s", "-"]


def _rates(each: Computation) -> list[str]:
    """Return a computation's rate and bottleneck on the upper level, then on the lower ("-" without a processor)."""
    here = ["-", "-"]
    if each.in_place is not None:
        here = [format_flops(each.in_place.performance), each.in_place.by]
    return [format_flops(each.fetched.performance), each.fetched.by, *here]


def _points(each: Computation) -> list[str]:
    """Return a computation's operational intensities, turning and balance points, and the level that is faster."""
    points = (each.first_turning_point, each.second_turning_point, each.balance_point)
    return [*map(_figure, (each.intensity.upper, each.intensity.lower, *points)), each.better]


def _conclusions(report: RooflineReport) -> Iterator[str]:
    upper, lower = report.hierarchy.upper.name, report.hierarchy.lower.name
    pays, free = report.batch_at_first_turning_point, report.batch_at_second_turning_point
    peak, reached = report.hierarchy.lower.peak, report.upper_ffn.performance
    if peak > reached:
        yield f"With µ = {report.micro_batch_size} the experts are never faster on {upper} than on {lower}."
    elif peak:
        yield f"P1 is at N = {_count(pays)}: with fewer requests, the experts run faster on {lower}."
    yield (
        f"P2 is at N = {_count(free)}: with more requests, µ = {report.micro_batch_size} is the bottleneck "
        "of the experts, not the link."
    )
    split, layer = report.split, report.layer
    attention = upper if split.attention_on_gpu else lower
    busy = [
        f"{report.hierarchy.link_name} {format_seconds(layer.link)}",
        f"{upper} {format_seconds(layer.upper)}",
    ]
    if layer.lower:
        busy.append(f"{lower} {format_seconds(layer.lower)}")
    yield (
        f"N = {split.batch_size}, µ = {split.micro_batch_size}, attention on {attention}, experts on {upper}: "
        f"a layer takes {format_seconds(report.layer_seconds)}, bound by {report.bound_by} ({', '.join(busy)})."
    )


def _figure(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def _count(batch: int | None) -> str:
    return "no batch" if batch is None else str(batch)
