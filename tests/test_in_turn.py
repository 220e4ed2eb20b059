"""Runs that are done again: by the load of others and rates such as that of memory, never by their figures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from benchmarks.fidelity import fidelity
from benchmarks.fidelity._fidelity_tables import claims, tables
from benchmarks.fidelity._fidelity_tables import rates as rates_of_policy
from benchmarks.shared.in_turn import Calibration, Figures, InTurn, Run, Taken, steadiest, taken_of
from benchmarks.shared.memory_rate import at_one_rate
from benchmarks.shared.pairs import in_turns
from moesched.machines import load_machine

FAST, SLOW = 75.0, 48.0


class Idle:
    """Nothing else runs."""

    def cores(self) -> float:
        return 0.0


def run(seconds: float, rates: Sequence[float] = (FAST, FAST), others: float = 0.0) -> Run:
    return Run(others, {"seconds": seconds}, {"memory_gbs": tuple(rates)})


def seconds(runs: Sequence[Run]) -> list[float]:
    return [each.figures["seconds"] for each in runs]


@pytest.mark.parametrize(
    ("rates", "equal"),
    [((), True), ((50.0,), True), ((50.0, 55.0), True), ((50.0, 52.0, 55.1), False), ((55.1, 50.0), False)],
)
def test_rates_are_one_if_they_differ_by_at_most_a_tenth(rates: Sequence[float], equal: bool) -> None:
    assert at_one_rate(rates) is equal


@pytest.mark.parametrize(
    ("rates", "calibration", "at_it"),
    [
        ((FAST, FAST), [FAST], True),
        ((FAST, SLOW), [FAST], False),
        ((SLOW, SLOW), [FAST], False),
        ((SLOW, SLOW), [FAST, SLOW, SLOW], True),
        ((SLOW, SLOW), [], True),
        ((FAST, SLOW), [], False),
        ((), [], True),
    ],
)
def test_a_run_is_at_the_rate_of_the_calibration_if_it_was_that_before_and_after(
    rates: Sequence[float], calibration: Sequence[float], at_it: bool
) -> None:
    assert run(1.0, rates).at_rates_of({"memory_gbs": calibration}) is at_it
    two = Run(0.0, {}, {"memory_gbs": (FAST, FAST), "disk_gbs": tuple(rates)})
    assert two.at_rates_of({"memory_gbs": [FAST], "disk_gbs": calibration}) is at_it


def test_the_least_disturbed_runs_at_the_rate_of_the_calibration_are_kept() -> None:
    runs = [
        run(1.0, others=0.3),
        run(2.0, (SLOW, SLOW)),
        run(3.0, others=0.1),
        run(4.0, (FAST, SLOW)),
        run(5.0),
    ]
    kept, repeated = taken_of(runs, 3, {"memory_gbs": [FAST]})
    assert (seconds(kept), seconds(repeated)) == ([5.0, 3.0, 1.0], [4.0, 2.0])


def test_the_last_runs_are_kept_if_the_rate_does_not_come_back() -> None:
    runs = [run(1.0, (SLOW, SLOW)), run(2.0), run(3.0, (SLOW, SLOW), others=0.05), run(4.0, (SLOW, SLOW))]
    assert seconds(taken_of(runs, 3, {"memory_gbs": [FAST]}).kept) == [2.0, 4.0, 3.0]
    assert seconds(taken_of([*runs, run(5.0, (SLOW, SLOW), others=0.5)], 3, {"memory_gbs": [FAST]}).kept) == [
        2.0,
        4.0,
        3.0,
    ]


def test_runs_are_chosen_alike_whatever_their_figures_are() -> None:
    rates = [(FAST, FAST), (SLOW, SLOW), (FAST, SLOW), (FAST, FAST), (SLOW, FAST), (FAST, FAST)]

    def kept(figures: Sequence[float]) -> list[int]:
        runs = [run(figure, each) for figure, each in zip(figures, rates, strict=True)]
        return [runs.index(each) for each in taken_of(runs, 4, {"memory_gbs": [FAST]}).kept]

    assert kept([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == kept([9.0, 0.1, 5.0, 2.0, 8.0, 3.0])


@pytest.mark.parametrize(
    ("rates", "runs"),
    [([], 2), ([SLOW, SLOW], 3), ([SLOW] * 100, 6), ([FAST, SLOW, SLOW, FAST], 4)],
)
def test_runs_at_another_rate_are_done_again_up_to_three_times_as_many(rates: list[float], runs: int) -> None:
    """Rates before and after each run in turn; once they are used up, that of the calibration."""
    left = iter(rates)
    in_turn = InTurn({"a": lambda: {"seconds": 1.0}}, 2, {"memory_gbs": lambda: next(left, FAST)}, Idle)
    in_turn.calibration_rates = {"memory_gbs": [FAST]}
    taken = in_turn.taken()["a"]
    assert (len(taken.kept), len(taken.kept) + len(taken.repeated)) == (2, runs)


def test_no_rate_is_measured_where_times_do_not_depend_on_it() -> None:
    taken = InTurn({"a": lambda: {"seconds": 1.0}}, 1, {}, Idle).taken()["a"]
    assert ([each.rates for each in taken.kept], taken.repeated) == ([{}], [])


def test_a_figure_with_memory_at_another_rate_says_so() -> None:
    figures = {"decode": 1.0, "total": 2.0, "recorded": 2.0, "replayed": 2.0, "replayed bare": 2.0}
    rates = [(FAST, FAST), (SLOW, SLOW), (SLOW, FAST)]
    runs = [
        Run(others, figures, {"memory_gbs": each, "disk_gbs": (3.0, 3.1)})
        for others, each in zip([0.0, 0.0, 0.2], rates, strict=True)
    ]
    taken, at_calibration = Taken(runs[:2], runs[2:]), {"memory_gbs": [FAST, FAST, SLOW], "disk_gbs": [3.05]}
    policy = fidelity.policy_result("resident", taken, {"decode": 1.1, "total": 2.0}, at_calibration)
    assert (policy["kept"], policy["kept_at_another_rate"], policy["repeated"]) == (2, 1, 1)
    assert policy["every_run"] == {
        "decode": [1.0, 1.0, 1.0],
        "other_cores": [0.0, 0.0, 0.2],
        "memory_gbs_before": [FAST, SLOW, SLOW],
        "memory_gbs_after": [FAST, SLOW, FAST],
        "disk_gbs_before": [3.0] * 3,
        "disk_gbs_after": [3.1] * 3,
    }
    rates_of = {f"calibration_{name}": each for name, each in at_calibration.items()}
    assert rates_of_policy(rates_of, policy) == {
        "memory_gbs": "75 (48 to 75)",
        "disk_gbs": "3.05 (3.05 to 3.05)",
        "core_gflops": "not recorded",
        "runs at these rates": "**1 of 2**, 1 repeated",
    }


def test_each_run_of_a_round_is_held_against_the_prediction_of_its_own_calibration() -> None:
    figures = {"total": 2.0, "predicted total": 2.0, "recorded": 2.0, "replayed": 2.0, "replayed bare": 2.0}
    times = [(1.0, 1.1), (2.0, 1.8), (4.0, 4.2)]
    readings = [(FAST, FAST, FAST, FAST), (SLOW, SLOW, SLOW, SLOW), (FAST, FAST, FAST, SLOW)]
    runs = [
        Run(0.0, figures | {"decode": decode, "predicted decode": predicted}, {"memory_gbs": each})
        for (decode, predicted), each in zip(times, readings, strict=True)
    ]
    policy = fidelity.result_of_rounds("resident", Taken(runs, []))
    assert policy["errors_percent"] == pytest.approx([10, -10, 5])
    assert policy["error_percent"] == {"decode": pytest.approx(5), "total": 0.0}
    assert policy["every_run"]["memory_gbs_after_calibration"] == [FAST, SLOW, SLOW]
    result = {"settings": {"disk-q8_0": {"policies": [policy]}}}
    assert [each.figure for each in claims(result)][1:] == [
        "1 of 1 (1 with memory, the disk or the cores at another rate)"
    ]
    assert "| +5.0 % | -10.0 to +10.0 % | **2 of 3** |" in tables(result)["coded"]


def interrupted_in(turn: int) -> InTurn[str]:
    """Runs of two things, with Ctrl-C during the second one's run of a turn."""
    calls = count(1)

    def measure() -> Figures:
        if next(calls) == turn:
            raise KeyboardInterrupt
        return {}

    return InTurn({"a": dict, "b": measure}, 3, {}, Idle)


