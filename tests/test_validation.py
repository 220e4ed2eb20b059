"""Validation on foreign machines: what its rows may set, what its summary counts, and whether rankings are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
from msgspec.structs import replace

from benchmarks.fidelity import fidelity
from benchmarks.fidelity._fidelity_tables import claims
from benchmarks.fidelity._ranking import Times, ranking
from benchmarks.fidelity._settings import Case
from benchmarks.fidelity._validation_rows import BY_SOURCE, Run, Skipped, mapped, published_rows
from benchmarks.fidelity._validation_summary import bars, counted, judged, ordered_pairs, spread, summary
from benchmarks.fidelity._validation_tables import rows_table
from benchmarks.fidelity.validation import machine_of, predicted_by
from benchmarks.record.results import RESULTS, stored
from benchmarks.shared import in_turn
from moesched.analysis.published import PREFILL_ERROR, PREFILL_SPREAD
from moesched.errors import BadInput
from moesched.machines import parts

MACHINES = Path(parts.__file__).parent
PREDICTED = sorted(
    name
    for name in BY_SOURCE
    if any(name in row.source and row.use in ("predict", "shown") for row in published_rows())
)


def row(source: str, setting: str, measured: float, predicted: float) -> dict[str, object]:
    """A row whose band is a tenth to either side."""
    return {
        "source": source,
        "model": "m",
        "setting": setting,
        "decode": judged(measured, 0.9 * predicted, predicted, 1.1 * predicted),
    }


@pytest.mark.parametrize("source", PREDICTED)
def test_a_rate_or_part_names_the_source_of_predicted_rows_only_where_other_rows_of_it_may_set_rates(
    source: str,
) -> None:
    files = [file for folder in ("rates", "library") for file in (MACHINES / folder).glob("*.toml")]
    naming = [file.name for file in [*files, *MACHINES.glob("*.toml")] if source in file.read_text()]
    may_set_rates = any(source in each.source and each.use == "fit" for each in published_rows())
    assert len(files) > 10
    assert naming == (["consumer-gpu.toml"] if may_set_rates else [])


def test_a_mapping_does_not_look_at_what_was_measured() -> None:
    for each in published_rows():
        assert mapped(each) == mapped(replace(each, prefill_tok_s="1", decode_tok_s="1"))


def test_every_row_is_mapped_to_a_machine_and_a_policy_or_says_why_not() -> None:
    for each in published_rows():
        run = mapped(each)
        if isinstance(run, Skipped):
            assert each.use not in ("predict", "shown")
        else:
            assert machine_of(run).processors


def test_a_row_is_predicted_by_the_simulator() -> None:
    run = next(mapped(each) for each in published_rows() if "B=4" in each.setting)
    assert isinstance(run, Run)
    report = predicted_by(run)
    assert (report.plan.batch_size, report.measured) == (4, False)
    assert report.band is not None


def test_each_source_counts_once() -> None:
    many = [row("many rows", str(n), 100, 150) for n in range(9)]
    few = [row("two rows", "a", 100, 110), row("two rows", "b", 100, 80), row("one row", "c", 100, 120)]
    found = summary([*many, *few])["decode"]
    assert found["sources"] == pytest.approx({"many rows": 0.5, "two rows": 0.15, "one row": 0.2})
    assert found["median_error"] == pytest.approx(0.2)
    assert (found["rows"], found["inside"]) == (12, 1)


def test_the_spread_of_errors_is_their_root_mean_square_as_a_factor() -> None:
    rows = [row("s", "a", 100, 200), row("s", "b", 100, 50), row("s", "c", 100, 100)]
    assert spread(rows, "decode") == pytest.approx(2 ** (2 / 3) ** 0.5)


def test_a_row_that_is_only_shown_counts_in_no_figure_and_its_table_says_so() -> None:
    rows = [{**row("s", "a", 100, 150), "use": "predict"}, {**row("s", "b", 100, 120), "use": "fit"}]
    shown = {**row("t", "c", 100, 101), "use": "shown", "machine": "x", "policy": "y"}
    assert counted([*rows, shown]) == counted(rows)
    assert counted(rows)["spread"]["decode"] > spread([*rows, shown], "decode")
    assert "yes, not counted" in rows_table({"rows": [shown]}, "predict", "shown")


def test_the_errors_that_commands_print_are_those_of_the_stored_validation() -> None:
    known = stored(RESULTS / "validation.json")
    assert round(known["summary"]["prefill"]["median_error"], 2) == PREFILL_ERROR
    assert round(known["spread"]["prefill"], 2) == PREFILL_SPREAD


def test_pairs_that_are_apart_are_in_order_where_the_faster_one_is_predicted_faster() -> None:
    rows = [
        row("s", "slow", 10, 12),
        row("s", "nearly as slow", 10.9, 1),
        row("s", "fast", 20, 30),
        row("other source", "x", 100, 0.5),
    ]
    pairs = {pair["settings"]: pair["right"] for pair in ordered_pairs(rows, "decode")}
    assert pairs == {("slow", "fast"): True, ("nearly as slow", "fast"): True}
    rows[2] = row("s", "fast", 20, 12)
    assert [pair["right"] for pair in ordered_pairs(rows, "decode")] == [False, True]


def test_bars_say_whether_they_are_reached() -> None:
    found = bars(summary([row("s", "a", 10, 10.5), row("s", "b", 20, 30)]))
    reached = {bar.words: bar.reached for bar in found}
    assert reached == {
        "decode: median error of the sources": False,
        "decode: share of rows inside the band": False,
        "decode: width of the band, widest": True,
        "pairs of settings in the right order": True,
    }


# -- rankings --------------------------------------------------------------------------------------


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

    told = fidelity.rankings([policy("a", [1.0], 1.0), policy("b", [1.2], 1.0), policy("c", [2.0], 2.0)])
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
        ran = in_turn.Taken([in_turn.Run(0.0, figures | {"lane host": 1.0})], [])
        said = {"decode": predicted, "total": 2.0, "lane host": lane, "low": 0.7, "high": 1.3}
        return fidelity.policy_result("p", ran, said, {})

    policies = [policy(1.05, 1.1), policy(1.2, 1.1), policy(1.05, 1.2)]
    settings = {"disk-one": {"policies": policies, "ranking": fidelity.rankings(policies)}}
    _, near, inside, lanes, *_ = claims({"settings": settings})
    assert [each.figure for each in (near, inside, lanes)] == ["2 of 3", "3 of 3", "2 of 3"]


def test_a_setting_of_which_no_case_fits_is_refused_with_a_reason() -> None:
    def plan(case: Case) -> NoReturn:
        raise BadInput(f"{case.policy} does not fit")

    cases = {name: Case(name, 0.1, 1) for name in ("resident", "flexgen")}
    with pytest.raises(BadInput, match=r"no case .* fits \(resident: resident does not fit\): give other"):
        fidelity.unfit(cases, plan)
