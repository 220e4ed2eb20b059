"""The band of a calibrated machine, from the spread that its calibration measured."""

from __future__ import annotations

from functools import partial

import pytest
from msgspec.structs import replace

from moesched.calibration.spread import FEWEST, LEAST, spread
from moesched.errors import BadInput
from moesched.machines import COST_FORMAT, CostPoint, Machine, load_machine, parse_machine
from moesched.machines.cost import cost_model
from moesched.machines.estimates import Estimate
from moesched.machines.toml_text import machine_toml
from moesched.planner.uncertainty import OMITTED, Figures, uncertainty
from moesched.plugins import make_policy
from moesched.runs.ranks import Rank
from moesched.tasks import Work, WorkPart
from moesched.testing import Case

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


def test_a_machine_file_keeps_its_spread_and_one_the_wrong_way_round_is_refused() -> None:
    machine = measured(few_rows=SLOW)
    assert parse_machine(machine_toml(machine).encode(), "again") == machine
    wrong = machine_toml(measured(few_rows=Estimate(low=1.2, expected=1.0, high=0.8)))
    with pytest.raises(BadInput, match=r"spread\.few rows: low is 1\.2 and high is 0\.8: exchange them"):
        parse_machine(wrong.encode(), "wrong")