def test_ctrl_c_keeps_the_runs_so_far_once_each_has_run() -> None:
    taken = interrupted_in(turn=2).taken()
    assert [len(taken[name].kept) for name in ("a", "b")] == [2, 1]
    with pytest.raises(KeyboardInterrupt):
        interrupted_in(turn=1).taken()


def test_a_turn_begins_with_readings_that_its_runs_are_compared_with() -> None:
    rates = {"memory_gbs": lambda: FAST}
    begins = iter([{"memory_gbs": (FAST, SLOW)}, {"memory_gbs": (FAST, FAST)}, {"memory_gbs": (FAST, FAST)}])
    taken = InTurn({"a": dict, "b": dict}, 2, rates, Idle, lambda: next(begins)).taken()
    assert [each.rates["memory_gbs"] for each in taken["a"].kept] == [(FAST,) * 4] * 2
    assert [each.rates["memory_gbs"] for each in taken["b"].repeated] == [(FAST, FAST, FAST, SLOW)]
    assert not list(begins), "no turn begins without runs"


def test_a_result_without_rates_of_memory_says_that_none_were_recorded() -> None:
    cells = rates_of_policy({}, {"policy": "resident"})
    assert list(cells.values()) == ["not recorded"] * 3 + [""]


@pytest.mark.parametrize(
    ("calibrations", "made", "kept"),
    [
        ([[]], 1, 0),
        ([[FAST, FAST, FAST, FAST, SLOW]], 1, 0),
        ([[FAST, SLOW], [SLOW, SLOW]], 2, 1),
        ([[FAST, SLOW], [FAST, SLOW, SLOW], [FAST, SLOW]], 3, 1),
    ],
)
def test_a_calibration_during_which_memory_changed_its_rate_is_made_again(
    calibrations: list[list[float]], made: int, kept: int
) -> None:
    machine = load_machine("t4")
    all_of_them = [Calibration(machine, {"memory_gbs": rates} if rates else {}) for rates in calibrations]
    left = iter(all_of_them)
    chosen = steadiest(lambda: next(left), lambda: next(left))
    assert chosen is all_of_them[kept]
    assert len(calibrations) - len([*left]) == made


def test_each_of_two_trees_goes_first_in_every_other_round_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []

    def measure(tree: str, row: str) -> int:
        calls.append(f"{row} {tree}")
        return len(calls)

    assert in_turns(measure, "before", "now", ["a"], range(3)) == {"a": [(4, 3), (5, 6), (8, 7)]}
    assert calls[2:6] == ["a now", "a before", "a before", "a now"]
