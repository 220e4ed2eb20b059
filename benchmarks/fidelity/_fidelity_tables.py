"""Claims and tables of fidelity.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any

from benchmarks.fidelity._ranking import MEASURES, ranks
from benchmarks.fidelity._settings import CODED, PUBLISHED, SETTINGS
from benchmarks.record.claims import Claim, Result, all_of, at_most
from benchmarks.record.tables import across, markdown, shown, table_of

DECODE_BAR, LANE_BAR, OBSERVED_BAR = 10.0, 15.0, 15.0
"""Percent."""


def claims(result: Result) -> Iterator[Claim]:
    """Replays, predictions on the disk, and rankings, those on the emulated accelerator apart."""
    settings = result["settings"]
    errors = [abs(each["replay_error_percent"]) for one in settings.values() for each in one["policies"]]
    yield at_most("replay of a real run against its time, worst policy", max(errors), 1.0, "{:.2f} %")
    told = [each for one in settings.values() for each in one["policies"] if "inside" in each]
    if told:
        near = [abs(each["error_percent"]["decode"]) <= DECODE_BAR for each in told]
        yield _all("unseen runs whose decode time is predicted within 10 %", near, told)
        inside = [each["inside"] for each in told]
        yield _all("unseen runs whose decode time is inside its band", inside, told)
        lanes = [abs(worst_lane(each)[1]) <= LANE_BAR for each in told]
        yield _all("unseen runs whose lanes are all within 15 %", lanes, told)
    for names, words in ((CODED, "by coded weights"), (PUBLISHED, "of families at published widths")):
        if found := [each for name in names if name in settings for each in settings[name]["policies"]]:
            near = [abs(each["error_percent"]["decode"]) <= OBSERVED_BAR for each in found]
            yield _all(f"runs {words} whose decode time is predicted within 15 %", near, found)
    for place, words in (("disk", "real disk"), ("emulated", "emulated, durations from the cost model")):
        if there := [
            one["ranking"] for name, one in settings.items() if name.startswith(place) and "ranking" in one
        ]:
            yield from _order(words, there)


def _all(words: str, holds: Sequence[bool], policies: Sequence[Mapping[str, Any]]) -> Claim:
    """A count that is to be all; says how many are of runs with other rates of memory or disk than at calibration."""
    claim = all_of(words, sum(holds), len(holds))
    elsewhere = sum(each.get("kept_at_another_rate", 0) > 0 for each in policies)
    if not elsewhere:
        return claim
    return claim._replace(
        figure=f"{claim.figure} ({elsewhere} with memory, the disk or the cores at another rate)"
    )


def _order(words: str, there: Sequence[Mapping[str, Any]]) -> Iterator[Claim]:
    """The worse one of the two measures."""
    pairs = {each: sum(one[each]["pairs_beyond_noise"] for one in there) for each in MEASURES}
    right = {each: sum(one[each]["concordant"] for one in there) for each in MEASURES}
    share, count = min(
        (100 * right[each] / pairs[each] if pairs[each] else 100.0, pairs[each]) for each in MEASURES
    )
    said = f"{share:.1f} % of {count} pairs"
    yield Claim(f"distinct schedules predicted in their order ({words})", said, "≥ 95 %", share >= 95)
    regret = max(one[each]["regret_percent"] for one in there for each in MEASURES)
    yield at_most(f"regret of the predicted choice, worst setting ({words})", regret, 3.0, "{:.1f} %")


def worst_lane(policy: Mapping[str, Any]) -> tuple[str, float]:
    """The lane whose busy time is off the most, and its error in percent."""
    errors: dict[str, float] = policy["lane_error_percent"]
    return max(errors.items(), key=lambda each: abs(each[1]))


SETTING = {
    "setting": "{setting}",
    "model": "{model}",
    "machine": "{machine}",
    "room for weights": "{share_of_weights:.0%}",
    "batch": "{batch_size}",
    "micro-batch": "{micro_batch_size}",
    "new tokens": "{new_tokens}",
    "left out": "{left out}",
}
MEASURED_RATES = ("memory_gbs", "disk_gbs", "core_gflops")
RATES = {
    "memory at calibration, GB/s": "{memory_gbs}",
    "the disk, GB/s": "{disk_gbs}",
    "the cores, GFLOP/s": "{core_gflops}",
    "runs at these rates": "{runs at these rates}",
}
PREDICTION = {
    "setting": "{setting}",
    "policy": "{policy}",
    "decode measured, s": "{measured[decode]:.3f}",
    "predicted, s": "{predicted[decode]:.3f}",
    "error": "{error_percent[decode]:+.1f} %",
    "inside its band": "{band}",
    "lane that is off the most": "{worst}",
    **RATES,
}
OBSERVED_PREDICTION = {
    "model": "{model}",
    "policy": "{policy}",
    "decode measured, s": "{measured[decode]:.3f}",
    "predicted, s": "{predicted[decode]:.3f}",
    "error, median": "{error_percent[decode]:+.1f} %",
    "least and largest": "{errors}",
    "runs at one rate": "{runs at these rates}",
}


def tables(result: Result) -> dict[str, str]:
    """The tables of docs/fidelity.md."""
    settings = result["settings"]
    named = [{**each, "setting": name} for name, each in settings.items() if name not in (*CODED, *PUBLISHED)]
    policies = [{**each, "setting": one["setting"]} for one in named for each in one["policies"]]
    told = [
        {
            **each,
            "band": shown(each["inside"]),
            "worst": "{} {:+.1f} %".format(*worst_lane(each)),
            **rates(settings[each["setting"]], each),
        }
        for each in policies
        if "inside" in each
    ]
    bars = [[each.words, each.figure, each.bar, each.reached] for each in claims(result)]
    return {
        "bars": markdown(["measure", "value", "bar", "reached"], bars),
        "settings": table_of(({**each, "left out": ", ".join(each["left_out"])} for each in named), SETTING),
        "replays": across(policies, ["setting"], "{policy}", "{replay_error_percent:+.2f}"),
        "bare_replays": across(policies, ["setting"], "{policy}", "{bare_replay_error_percent:+.2f}"),
        "predictions": table_of(told, PREDICTION),
        "coded": table_of(_observed(settings, CODED), OBSERVED_PREDICTION),
        "families": table_of(_observed(settings, PUBLISHED), OBSERVED_PREDICTION),
        "ranks": ranks(named),
    }


def _observed(settings: Mapping[str, Any], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The predictions of those settings that were measured, with the weights or the name of the model."""
    for name in names:
        model = SETTINGS[name].weights or SETTINGS[name].published
        for each in settings.get(name, {}).get("policies", ()):
            yield {
                **each,
                "model": model,
                "errors": _ends(each.get("errors_percent")),
                "runs at these rates": at_these_rates(each),
            }


