"""Prints the report on requests that arrive over time, in words and tables."""

from __future__ import annotations

from moesched.cli.output import say
from moesched.cli.tables import print_table
from moesched.runs.service_report import Percentiles, ServiceReport
from moesched.units import format_seconds


def print_service(report: ServiceReport) -> None:
    """Print the report: model and policy, times of requests, rates, requests at once, and use of the KV cache."""
    word = "measured" if report.measured else "predicted"
    capacity = report.capacity
    place = report.machine if report.nodes == 1 else f"{report.nodes} nodes of {report.machine}"
    say(f"\n{report.model} ({report.dtype}) on {place}, {report.policy}, {word}\n")
    done = report.requests - report.left
    say(f"{report.requests} requests in {format_seconds(report.seconds)}, {done} completed")
    say(
        f"{report.requests_per_second:.3g} requests/s, {report.tokens_per_second:,.3g} tokens/s, "
        f"{report.steps:,} steps\n"
    )
    times = {
        "to a place": report.waited,
        "to the first token": report.ttft,
        "between tokens": report.tpot,
        "between tokens, longest": report.pause,
    }
    rows = [[name, *_cells(found)] for name, found in times.items() if found is not None]
    print_table(["seconds", "p50", "p90", "p99"], rows, figures=3)
    mean, most = report.running
    waiting, longest = report.queue
    held, fullest = report.cache_held
    say(
        f"\non average {mean:.3g} requests ran at once ({most} at most, of {capacity.places * capacity.sequences}), "
        f"and {waiting:.3g} waited ({longest} at most)"
    )
    say(f"KV cache: {held:.0%} taken, {fullest:.0%} at most")
    if report.objectives is not None and report.kept is not None:
        say(f"objectives kept by {report.kept:.1%}: goodput {report.goodput:.3g} requests/s")


def _cells(found: Percentiles) -> list[str]:
    return [format_seconds(each) for each in (found.p50, found.p90, found.p99)]
