"""Bands: the range of a prediction's figures, from runs with one rate after another at its ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import moesched
from moesched import plan_model, simulate_model
from moesched.analysis.published import PREFILL_ERROR, PREFILL_SPREAD
from moesched.calibration.spread import FEWEST, LEAST, spread
from moesched.errors import BadInput
from moesched.inputs.lookup import find_shape
from moesched.machines import COST_FORMAT, CostPoint, Machine, load_machine, parse_machine
from moesched.machines.cost import cost_model
from moesched.machines.estimates import Estimate
from moesched.machines.sustained import at_peak, rates_of
from moesched.machines.toml_text import machine_toml
from moesched.models.layout import weight_layout
from moesched.planner.trial_run import trial_run
from moesched.planner.uncertainty import FIGURES, OMITTED, Figures, Uncertainty, uncertainty
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.listeners import Listener
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.testing import Case
from moesched.units import format_token_rate
from moesched.work import Work, WorkPart

T4 = load_machine("t4")
LAYOUT = weight_layout(find_shape("mixtral-8x7b"))
THROUGHPUT = "throughput_tokens_per_second"


def exactly(value: float) -> Estimate:
    return Estimate(low=value, expected=value, high=value)


def certain(machine: Machine, **uncertain: Estimate) -> Machine:
    """The machine with all rates known, apart from some rates of its GPU and of copies to it."""
    processors = {
        name: replace(each, rates={rate: exactly(found.expected) for rate, found in rates_of(each).items()})
        for name, each in machine.processors.items()
    }
    copies = uncertain.pop("copies", exactly(0.5))
    gpu = processors["gpu"]
    processors["gpu"] = replace(gpu, rates=gpu.rates | uncertain)
    links = [replace(link, sustained=copies) for link in machine.links]
    return replace(machine, processors=processors, links=links)


def ranks(machine: Machine, policy: str) -> list[Rank]:
    """Four requests to Mixtral 8x7B, whose weights stream."""
    made = make_policy(policy, {})
    return [Rank(plan_run(machine, LAYOUT, split_batch([64] * 4, 6, 4), made), made)]


def found(machine: Machine, policy: str = "layer_streaming") -> Uncertainty:
    [rank] = ranks(machine, policy)
    batch = rank.plan.batch
    run = trial_run(rank.plan, rank.policy, cost_model(machine, rank.plan.layout.dtype))
    expected = Figures(run.tokens_per_second(batch), run.step_seconds, run.prefill_seconds)
    return uncertainty(partial(ranks, machine, policy), expected)


@pytest.mark.parametrize("policy", ["layer_streaming", "cgopipe", "expert_cache", "twiddler"])
def test_the_expected_figure_lies_within_its_band_and_below_the_peak(policy: str) -> None:
    seen = found(T4, policy)
    assert list(seen.band) == list(FIGURES)
    assert all(low < expected < high for low, expected, high in seen.band.values())
    assert seen.at_peak is not None
    assert seen.at_peak.throughput_tokens_per_second > seen.band[THROUGHPUT][1]
    assert seen.at_peak.prefill_seconds < seen.band["prefill_seconds"][1]


def test_where_all_rates_are_known_only_what_the_model_omits_is_left() -> None:
    seen = found(certain(T4))
    omitted = dict.fromkeys(FIGURES, OMITTED) | {"prefill_seconds": PREFILL_SPREAD}
    for figure, (low, expected, high) in seen.band.items():
        assert [low, high] == pytest.approx([expected / omitted[figure], expected * omitted[figure]])
    assert seen.widest_rate is None


def test_a_run_that_waits_for_the_link_is_as_uncertain_as_the_link() -> None:
    seen = found(certain(T4, copies=Estimate(low=0.4, expected=0.5, high=0.6)))
    low, expected, high = seen.band["decode_step_seconds"]
    assert high / expected == pytest.approx(exp((log(0.5 / 0.4) ** 2 + log(OMITTED) ** 2) ** 0.5), rel=0.01)
    assert expected / low == pytest.approx(exp((log(0.6 / 0.5) ** 2 + log(OMITTED) ** 2) ** 0.5), rel=0.01)
    assert seen.widest_rate == "copies of pinned memory"


def test_a_rate_that_nothing_waits_for_widens_nothing() -> None:
    seen = found(certain(T4, moves=Estimate(low=0.6, expected=0.7, high=0.85)))
    low, expected, high = seen.band[THROUGHPUT]
    assert high / low == pytest.approx(OMITTED**2, rel=0.01)
    assert low < expected < high


@pytest.mark.parametrize("policy", ["layer_streaming", "expert_cache"])
def test_a_wider_rate_gives_a_wider_band(policy: str) -> None:
    def width(copies: Estimate) -> float:
        low, _, high = found(certain(T4, copies=copies), policy).band[THROUGHPUT]
        return high / low

    narrow, wide = Estimate(low=0.45, expected=0.5, high=0.55), Estimate(low=0.3, expected=0.5, high=0.8)
    assert OMITTED**2 < width(narrow) < width(wide)


def test_a_machine_without_classes_has_its_peak_where_it_is_expected() -> None:
    seen = found(at_peak(T4))
    assert seen.at_peak is not None
    assert seen.at_peak.throughput_tokens_per_second == pytest.approx(seen.band[THROUGHPUT][1])


# -- commands --------------------------------------------------------------------------------------


def simulated(**changes: Any) -> moesched.JobReport:
    options: dict[str, Any] = {
        "machine": "l4",
        "policy": "cgopipe",
        "workload": "mtbench",
        "gen": 4,
        **changes,
    }
    return simulate_model("mixtral-0.8b", batch_size=8, **options)


def planned() -> Any:
    return plan_model("mixtral-0.8b", machine="l4", gen=4, policy="layer_streaming")


@pytest.mark.parametrize("predict", [simulated, planned])
def test_predictions_have_their_band_in_json(predict: Callable[[], Any]) -> None:
    report = predict()
    assert set(report.band) == set(FIGURES) == set(type(report.at_peak).__struct_fields__)
    predicted = getattr(report, "predicted", report)
    assert report.band[THROUGHPUT][1] == predicted.throughput_tokens_per_second
    assert report.band["prefill_seconds"][1] == predicted.prefill_seconds
    widths = {figure: high / low for figure, (low, _, high) in report.band.items()}
    prefill = widths.pop("prefill_seconds")
    assert max(widths.values()) <= 2 < PREFILL_SPREAD**2 < prefill


def test_simulate_prints_the_band_and_the_rate_that_widens_it(command: Any) -> None:
    line = "simulate --model mixtral-0.8b --machine t4 --workload mtbench --batch-size 8 --gen 3 --policy cgopipe"
    said = command(*line.split())
    report = command(*line.split(), "--json").json
    low, expected, high = report["band"][THROUGHPUT]
    assert f"{format_token_rate(expected)} ({low:.4g} to {high:.4g})" in said.out
    assert "predicted from stated rates and estimated losses, not from measured costs" in said.out
    assert f"least certain rate: {report['widest_rate']}" in said.out
    assert f"at the stated rates: {report['at_peak'][THROUGHPUT]:.4g} tokens/s" in said.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--policy", "layer_streaming"),
        ("simulate", "--policy", "layer_streaming", "--workload", "mtbench", "--batch-size", 8),
    ],
)
def test_a_printed_prefill_says_by_how_much_published_ones_were_missed(
    command: Any, arguments: Sequence[Any]
) -> None:
    name, *options = arguments
    said = command(name, "--model", "mixtral-0.8b", "--machine", "l4", "--gen", 4, *options)
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    [prefill] = [number for number, line in enumerate(lines) if line.startswith("prefill ")]
    assert lines[prefill + 1] == f"prefill, usual error {PREFILL_ERROR:.0%}"


def test_measured_runs_have_no_band(command: Any) -> None:
    model = "examples/tiny-mixtral"
    said = command("run", model, "--policy", "resident", "--prompt", "a", "--max-new-tokens", 2, "--json")
    assert not {"band", "at_peak", "widest_rate"} & set(said.json)


class Estimates(Listener):
    """Writes down the runs for a band."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []

    def estimating(self, done: int, total: int) -> None:
        self.runs.append((done, total))


