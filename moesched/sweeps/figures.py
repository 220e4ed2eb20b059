"""Figures of a sweep's simulations: throughput, latency, memory, dollars, best policy of each case, Pareto fronts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moesched.errors import BadInput
from moesched.sweeps.axes import Axes
from moesched.sweeps.line import Line
from moesched.sweeps.points import axis_value
from moesched.system.plain_text import shown


class Metric(NamedTuple):
    """A kind of figure that each simulation of a sweep has, such as its throughput.

    Attributes:
        title: name and unit, for the axis of a picture.
        best: the function `max` if larger values are better, otherwise `min`.
        of: takes a line of results and facts about machines, and returns the figure; None if the line has none.
    """

    title: str
    best: Callable[[float, float], float]
    of: Callable[[Line, MachineFacts], float | None]


class MachineFacts(NamedTuple):
    """Facts about machines that figures need beside the lines of results.

    Attributes:
        fast: name of the accelerator's memory, by machine.
        prices: dollars per hour, by machine.
    """

    fast: Mapping[str, str]
    prices: Mapping[str, float]

    def value(self, line: Line, name: str) -> Any:
        """Return the value of a metric, or of an axis, for a line of results.

        The value is None for every metric of a failed simulation, for a metric that the line has no data for, such as
        dollars without a price, and for a setting that the line's policy does not take.

        Args:
            name: name of the metric or axis.
        """
        if name not in METRICS:
            return axis_value(line.inputs, name)
        return None if line.failure is not None else METRICS[name].of(line, self)


def _latency(line: Line, _: MachineFacts) -> float | None:
    if line.plan is None or not line.decode_tokens_per_second:
        return None
    return line.plan.batch_size / line.decode_tokens_per_second


def _memory(line: Line, figures: MachineFacts) -> float | None:
    peak = line.peak_bytes.get(figures.fast[line.inputs["machine"]])
    return None if peak is None else peak / 1e9


def _dollars(line: Line, figures: MachineFacts) -> float | None:
    price = figures.prices.get(line.inputs["machine"])
    if price is None or not line.throughput_tokens_per_second:
        return None
    return price * (line.inputs.get("nodes") or 1) / 3600 / line.throughput_tokens_per_second * 1e6


METRICS = {
    "throughput": Metric("throughput, tokens/s", max, lambda line, _: line.throughput_tokens_per_second),
    "decode": Metric("decode, tokens/s", max, lambda line, _: line.decode_tokens_per_second or None),
    "latency": Metric("time per token of a request, s", min, _latency),
    "first_token": Metric("time to first token, s", min, lambda line, _: line.first_token_seconds),
    "time": Metric("time of the whole run, s", min, lambda line, _: line.simulated_seconds),
    "memory": Metric("peak of the accelerator's memory, GB", min, _memory),
    "dollars": Metric("dollars per million tokens", min, _dollars),
}
"""The metrics, by the names that options use. `latency` is the time of a decode step."""


class BestPolicy(NamedTuple):
    """The best policy of a case, which is all simulations that differ only in the policy and its settings.

    Attributes:
        case: values of all axes but policy and settings, by name; axes with only one value are left out.
        settings: the policy's settings in its best simulation, by name.
        beside: all metrics of the best simulation, by name; None for those that it lacks.
        next_best: the next best policy and its throughput in tokens per second; None if there is no other.
    """

    case: dict[str, Any]
    policy: str
    settings: dict[str, Any]
    beside: dict[str, float | None]
    next_best: tuple[str, float] | None


AXIS_TITLES = {
    "batch_size": "batch size, requests",
    "gen": "new tokens of a request",
    "micro_batch_size": "micro-batch size, requests",
    "prefill_chunk": "chunk of prefill, tokens",
}
"""Titles in a picture for axes of a sweep that are counts."""


def title_of(name: str) -> str:
    """Return the name of a metric or an axis in words."""
    return METRICS[name].title if name in METRICS else (name.partition(".")[2] or name).replace("_", " ")


def require_figure(name: str, axes: Collection[str], option: str) -> None:
    """Require that `name` names a metric or one of `axes`.

    Args:
        option: the command-line option that gave the name, for the error message.

    Raises:
        BadInput: there is no metric or axis of that name.
    """
    known = [*METRICS, *axes]
    if name not in known:
        what = "a figure or an axis of the sweep" if axes else "a figure"
        raise BadInput(f"{option} {shown(name)} is not {what}: use one of {', '.join(known)}")


def varying(axes: Axes) -> list[str]:
    """Return the names of the axes with several values; "all", for all policies, counts as several."""
    return [name for name, values in axes.items() if len(values) > 1 or values == ["all"]]


def best_by_case(lines: Iterable[Line], axes: Axes, figures: MachineFacts) -> list[BestPolicy]:
    """Find the policy with the highest throughput in each case, in the order of the cases' first lines.

    A case is all simulations that differ only in the policy and its settings. Cases without results are left out.
    """
    names = [name for name in varying(axes) if name.partition(".")[0] not in ("policy", "settings")]
    cases: dict[str, tuple[dict[str, Any], list[Line]]] = {}
    for line in lines:
        case = {name: axis_value(line.inputs, name) for name in names}
        cases.setdefault(repr(case), (case, []))[1].append(line)
    return [_best(case, found, figures) for case, found in cases.values() if any(map(_rate, found))]


def _best(case: dict[str, Any], lines: Sequence[Line], figures: MachineFacts) -> BestPolicy:
    ranked = sorted((line for line in lines if _rate(line)), key=_rate, reverse=True)
    first = ranked[0]
    other = next((line for line in ranked if line.inputs["policy"] != first.inputs["policy"]), None)
    return BestPolicy(
        case,
        first.inputs["policy"],
        first.inputs.get("settings", {}),
        {name: figures.value(first, name) for name in METRICS},
        None if other is None else (other.inputs["policy"], _rate(other)),
    )


def _rate(line: Line) -> float:
    return 0.0 if line.failure is not None else line.throughput_tokens_per_second or 0.0


def pareto_front(lines: Iterable[Line], first: str, second: str, figures: MachineFacts) -> list[Line]:
    """Return the lines of results on the Pareto front of two metrics, from the best in `first` to the best in `second`.

    Lines that lack one of the metrics are left out.
    """
    signs = [-1 if METRICS[name].best is max else 1 for name in (first, second)]
    placed = []
    for line in lines:
        one, other = figures.value(line, first), figures.value(line, second)
        if one is not None and other is not None:
            placed.append(((signs[0] * one, signs[1] * other), line))
    front: list[Line] = []
    least = float("inf")
    for (_, other), line in sorted(placed, key=lambda each: each[0]):
        if other < least:
            front.append(line)
            least = other
    return front
