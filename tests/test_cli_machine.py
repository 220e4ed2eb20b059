"""`moesched machine` and `moesched list parts`: files from the names of parts, and bad names in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesched.machines import load_machine, parse_machine
from moesched.machines.build import Parts, build_machine
from moesched.machines.parts import library

DESKTOP = (
    *("--gpu", "RTX 3090", "--pcie", "4x16", "--ram", "2xDDR5-5600"),
    *("--cpu", "Ryzen 7950X", "--disk", "7GB/s"),
)


def test_the_command_explains_itself_with_an_example(command: Any) -> None:
    said = command("machine", "--help").out
    assert 'moesched machine --gpu "RTX 3090" --pcie 4x16 --cpu "Ryzen 7950X"' in said
    assert "moesched list parts" in said


def test_the_command_writes_a_file_that_simulate_takes(command: Any, tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    said = command("machine", *DESKTOP, "--out", file)
    assert (said.code, said.err) == (0, "")
    assert f"Written to {file}" in said.out
    assert "Assumed: 64GiB of RAM: --ram '2x16GB DDR5-5600' would say another size" in said.out
    assert load_machine(str(file)).name == "RTX 3090, Ryzen 9 7950X"
    run = ("--policy", "expert_cache", "--workload", "uniform", "--batch-size", 1, "--gen", 2)
    predicted = command("simulate", "--model", "mixtral-0.8b", "--machine", file, *run, "--json")
    assert predicted.json["prefill_seconds"] > 0


def test_without_a_file_the_text_goes_to_standard_output(command: Any) -> None:
    text = command("machine", "--chip", "M1 Max", "--ram", "64GB").out
    assert text.startswith("# Built by: moesched machine --chip 'M1 Max' --ram 64GB\n")
    expected = build_machine(Parts(chip="M1 Max", ram="64GB")).machine
    assert parse_machine(text.encode(), "text") == expected


def test_json_has_the_machine_its_sources_and_what_was_assumed(command: Any) -> None:
    said = command("machine", *DESKTOP, "--json").json
    assert said["file"] is None
    assert said["machine"]["memories"]["gpu"] == {
        "capacity": "24GiB",
        "bandwidth": 936e9,
        "reserved": "700MB",
    }
    assert "GA102" in said["sources"]["processors.gpu"]
    assert len(said["assumed"]) == 1


def test_list_parts_names_them_with_their_figures(command: Any) -> None:
    lines = command("list", "parts", "rtx 3090").out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["RTX 3090 Ti", "RTX 3090"]
    assert "24GiB at 936 GB/s, 71 TFLOP/s in 16 bits, 350 W, PCIe 4x16" in lines[2]


def test_list_parts_has_every_part_with_its_source(command: Any) -> None:
    entries = command("list", "parts", "--json").json["parts"]
    parts = library()
    assert len(entries) == len(parts.gpus) + len(parts.chips) + len(parts.cpus) + len(parts.memories)
    assert all(entry["source"] for entry in entries)