def test_a_prediction_without_a_band_takes_no_runs_for_one_and_has_the_same_figures(command: Any) -> None:
    with_band, without = Estimates(), Estimates()
    report = simulated(listener=with_band)
    other = simulated(listener=without, band=False)
    total = with_band.runs[0][1]
    assert with_band.runs == [(done, total) for done in range(total + 1)]
    assert without.runs == []
    assert (other.band, other.at_peak, other.widest_rate) == (None, None, None)
    assert other.step_seconds == report.step_seconds
    options = "simulate --model mixtral-0.8b --machine l4 --policy cgopipe --workload mtbench --gen 4 --no-band --json"
    assert command(*options.split()).json["band"] is None


# -- the spread of a calibration ---------------------------------------------------------------------------------------


SLOW = Estimate(low=0.5, expected=1.0, high=1.25)


def measured(**kinds: Estimate) -> Machine:
    """A machine on which every operation takes a millisecond, with this spread."""
    products = ("pre_attention", "route", "expert", "experts", "sample")
    others = ("attention", "attention call", "step attention", "attention prompt", "combine", "embed")
    names = [*products, *(f"resident {name}" for name in products), *others]
    table = [CostPoint(operation=name, size=1e6, seconds=1e-3, dtype="bfloat16") for name in names]
    table.append(CostPoint(operation="disk->host", size=1e6, seconds=1e-3))
    spreads = {name.replace("_", " "): found for name, found in kinds.items()}
    machine = load_machine("cpu-nvme")
    return replace(machine, cost_table=table, cost_format=COST_FORMAT, spread=spreads)


