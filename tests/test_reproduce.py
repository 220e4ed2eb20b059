"""`moesched reproduce`: the paper's figures hang together, the fit meets its cells, the command says what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import moesched
from moesched.errors import BadInput
from moesched.machines.sustained import at_peak, rates_of
from moesched.planner.setting import UNLIMITED
from moesched.reproduce import Section
from moesched.reproduce.moe_lightning.attention import attention_section
from moesched.reproduce.moe_lightning.calibration import calibrate, predict_cell
from moesched.reproduce.moe_lightning.cpu_memory import MICRO_BATCH
from moesched.reproduce.moe_lightning.paper import Column, Paper, Row, moe_lightning
from moesched.reproduce.moe_lightning.policy_map import policy_map
from moesched.reproduce.moe_lightning.rate_factors import RateFactors, machine_at
from moesched.reproduce.moe_lightning.speedups import MOE_LIGHTNING
from moesched.reproduce.moe_lightning.systems import SYSTEMS, Predicted, predict, setting_of
from moesched.reproduce.moe_lightning.tables import Cell, accuracy
from moesched.reproduce.report import agrees
from moesched.requests.workloads import given_lengths, load_workload
from stored_results import StoredResults

pytestmark = pytest.mark.usefixtures("as_users_run")

PAPER = moe_lightning()


def all_cells() -> list[tuple[Column, Row]]:
    return [(column, row) for column in PAPER.cells for row in column.rows]


# -- the paper's figures -----------------------------------------------------------------------------------------------


def test_ratios_that_the_paper_prints_follow_from_the_cells_that_it_prints() -> None:
    checked = 0
    for printed in PAPER.printed_ratios:
        (column,) = (
            each
            for each in PAPER.cells
            if (each.table, each.workload, each.setting) == (printed.table, printed.workload, printed.setting)
        )
        rates = {row.name: row.tokens_per_second for row in column.rows}
        for name, ratio in printed.ratios.items():
            assert rates[printed.over] / rates[name] == pytest.approx(ratio, abs=0.011), (printed.where, name)
            checked += 1
    assert checked == 10


def test_a_run_of_the_artifact_that_is_a_cell_sets_no_rate() -> None:
    cells = {
        (row.system, column.workload, column.new_tokens, row.micro_batch_size): row.tokens_per_second
        for column, row in all_cells()
        if column.setting == "S1"
    }
    shared = []
    for of in PAPER.artifact:
        for run in of.runs:
            cell = cells.get((of.system, of.workload, run.new_tokens, run.micro_batch_size))
            if cell is not None:
                shared.append(run)
                assert run.requests * run.new_tokens / run.seconds == pytest.approx(cell, rel=0.01)
    assert len(shared) == 3
    assert not any(run.fit for run in shared)


def test_three_cells_of_synthetic_reasoning_on_s1_are_fitted_and_no_others() -> None:
    fits = {
        row.fit: (column.table, column.workload, column.setting, row.system) for column, row in all_cells()
    }
    del fits[None]
    where = ("Table 4", "synthetic-reasoning", "S1")
    assert fits == {
        "link": (*where, "DeepSpeed"),
        "kernels": (*where, "MoE-Lightning(p)"),
        "flexgen_attention": (*where, "FlexGen(c)"),
    }
    assert len(all_cells()) == 20


# -- calibration -------------------------------------------------------------------------------------------------------


def made_up(factors: RateFactors, micro_batches: int) -> Paper:
    """The fitted column alone, with few micro-batches, as if it had been measured with these factors."""
    column = PAPER.cells[0]
    rows = [replace(row, micro_batches=min(row.micro_batches, micro_batches)) for row in column.rows]
    rows = [
        replace(row, tokens_per_second=predict_cell(PAPER, column, row, factors).tokens_per_second)
        for row in rows
    ]
    return replace(PAPER, cells=[replace(column, rows=rows)])


def test_the_fit_finds_the_factors_that_its_three_cells_were_made_with() -> None:
    factors = RateFactors(link=0.8, kernels=0.2, flexgen_attention=0.05)
    found = calibrate(made_up(factors, 8))
    assert found.link == pytest.approx(factors.link, rel=2e-3)
    assert found.kernels == pytest.approx(factors.kernels, rel=2e-3)
    assert found.flexgen_attention == pytest.approx(factors.flexgen_attention, rel=5e-3)


def test_a_cell_that_no_rate_can_meet_is_refused() -> None:
    paper = made_up(RateFactors(link=0.8, kernels=0.2, flexgen_attention=0.05), 1)
    column = paper.cells[0]
    rows = [replace(row, tokens_per_second=1e6) if row.fit == "link" else row for row in column.rows]
    with pytest.raises(BadInput, match="DeepSpeed on S1 cannot be met by its rate of link"):
        calibrate(replace(paper, cells=[replace(column, rows=rows)]))


def test_factors_change_the_links_and_the_gpu_and_flexgens_host_only_where_flexgen_attends() -> None:
    machine, factors = (
        at_peak(PAPER.settings["S2"].described()),
        RateFactors(link=0.5, kernels=0.25, flexgen_attention=0.1),
    )
    ours = machine_at(machine, factors)
    assert ours.link("host", "gpu").bandwidth == 12e9
    assert ours.link("host", "pinned") == machine.link("host", "pinned")
    assert ours.memories["gpu"].bandwidth == 75e9
    assert ours.peak("gpu", "bfloat16") == 30.25e12
    assert (ours.memories["host"], ours.host) == (machine.memories["host"], machine.host)
    theirs = machine_at(machine, factors, attends_as_flexgen=True)
    assert theirs.memories["host"].bandwidth == 10e9
    assert theirs.memories["host"].capacity == machine.memories["host"].capacity


def test_moe_lightning_attends_slower_where_its_products_of_16_bits_have_no_wide_vectors() -> None:
    def attention(system: str, setting: str) -> float:
        where = PAPER.settings[setting]
        machine = setting_of(SYSTEMS[system], where, "mtbench", 32, None, requests=1).machine
        return rates_of(machine.host)["attention"].expected * machine.memories["host"].bandwidth

    assert attention("MoE-Lightning", "S1") == attention("MoE-Lightning(p)", "S1") == 2.7e9
    assert attention("MoE-Lightning(p)", "S2") == attention("FlexGen", "S1") > 30e9


# -- what is predicted -------------------------------------------------------------------------------------------------


def cell(system: str, paper: float, ours: float, column: int = 0, fit: str | None = None) -> Cell:
    row = Row(system=system, tokens_per_second=paper, micro_batch_size=1, micro_batches=1, fit=fit)
    predicted = Predicted(
        tokens_per_second=ours, batch_size=1, micro_batch_size=1, prefill_seconds=1.0, step_seconds=1.0,
        bound_by="accelerator", busy=1.0, weights_on_gpu=0.0, gpu_budget=1.0, host_bytes=0,
    )  # fmt: skip
    return Cell(column=PAPER.cells[column], row=row, predicted=predicted, as_drawn=predicted)


def test_the_order_of_cells_is_judged_within_a_column_and_only_where_they_are_far_apart() -> None:
    cells = [cell("a", 10, 10), cell("b", 11.9, 9), cell("c", 20, 9.5), cell("d", 1, 100, column=1)]
    judged = accuracy(cells)
    assert judged.pairs == 2, "a and c, b and c"
    assert judged.wrong == ["Table 4, synthetic-reasoning, S1, a and c"]


def test_the_median_error_leaves_fitted_cells_out() -> None:
    cells = [cell("a", 10, 10, fit="link"), cell("b", 10, 9), cell("c", 10, 12), cell("d", 10, 15)]
    assert (accuracy(cells).cells, accuracy(cells).median_error) == (3, 0.2)


@pytest.mark.parametrize(
    ("paper", "ours", "said"),
    [
        ((1.0, 1.0), (1.19, 1.19), True),
        ((1.0, 1.0), (1.21, 1.21), False),
        ((2.0, 4.0), (1.7, 1.7), True),
        ((2.0, 4.0), (3.0, 5.0), True),
        ((2.0, 4.0), (3.1, 5.0), False),
        ((2.0, 4.0), (1.0, 10.0), False),
        ((2.0, 5.0), (4.99, 5.0), False),
    ],
)
def test_figures_agree_within_a_fifth_and_ranges_where_half_of_each_lies_in_the_other(
    paper: tuple[float, float], ours: tuple[float, float], said: bool
) -> None:
    assert agrees(paper, ours) == said


@pytest.fixture(scope="module")
def policies() -> Section:
    return policy_map(PAPER, lambda what: None)


def test_the_policy_map_offloads_weights_for_a_fast_link_and_attends_on_a_fast_cpu(policies: Section) -> None:
    assert [claim.agrees for claim in policies.claims] == [True, True, True]
    base = [row for row in policies.rows if row["cpu_ratio"] == 1]
    assert {row["attention_on"] for row in base} == {"gpu"}
    assert [row["kv_on_cpu"] for row in base] == [0.0] * 5


# -- what was found ----------------------------------------------------------------------------------------------------


RESULTS = StoredResults("moe-lightning")
FACTORS = RateFactors(**{row["rate"]: row["share"] for row in RESULTS.found["calibration"]})


@pytest.mark.parametrize(
    ("table", "workload", "setting", "name"),
    [
        ("Table 4", "synthetic-reasoning", "S1", "MoE-Lightning(p)"),
        ("Table 4", "synthetic-reasoning", "S2", "DeepSpeed"),
        ("Table 5", "mtbench", "S1", "FlexGen, our policy"),
    ],
)
def test_cells_of_the_tables_are_computed_as_the_results_have_them(
    table: str, workload: str, setting: str, name: str
) -> None:
    (column,) = (
        each
        for each in PAPER.cells
        if (each.table, each.workload, each.setting) == (table, workload, setting)
    )
    (row,) = (each for each in column.rows if each.name == name)
    (found,) = RESULTS.rows(table.lower().replace(" ", "-"), workload=workload, setting=setting, system=name)
    computed = predict_cell(PAPER, column, row, FACTORS).tokens_per_second
    assert computed == pytest.approx(found["ours"], rel=2e-3)


def test_a_speedups_cell_is_computed_as_the_results_have_it() -> None:
    (found,) = RESULTS.rows(
        "speedups", setting="S1", new_tokens=32, system="MoE-Lightning(p)", sizes_by="its own search"
    )
    setting = setting_of(SYSTEMS["MoE-Lightning(p)"], PAPER.settings["S1"], "mtbench", 32, FACTORS)
    computed = predict(setting, *MOE_LIGHTNING["S1"])
    assert computed.batch_size == found["batch_size"]
    assert computed.tokens_per_second == pytest.approx(found["tokens_per_second"], rel=2e-3)


def test_a_cell_of_host_memory_is_computed_as_the_results_have_it() -> None:
    (found,) = RESULTS.rows("cpu-memory", system="MoE-Lightning(p)", share=0.8)
    requests = found["batch_size"]
    setting = setting_of(
        SYSTEMS["MoE-Lightning(p)"], PAPER.settings["S1"], "mtbench", 128, FACTORS, requests=requests
    )
    setting.budgets[setting.machine.host.memory] = UNLIMITED
    computed = predict(setting, requests // MICRO_BATCH, MICRO_BATCH)
    assert computed.tokens_per_second == pytest.approx(found["tokens_per_second"], rel=2e-3)
    assert computed.host_bytes / 1e9 == pytest.approx(found["host_gb"], rel=2e-3)


def test_a_cell_on_two_gpus_is_computed_as_the_results_have_it() -> None:
    (found,) = RESULTS.rows("scaling", setting="S6", new_tokens=32, system="MoE-Lightning(p)")
    where = PAPER.settings["S6"]
    computed = moesched.simulate_model(
        where.model,
        machine=machine_at(where.described(), FACTORS),
        policy="cgopipe",
        workload=given_lengths([load_workload("mtbench").longest], 32),
        requests=found["batch_size"],
        batch_size=found["batch_size"],
        micro_batch_size=found["micro_batch_size"],
        band=False,
    )
    assert computed.throughput_tokens_per_second == pytest.approx(found["tokens_per_second"], rel=0.02)


def test_cpu_attention_is_computed_as_the_results_have_it() -> None:
    for computed, found in zip(
        attention_section(PAPER, FACTORS).rows, RESULTS.rows("cpu-attention"), strict=True
    ):
        assert computed == pytest.approx(found, rel=2e-3)


def test_the_policy_map_is_computed_as_the_results_have_it(policies: Section) -> None:
    assert policies.rows == RESULTS.rows("policy-map")


def test_the_results_meet_the_bar_and_the_fitted_cells() -> None:
    assert RESULTS.found["accuracy"]["cells"] == 17
    assert RESULTS.found["accuracy"]["median_error"] <= 0.2
    assert RESULTS.found["accuracy"]["wrong"] == []
    fitted = [row for each in RESULTS.found["sections"] for row in each["rows"] if row.get("fitted")]
    assert len(fitted) == 3
    assert all(abs(row["error"]) < 0.001 for row in fitted)


# -- the command -------------------------------------------------------------------------------------------------------


def written(folder: Path, paper: str, sections: dict[str, tuple[int, list[bool]]], drawn: str) -> Any:
    """The report of these sections, with their numbers of rows and what their claims say; one picture is drawn."""
    found = json.loads((folder / "report.json").read_text())
    assert {"paper", "title", "calibration", "accuracy", "sections", "wall_seconds"} <= found.keys()
    assert found["paper"] == paper
    assert {
        each["name"]: (len(each["rows"]), [claim["agrees"] for claim in each["claims"]])
        for each in found["sections"]
    } == sections
    claims = [claim for each in found["sections"] for claim in each["claims"]]
    assert all({"where", "what", "paper", "ours", "agrees", "because"} == each.keys() for each in claims)
    assert (folder / f"{paper}-{drawn}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (folder / f"{paper}-{drawn}.svg").read_bytes().startswith(b"<?xml")
    return found


@pytest.mark.parametrize(
    ("paper", "sections", "says", "drawn"),
    [
        (
            "mac-cluster", {"table-6": (30, []), "packing": (13, [True] * 3)},
            "idle time after which an array is unwired", "packing",
        ),
        (
            "twiddler", {"microbenchmarks": (16, [False, True])},
            "an expert's weights, read by the GPU", "microbenchmarks",
        ),
    ],
)  # fmt: skip
def test_the_command_prints_writes_and_draws_sections(
    command: Any, tmp_path: Path, paper: str, sections: dict[str, Any], says: str, drawn: str
) -> None:
    report = tmp_path / "report.json"
    said = command("reproduce", paper, "--only", *sections, "--report", report, "--out", tmp_path)
    assert said.code == 0
    assert says in said.out
    written(tmp_path, paper, sections, drawn)


def test_the_command_prints_the_report_as_json_with_what_was_calibrated(command: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ("--only", "cpu-attention", "--report", report, "--out", tmp_path, "--json")
    printed = command("reproduce", "moe-lightning", *arguments).json
    sections = {"cpu-attention": (16, [False, True, False])}
    assert written(tmp_path, "moe-lightning", sections, "cpu-attention") == printed
    assert [row["rate"] for row in printed["calibration"]] == ["flexgen_attention", "link", "kernels"]
