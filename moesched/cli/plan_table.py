"""The ranking of policies that `moesched plan` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moesched.cli.output import say
from moesched.cli.tables import print_table
from moesched.units import format_seconds

if TYPE_CHECKING:
    from moesched.planner.ranking import Ranked

ESTIMATE = "~"
"""Mark of figures that are estimated from a few layers."""

COLUMNS = (
    "policy",
    "tokens/s with prefill",
    "decode step",
    "first token",
    "batch",
    "micro-batch",
    "busiest lane",
    "10 % more of",
    "brings",
)

SPARE = ("brings", "10 % more of", "micro-batch", "busiest lane")
"""Columns that are left out on a narrow terminal, the first one first."""


def print_ranking(ranking: Sequence[Ranked], objective: str) -> None:
    """Print a row for each policy that fits, and a line for each that does not."""
    rows = [_row(each) for each in ranking if each.fits]
    print_table([f"policies for {objective}", *COLUMNS[1:]], rows, spare=SPARE)
    if any(each.estimate for each in ranking):
        say(f"{ESTIMATE}estimates from a few layers, not ranked; `simulate` has the whole")
    for each in ranking:
        if not each.fits:
            say(f"\n{each.policy} does not fit: {each.lacks}")


def _row(ranked: Ranked) -> list[str]:
    gain = ranked.gain
    return [
        ranked.policy,
        f"{ESTIMATE * ranked.estimate}{ranked.throughput_tokens_per_second:.4g}",
        format_seconds(ranked.decode_step_seconds or 0.0),
        format_seconds(ranked.first_token_seconds or 0.0),
        str(ranked.batch_size),
        str(ranked.micro_batch_size),
        f"{ranked.bound_by}, {ranked.busy or 0.0:.0%}",
        gain.resource if gain is not None else "",
        f"{gain.share:+.1%}" if gain is not None else "",
    ]