def test_the_spread_goes_from_the_lowest_to_the_highest_tenth() -> None:
    found = spread({"few rows": [0.5, *[0.9] * 10, *[1.0] * 20, *[1.1] * 10, 2.0]})
    assert (found["few rows"].low, found["few rows"].high) == (0.9, 1.1)


@pytest.mark.parametrize(("count", "factor"), [(2, FEWEST), (50, LEAST)])
def test_even_measurements_have_a_spread_and_few_of_them_a_larger_one(count: int, factor: float) -> None:
    found = spread({"attention": [1.0] * count})["attention"]
    assert [found.low, found.high] == pytest.approx([1 / factor, factor], rel=1e-3)


def test_a_kind_that_was_not_measured_has_none() -> None:
    assert spread({"attention": []}) == {}


def test_a_level_changes_only_its_kind_of_work() -> None:
    machine = measured(few_rows=SLOW)
    product = Work("sample", "cpu", parts=(WorkPart("sample", 1e6, 1),))
    attention = Work("attention", "cpu", parts=(WorkPart("attention", 0),))
    slower = cost_model(machine, "bfloat16", {"few rows": "low"})
    expected = cost_model(machine, "bfloat16")
    assert slower.work(product).seconds == 2 * expected.work(product).seconds
    assert slower.work(attention) == expected.work(attention)


def test_the_band_of_a_calibrated_machine_is_its_spread() -> None:
    def band(machine: Machine) -> tuple[float, ...]:
        def ranks() -> list[Rank]:
            policy = make_policy("resident", {})
            return [Rank(Case(name="desk", machine=machine, weights=2.0).plan(policy), policy)]

        found = uncertainty(partial(ranks), Figures(100.0, 1.0, 1.0))
        assert found.at_peak is None
        return found.band["throughput_tokens_per_second"]

    narrow, wide = band(measured()), band(measured(few_rows=SLOW))
    assert narrow == pytest.approx((100 / OMITTED, 100, 100 * OMITTED))
    assert wide[0] < narrow[0] and wide[2] > narrow[2]


def test_the_last_run_for_the_band_of_a_calibrated_machine_is_told_as_the_last() -> None:
    def ranks() -> list[Rank]:
        policy = make_policy("resident", {})
        return [Rank(Case(name="desk", machine=measured(few_rows=SLOW), weights=2.0).plan(policy), policy)]

    told: list[tuple[int, int]] = []
    uncertainty(ranks, Figures(100.0, 1.0, 1.0), lambda *runs: told.append(runs))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)], "the expected rate, and its low and high end"


def test_no_published_error_stands_below_a_prefill_that_rests_on_measured_costs(
    command: Any, tmp_path: Path
) -> None:
    machine = tmp_path / "measured.toml"
    machine.write_text(machine_toml(measured()))
    what = ("--model", "mixtral-0.8b", "--policy", "layer_streaming", "--gen", 4, "--no-band")
    job = (*what, "--machine", machine)
    trace, report, page = (tmp_path / name for name in ("trace.json", "report.json", "page.html"))
    simulate = ("simulate", *job, "--workload", "mtbench", "--batch-size", 4)
    said = command(*simulate, "--trace", trace, "--report", report).out
    command(*simulate, "--report", page)
    shown = [said, page.read_text(), command("plan", *job).out, command("compare", trace, report).out]
    assert all("prefill" in text and "usual error" not in text for text in shown)
    assert command("plan", *job, "--json").json["costs_measured"] is True


def test_a_machine_file_keeps_its_spread_and_one_the_wrong_way_round_is_refused() -> None:
    machine = measured(few_rows=SLOW)
    assert parse_machine(machine_toml(machine).encode(), "again") == machine
    wrong = machine_toml(measured(few_rows=Estimate(low=1.2, expected=1.0, high=0.8)))
    with pytest.raises(BadInput, match=r"spread\.few rows: low is 1\.2 and high is 0\.8: exchange them"):
        parse_machine(wrong.encode(), "wrong")
