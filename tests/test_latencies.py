"""`moesched latencies`: the four microbenchmarks of Twiddler, and costs that were measured elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moesched.analysis.latency_picture import draw_latencies
from moesched.analysis.latency_table import latencies_of
from moesched.errors import BadInput
from moesched.inputs.lookup import find_machine
from moesched.machines import COST_FORMAT, CostPoint, Machine, load_machine, machine_names, parse_machine
from moesched.machines.cost import cost_model
from moesched.machines.local import this_processor, unified_machine
from moesched.machines.sustained import at_peak
from moesched.machines.toml_text import machine_toml

ADA = ("latencies", "--model", "mixtral-8x7b", "--machine", "rtx6000-ada")


def test_the_table_has_the_papers_four_workloads(command: Any) -> None:
    said = command(*ADA, "--tokens", 1, "--tokens", 64)
    rows = {line.split("  ")[0].strip() for line in said.out.splitlines()}
    assert said.code == 0
    assert rows >= {"weight copy", "activation copy", "gpu 1", "gpu 64", "cpu 1", "cpu 64"}
    assert "as its profile states" in said.out


def test_the_figures_are_those_of_the_cost_model_and_say_where_moving_pays(command: Any) -> None:
    report = json.loads(command(*ADA, "--json").out)
    seconds = {row["name"]: row["seconds"] for row in report["rows"]}
    assert seconds["weight copy"] == pytest.approx(352_321_536 / 24e9 + 10e-6)
    assert seconds["gpu 1"] == pytest.approx(352_321_536 / 120e9 + 5 * 5e-6)
    assert seconds["cpu 1"] == pytest.approx(352_321_536 / 67e9 + 15e-6 + 5 * 2e-6)
    threshold = latencies_of("mixtral-8x7b", "rtx6000-ada", tokens=[report["cheaper_moved"]])
    below = latencies_of("mixtral-8x7b", "rtx6000-ada", tokens=[report["cheaper_moved"] - 1])
    moved = [each.rows[0].seconds + each.rows[2].seconds for each in (threshold, below)]
    assert threshold.rows[3].seconds > moved[0]
    assert below.rows[3].seconds <= moved[1]


@pytest.mark.parametrize("machine", machine_names())
def test_every_machine_has_latencies(machine: str) -> None:
    assert all(each.seconds > 0 for each in latencies_of("dbrx", machine).rows)


@pytest.mark.parametrize(("name", "begins"), [("fig7.png", b"\x89PNG"), ("fig7.svg", b"<?xml")])
def test_figure_7_is_drawn(tmp_path: Path, name: str, begins: bytes) -> None:
    report = latencies_of("mixtral-8x7b", "rtx6000")
    for folder in ("one", "another"):
        (tmp_path / folder).mkdir()
        draw_latencies(report, tmp_path / folder / name)
    drawn = (tmp_path / "one" / name).read_bytes()
    assert drawn.startswith(begins)
    assert drawn == (tmp_path / "another" / name).read_bytes()


# -- costs that were measured on another machine -------------------------------------------------------------------


def measured_on(processor: str) -> Machine:
    machine = unified_machine(
        "desk",
        memory=1 << 30,
        disk=1 << 30,
        flops={"bfloat16": 1e12},
        memory_bandwidth=1e10,
        disk_bandwidth=1e9,
    )
    point = CostPoint(operation="expert", size=1, seconds=1.0, dtype="bfloat16")
    return msgspec.structs.replace(
        machine, measured_on=processor, cost_table=[point], cost_format=COST_FORMAT
    )


def test_a_calibration_of_another_machine_is_refused_for_a_run_unless_one_insists(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    file.write_text(machine_toml(measured_on("Abacus 1, 3 cores")))
    with pytest.raises(BadInput, match=r"was measured on Abacus 1, 3 cores, and this is .*--foreign-machine"):
        find_machine(str(file), "torch")
    assert find_machine(str(file), "torch", foreign=True).name == "desk"
    assert find_machine(str(file)).name == "desk", "a simulation is of that machine"
    assert cost_model(find_machine(str(file)), "bfloat16")
    elsewhere = msgspec.structs.replace(load_machine("t4"), measured_on="Abacus 1, 3 cores, T4")
    assert find_machine(elsewhere, "emulated") == elsewhere, "it is imitated"
    kept = msgspec.structs.replace(at_peak(load_machine("rtx6000")), measured_on="here")
    assert parse_machine(machine_toml(kept).encode(), "again") == kept, "and what experts read"


def test_this_machines_own_calibration_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOESCHED_CACHE", str(tmp_path))
    (tmp_path / "machine.toml").write_text(machine_toml(measured_on(this_processor())))
    assert find_machine("auto", "torch").measured_on == this_processor()
    (tmp_path / "machine.toml").write_text(machine_toml(measured_on("Abacus 1, 3 cores")))
    with pytest.raises(BadInput, match="moesched calibrate"):
        find_machine("auto", "torch")