def _ends(errors: Sequence[float] | None) -> str:
    """The least and the largest error; empty for runs that have one prediction in common."""
    return f"{min(errors):+.1f} to {max(errors):+.1f} %" if errors else ""


def rates(setting: Mapping[str, Any], policy: Mapping[str, Any]) -> dict[str, str]:
    """Cells of the rates during the calibration, and of the runs that were kept and repeated for them."""
    cells = {name: _range(setting.get(f"calibration_{name}")) for name in MEASURED_RATES}
    return {**cells, "runs at these rates": at_these_rates(policy)}


def at_these_rates(policy: Mapping[str, Any]) -> str:
    """A cell with how many runs were at the rates of their calibration, and how many were repeated, if recorded."""
    if "kept" not in policy:
        return ""
    kept, elsewhere, repeated = (policy[key] for key in ("kept", "kept_at_another_rate", "repeated"))
    count = f"{kept - elsewhere} of {kept}"
    again = f", {repeated} repeated" if repeated else ""
    return f"**{count}**{again}" if elsewhere else f"{count}{again}"


def _range(readings: Sequence[float] | None) -> str:
    """The middle reading, and the least and the largest."""
    if not readings:
        return "not recorded"
    return f"{median_low(readings):.3g} ({min(readings):.3g} to {max(readings):.3g})"
