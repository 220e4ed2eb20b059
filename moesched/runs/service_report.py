"""The report of requests that were served: times to the first token and per token, rate, queue and KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from moesched.errors import BadInput
from moesched.runs.outcome import ratio
from moesched.runs.serving import Occupancy, Served, Serving
from moesched.serving.capacity import Capacity
from moesched.system.plain_text import shown
from moesched.units import parse_seconds


class Objectives(msgspec.Struct, frozen=True):
    """Limits on the times of each request, in seconds; None for no limit.

    Attributes:
        ttft: from the arrival to the first token.
        tpot: mean time between two tokens.
    """

    ttft: float | None = None
    tpot: float | None = None


def parse_objectives(text: str) -> Objectives:
    """Parse objectives such as "ttft=2s,tpot=200ms".

    Raises:
        BadInput: an objective is unknown, is given twice, or has no time.
    """
    known: dict[str, float] = {}
    for part in text.split(","):
        name, equals, time = (each.strip() for each in part.partition("="))
        if name not in Objectives.__struct_fields__ or not equals or name in known:
            raise BadInput(
                f"--slo has {shown(part)}: give each of ttft and tpot once, as in ttft=2s,tpot=200ms"
            )
        known[name] = parse_seconds(time)
        if known[name] <= 0:
            raise BadInput(f"--slo has {shown(part)}: give a time above 0")
    return Objectives(**known)


class Percentiles(msgspec.Struct, frozen=True):
    """The median (p50), and the 90th and 99th percentile (p90, p99) of times, in seconds."""

    p50: float
    p90: float
    p99: float


class ServiceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of served requests. Times are in seconds.

    Attributes:
        measured: whether the run was on hardware; else this is a prediction.
        capacity: the largest number of requests and tokens that could run together.
        nodes: number of machines that shared the model's experts.
        requests: requests that arrived.
        left: requests that were cancelled.
        seconds: from the first moment at which a request could run to the last token.
        requests_per_second: completed requests a second.
        tokens_per_second: generated tokens a second, of all requests.
        ttft: from the arrival to the first token.
        tpot: mean time between two tokens, by completed request; None if none of these has two tokens.
        pause: longest time between two tokens, by completed request; None if none of these has two tokens.
        waited: from the arrival until the request gets a place in a micro-batch.
        steps: number of steps.
        queue: mean number of requests that waited for a place, and the most.
        running: mean number of requests that had a place, and the most.
        cache_held: mean share of the KV cache that requests took, and the most.
        objectives: the limits on times that requests are to keep.
        kept: share of the completed requests that kept the objectives.
        goodput: completed requests a second that kept the objectives.
    """

    model: str
    machine: str
    policy: str
    dtype: str
    measured: bool
    capacity: Capacity
    requests: int
    left: int
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    ttft: Percentiles | None
    tpot: Percentiles | None
    pause: Percentiles | None
    waited: Percentiles | None
    steps: int
    queue: tuple[float, int]
    running: tuple[float, int]
    cache_held: tuple[float, float]
    objectives: Objectives | None = None
    kept: float | None = None
    goodput: float | None = None
    nodes: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON's types."""
        made: dict[str, Any] = msgspec.to_builtins(self)
        return made


class RunNames(msgspec.Struct, frozen=True):
    """The names of the model, machine, policy and dtype that ran, for a report, and whether they ran on hardware."""

    model: str
    machine: str
    policy: str
    dtype: str
    measured: bool
    nodes: int = 1


def service_report(
    ran: RunNames, serving: Serving, capacity: Capacity, objectives: Objectives | None
) -> ServiceReport:
    """Make the report of a run that has ended.

    Args:
        ran: names of the model, machine, policy and dtype.
        serving: the requests and their outcomes.
        capacity: the largest number of requests and tokens that could run together.
        objectives: the limits on times that requests are to keep; None for none.
    """
    all_of_them = list(serving.requests.values())
    done = [served for served in all_of_them if served.ending in ("stop", "length")]
    seconds = max((served.times[-1] for served in all_of_them if served.times), default=0) / 1e9
    kept = [served for served in done if objectives is not None and _keeps(served, objectives)]
    tpots = [time for served in done if (time := tpot(served)) is not None]
    pauses = [
        max(end - start for start, end in pairwise(each.times)) / 1e9 for each in done if each.times[1:]
    ]
    seen = serving.occupancy
    return ServiceReport(
        model=ran.model,
        machine=ran.machine,
        policy=ran.policy,
        dtype=ran.dtype,
        measured=ran.measured,
        capacity=capacity,
        requests=len(all_of_them),
        left=sum(served.ending == "left" for served in all_of_them),
        seconds=seconds,
        requests_per_second=ratio(len(done), seconds),
        tokens_per_second=ratio(sum(len(served.tokens) for served in all_of_them), seconds),
        ttft=percentiles([ttft(served) for served in all_of_them if served.times]),
        tpot=percentiles(tpots),
        pause=percentiles(pauses),
        waited=percentiles(
            [(served.entered - served.request.arrives) / 1e9 for served in all_of_them if served.entered >= 0]
        ),
        steps=len(seen.times),
        queue=(_mean(seen, seen.waiting), max(seen.waiting, default=0)),
        running=(_mean(seen, seen.running), max(seen.running, default=0)),
        cache_held=_shares(seen, capacity.places * capacity.cache_tokens),
        objectives=objectives,
        kept=len(kept) / len(done) if objectives is not None and done else None,
        goodput=len(kept) / seconds if objectives is not None and seconds else None,
        nodes=ran.nodes,
    )


def ttft(served: Served) -> float:
    """Return the seconds from a request's arrival to its first token."""
    return (served.times[0] - served.request.arrives) / 1e9


def tpot(served: Served) -> float | None:
    """Return the mean seconds between two tokens of a request; None with fewer than two."""
    if len(served.times) < 2:
        return None
    return (served.times[-1] - served.times[0]) / (len(served.times) - 1) / 1e9


def percentiles(times: Sequence[float]) -> Percentiles | None:
    """Return the percentiles of times in seconds; None if there are no times."""
    return Percentiles(*(float(each) for each in np.percentile(times, (50, 90, 99)))) if times else None


def _keeps(served: Served, objectives: Objectives) -> bool:
    between = tpot(served)
    first_in_time = objectives.ttft is None or ttft(served) <= objectives.ttft
    return first_in_time and (objectives.tpot is None or between is None or between <= objectives.tpot)


def _mean(seen: Occupancy, numbers: Sequence[int]) -> float:
    """Return the mean of a quantity over time, from 0 to the end of the last step.

    Args:
        seen: has the start and the end of each step.
        numbers: the quantity's value in each step; it is 0 between steps, where there are no requests.
    """
    total = seen.times[-1] if seen.times else 0
    if not total:
        return fmean(numbers) if numbers else 0.0
    spans = [end - start for start, end in zip(seen.starts, seen.times, strict=True)]
    return sum(span * number for span, number in zip(spans, numbers, strict=True)) / total


def _shares(seen: Occupancy, room: int) -> tuple[float, float]:
    return _mean(seen, seen.held) / room, max(seen.held, default=0) / room
