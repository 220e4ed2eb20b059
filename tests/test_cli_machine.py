"""`moesched machine` and `moesched list parts`: files from the names of parts, and bad names in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commands import refused
from moesched.machines import load_machine, parse_machine
from moesched.machines.build import Parts, build_machine
from moesched.machines.parts import library

DESKTOP = (
    "--gpu",
    "RTX 3090",
    "--pcie",
    "4x16",
    "--ram",
    "2xDDR5-5600",
    "--cpu",
    "Ryzen 7950X",
    "--disk",
    "7GB/s",
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


WITH_3090 = ("--gpu", "3090", "--cpu", "7950X")

REFUSED = [
    (
        ("--gpu", "RTX 9090", "--cpu", "7950X"),
        "no GPU 'RTX 9090' in the library: the nearest are RTX 5090, RTX 4090 and RTX 3090;",
    ),
    (("--gpu", "A100", "--cpu", "7950X"), "'A100' fits several: name one of A100 SXM 80GB, "),
    (("--gpu", "", "--cpu", "7950X"), "no GPU '' in the library: the nearest are "),
    (("--gpu", "M2 Ultra"), "'M2 Ultra' is not a GPU: use --chip 'M2 Ultra'"),
    (("--gpu", "0x RTX 3090", "--cpu", "7950X"), "--gpu '0x RTX 3090': give a number from 1 to 64"),
    (("--gpu", "3090"), "--gpu 'RTX 3090' needs the CPU beside it: add, for instance, --cpu "),
    (("--gpu", "3090", "--cpu", "Pentium"), "no CPU 'Pentium' in the library: the nearest are "),
    ((*WITH_3090, "--ram", "2xDDR9-5600"), "no memory type 'DDR9' in the library: it has DDR3, "),
    ((*WITH_3090, "--ram", "much"), "'much' is not RAM: write channels x type-speed, such as 2xDDR5-5600"),
    ((*WITH_3090, "--ram", "0xDDR5-5600"), "'0xDDR5-5600' is not RAM"),
    ((*WITH_3090, "--ram", "0GB"), "'0GB' is not RAM"),
    ((*WITH_3090, "--ram", "2xDDR5-0000"), "'DDR5-0000': DDR5 is sold with 3200 to 9600 million transfers"),
    ((*WITH_3090, "--ram", "4xDDR5-5600"), "Ryzen 9 7950X has 2 memory channels: write 2xDDR5-5600, or modules"),
    ((*WITH_3090, "--pcie", "4x0"), r"'4x0' is not PCIe: write generation \(1 to 6\) x lanes \(1, 2, 4, 8, 16\)"),
    ((*WITH_3090, "--pcie", "fast"), "'fast' is not PCIe"),
    ((*WITH_3090, "--disk", "0GB/s"), "'0GB/s' is not a rate: write a number and a unit"),
    ((*WITH_3090, "--disk", "0TB 7GB/s"), "'0TB 7GB/s' is not a disk"),
    ((*WITH_3090, "--disk", "fast"), "'fast' is not a disk: write its rate, such as 7GB/s"),
    ((*WITH_3090, "--weights", "disk"), "--weights disk needs a disk: add, for instance, --disk 7GB/s"),
    ((*WITH_3090, "--weights", "tape"), 'Invalid value "tape" for --weights'),
    ((), "a machine needs parts: name --gpu and --cpu"),
    (("--chip", "M2 Ultra"), "chip M2 Ultra is sold with up to 192GiB: say how much, such as --ram 192GiB"),
    (("--chip", "M2 Ultra", "--ram", "1TB"), "--ram '1TB': M2 Ultra is sold with up to 192GiB"),
    (("--chip", "M2 Ultra", "--ram", "2xDDR5-5600"), "the memory of M2 Ultra has one speed: give its size only"),
    (("--chip", "M2 Ultra", "--ram", "64GB", "--cpu", "7950X"), "chip M2 Ultra takes no --cpu: leave out --cpu"),
    (("--cpu", "7950X", "--pcie", "4x16"), "a machine without --gpu takes no --pcie"),
    ((*WITH_3090, "--out", "missing/my.toml"), "missing/my.toml: .*make its folder first"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_bad_parts_are_refused_in_one_line(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(command("machine", *options), said)


def test_list_parts_names_them_with_their_figures(command: Any) -> None:
    lines = command("list", "parts", "rtx 3090").out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["RTX 3090 Ti", "RTX 3090"]
    assert "24GiB at 936 GB/s, 71 TFLOP/s in 16 bits, 350 W, PCIe 4x16" in lines[2]


def test_list_parts_has_every_part_with_its_source(command: Any) -> None:
    entries = command("list", "parts", "--json").json["parts"]
    parts = library()
    assert len(entries) == len(parts.gpus) + len(parts.chips) + len(parts.cpus) + len(parts.memories)
    assert all(entry["source"] for entry in entries)
