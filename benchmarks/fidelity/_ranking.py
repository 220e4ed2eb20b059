"""The order of schedules by prediction, against that by measurement where the measurements can tell."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from statistics import median, quantiles
from typing import Any, NamedTuple

from benchmarks.record.tables import table_of

MEASURES = ("decode", "total")
"""Seconds to rank by."""


class Times(NamedTuple):
    """Seconds of one schedule: each measured run, and the prediction."""

    measured: Sequence[float]
    predicted: float

    @property
    def median(self) -> float:
        """Of the measured runs."""
        return median(self.measured)

    @property
    def spread(self) -> float:
        """The interquartile range of the measured runs; 0 for a single one."""
        if len(self.measured) < 2:
            return 0.0
        lower, _, upper = quantiles(self.measured, n=4, method="inclusive")
        return upper - lower


def distinct(schedules: Mapping[str, Hashable]) -> dict[str, list[str]]:
    """Policies by schedule: the first policy of each, and all that have the same one."""
    policies: dict[Hashable, list[str]] = {}
    for name, schedule in schedules.items():
        policies.setdefault(schedule, []).append(name)
    return {names[0]: names for names in policies.values()}


def ranking(times: Mapping[str, Times]) -> dict[str, Any]:
    """Compare a prediction's order with that of the measured medians.

    A pair counts when its medians are further apart than the two interquartile ranges together: of two
    schedules with the same normally distributed times, five runs each, one pair in twenty does; with the larger range
    alone it would be one in seven. The regret is how much slower the schedule that is predicted to be the fastest was
    than the fastest one; beyond noise, only those count as faster that are so by more than the two ranges together.
    """
    pairs: list[dict[str, Any]] = []
    for one, other in combinations(sorted(times, key=lambda name: times[name].median), 2):
        faster, slower = times[one], times[other]
        if _differ(faster, slower):
            pairs.append(
                {
                    "faster": one,
                    "slower": other,
                    "measured_percent": _slower(slower.median, faster.median),
                    "predicted_percent": _slower(slower.predicted, faster.predicted),
                }
            )
    chosen = min(times, key=lambda name: times[name].predicted)
    fastest = min(times, key=lambda name: times[name].median)
    surely_faster = [each.median for each in times.values() if _differ(each, times[chosen])]
    return {
        "pairs": len(times) * (len(times) - 1) // 2,
        "pairs_beyond_noise": len(pairs),
        "concordant": sum(pair["predicted_percent"] > 0 for pair in pairs),
        "discordant": [pair for pair in pairs if pair["predicted_percent"] <= 0],
        "chosen": chosen,
        "fastest": fastest,
        "regret_percent": _slower(times[chosen].median, times[fastest].median),
        "regret_beyond_noise_percent": _slower(
            times[chosen].median, min(surely_faster, default=times[chosen].median)
        ),
    }


def _differ(faster: Times, slower: Times) -> bool:
    return slower.median - faster.median > faster.spread + slower.spread


def _slower(seconds: float, than: float) -> float:
    """Relative difference, percent."""
    return round(100 * (seconds / than - 1), 2)


RANKS = {
    "setting": "{setting}",
    "of": "{of}",
    "schedules": "{n}",
    "pairs beyond noise": "{pairs_beyond_noise}",
    "in order": "{concordant}",
    "fastest": "{fastest}",
    "chosen by the simulator": "{chosen}",
    "regret": "{regret_percent:.1f} %",
    "beyond noise": "{regret_beyond_noise_percent:.1f} %",
    "not in order": "{wrong}",
}


def ranks(settings: Iterable[dict[str, Any]]) -> str:
    """The simulated order of schedules beside the measured one, setting by setting."""
    rows = []
    for setting in settings:
        ranking = setting["ranking"]
        same = {names[0]: len(names) for names in ranking["same_schedule"]}
        schedules = len(setting["policies"]) - sum(each - 1 for each in same.values())
        for measure in ("decode", "total"):
            order = ranking[measure]
            wrong = "; ".join(
                f"{pair['faster']} before {pair['slower']} "
                f"({pair['measured_percent']:+.1f} %, predicted {pair['predicted_percent']:+.1f} %)"
                for pair in order["discordant"]
            )
            best = {
                key: f"{order[key]} and {same[order[key]] - 1} more" if order[key] in same else order[key]
                for key in ("fastest", "chosen")
            }
            rows.append(
                {
                    **order,
                    **best,
                    "setting": setting["setting"],
                    "of": measure,
                    "n": schedules,
                    "wrong": wrong,
                }
            )
    return table_of(rows, RANKS)
