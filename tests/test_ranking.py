"""Rankings: which pairs of policies the measurements can tell apart, and whether a prediction has their order."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.fidelity._ranking import Times, ranking
from benchmarks.fidelity.fidelity import claims, policy_result, rankings
from benchmarks.shared.in_turn import Run


def test_a_pair_whose_gap_is_within_the_noise_does_not_count() -> None:
    noisy = Times([1.0, 1.1, 1.2, 1.3, 1.4], predicted=2.0)
    near = Times([1.35, 1.4], predicted=1.0)
    far = Times([2.0], predicted=3.0)
    told = ranking({"noisy": noisy, "near": near, "far": far})
    assert (noisy.spread, near.spread) == pytest.approx((0.2, 0.025))
    assert (told["pairs"], told["pairs_beyond_noise"], told["concordant"]) == (3, 2, 2)


def test_pairs_in_the_other_order_are_named_with_their_gaps() -> None:
    told = ranking({"a": Times([1.0], 3.0), "b": Times([2.0], 2.4), "c": Times([4.0], 4.0)})
    assert told["concordant"] == 2
    assert told["discordant"] == [
        {"faster": "a", "slower": "b", "measured_percent": 100.0, "predicted_percent": -20.0}
    ]


def test_a_predicted_tie_is_no_order() -> None:
    assert ranking({"a": Times([1.0], 2.0), "b": Times([2.0], 2.0)})["concordant"] == 0


def test_regret_is_what_the_predicted_choice_costs() -> None:
    told = ranking({"a": Times([1.0], 3.0), "b": Times([1.1], 2.0)})
    assert (told["chosen"], told["fastest"], told["regret_percent"]) == ("b", "a", 10.0)
    assert ranking({"a": Times([1.0], 1.0)})["regret_percent"] == 0.0


def test_beyond_noise_only_those_count_that_were_surely_faster() -> None:
    noisy = Times([0.8, 1.0, 1.2], predicted=3.0)
    chosen = Times([1.1], predicted=1.0)
    told = ranking({"noisy": noisy, "chosen": chosen})
    assert (told["regret_percent"], told["regret_beyond_noise_percent"]) == (10.0, 0.0)
    told = ranking({"noisy": noisy, "chosen": chosen, "fast": Times([0.88], predicted=2.0)})
    assert told["regret_beyond_noise_percent"] == 25.0


def test_policies_with_the_same_schedule_count_once_with_all_their_runs() -> None:
    def policy(name: str, measured: list[float], predicted: float) -> dict[str, Any]:
        runs = {"decode": measured, "total": measured}
        return {"policy": name, "runs": runs, "predicted": {"decode": predicted, "total": predicted}}

    told = rankings([policy("a", [1.0], 1.0), policy("b", [1.2], 1.0), policy("c", [2.0], 2.0)])
    assert told["same_schedule"] == [["a", "b"]]
    assert (told["decode"]["pairs"], told["decode"]["concordant"]) == (1, 1)
    assert told["decode"]["regret_percent"] == 0.0


def test_settings_on_the_disk_are_judged_apart_from_emulated_ones() -> None:
    def setting(measured: float, predicted: float) -> dict[str, Any]:
        order = ranking({"a": Times([1.0], 1.0), "b": Times([measured], predicted)})
        return {"policies": [{"replay_error_percent": 0.0}], "ranking": {"decode": order, "total": order}}

    _, disk, lost, emulated, regret = claims(
        {"settings": {"disk-one": setting(2.0, 0.5), "emulated-one": setting(2.0, 2.0)}}
    )
    assert (disk.figure, lost.reached) == ("0.0 % of 1 pairs", False)
    assert (emulated.figure, regret.reached) == ("100.0 % of 1 pairs", True)


def test_a_run_is_near_its_prediction_or_only_inside_the_band() -> None:
    def policy(predicted: float, lane: float) -> dict[str, Any]:
        figures = {"decode": 1.0, "total": 2.0, "recorded": 2.0, "replayed": 2.0, "replayed bare": 2.0}
        ran = [Run(0.0, figures | {"lane host": 1.0})]
        said = {"decode": predicted, "total": 2.0, "lane host": lane, "low": 0.7, "high": 1.3}
        return policy_result("p", ran, said)

    policies = [policy(1.05, 1.1), policy(1.2, 1.1), policy(1.05, 1.2)]
    settings = {"disk-one": {"policies": policies, "ranking": rankings(policies)}}
    _, near, inside, lanes, *_ = claims({"settings": settings})
    assert [each.figure for each in (near, inside, lanes)] == ["2 of 3", "3 of 3", "2 of 3"]
