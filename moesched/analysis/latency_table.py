"""Predicts the microbenchmarks of Twiddler (the Fiddler paper of ICLR'25, Appendix A) with a machine's cost model."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

import msgspec

from moesched.analysis.options import MOST_TOKENS, LatencyOptions
from moesched.dispatch.expert_latencies import ExpertLatencies
from moesched.inputs.lookup import find_machine, find_shape
from moesched.keywords import takes
from moesched.models.layout import weight_layout
from moesched.requests.batch import split_batch
from moesched.steps.plan import Plan

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ENOUGH = 1 << 60
"""Size in bytes assumed for each memory: latencies do not depend on whether the model fits."""

What = Literal["weight copy", "activation copy", "accelerator", "host"]


class Latency(msgspec.Struct, frozen=True):
    """A prediction, labelled `name`: the seconds to copy weights (0 tokens), or to copy or compute `tokens` tokens."""

    name: str
    what: What
    tokens: int
    seconds: float


class LatencyReport(msgspec.Struct, frozen=True):
    """Predicted latencies of one expert on a machine.

    Attributes:
        source: origin of the latencies, in words: the machine's measured costs, or the rates in its profile.
        cheaper_moved: the fewest tokens for which moving an expert to the accelerator is faster than computing it on
            the host (Algorithm 1); None if it never is.
    """

    model: str
    dtype: str
    machine: str
    accelerator: str
    source: str
    rows: list[Latency]
    cheaper_moved: int | None


@takes(LatencyOptions)
def latencies_of(given: LatencyOptions) -> LatencyReport:
    """Predict the seconds of copying an expert's weights and inputs, and of computing the expert on either processor.

    Raises:
        BadInput: the model or machine is unknown, a number of tokens is out of range, or the machine was measured in
            another dtype.
    """
    tokens = given.tokens or TOKENS
    described = find_machine(given.machine)
    layout = weight_layout(find_shape(given.model), given.dtype)
    enough = dict.fromkeys(described.memories, ENOUGH)
    plan = Plan(described, layout, split_batch([1], 1, 1), enough)
    latencies = ExpertLatencies(plan)
    accelerator, host = described.roles.accelerator, described.roles.host
    rows = [Latency("weight copy", "weight copy", 0, latencies.transfer)] if latencies.transfer else []
    if not described.unified:
        rows.append(Latency("activation copy", "activation copy", 1, latencies.to_host(1)))
    for count in tokens:
        seconds = latencies.at_accelerator(count)
        rows.append(Latency(f"{accelerator} {count}", "accelerator", count, seconds))
    for count in () if described.unified else tokens:
        rows.append(Latency(f"{host} {count}", "host", count, latencies.at_host(count)))
    return LatencyReport(
        model=layout.config.name,
        dtype=layout.dtype,
        machine=described.name,
        accelerator=accelerator,
        source="as it was measured" if described.cost_table else "as its profile states",
        rows=rows,
        cheaper_moved=None if described.unified else _cheaper_moved(latencies),
    )


def _cheaper_moved(latencies: ExpertLatencies) -> int | None:
    def moved(tokens: int) -> bool:
        return latencies.at_host(tokens) > latencies.at_accelerator(tokens) + latencies.transfer

    return bisect_left(range(1, MOST_TOKENS), True, key=moved) + 1 if moved(MOST_TOKENS) else None
