"""The command line as a whole, and the commands that only list or write something."""

from __future__ import annotations

import errno
import importlib
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import structlog

from commands import refused
from moesched.cli.logs import send_logs_to_stderr
from moesched.machines import load_machine, parse_machine
from moesched.machines.build import Parts, build_machine
from moesched.machines.parts import library
from others_packages import install


def test_the_version_is_printed(command: Any) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", command("--version").out)


def test_random_model_writes_a_model_that_runs(command: Any, tmp_path: Path) -> None:
    shape = "granite-3.0-1b-a400m"  # with small layers
    said = command("random-model", shape, tmp_path / "m", "--layers", 1, "--seed", 3, "--json")
    assert said.json["directory"] == str(tmp_path / "m")
    assert said.json["layers"] == 1
    said = command(
        "run", tmp_path / "m", "--policy", "cgopipe", "--prompt-ids", "1", "--max-new-tokens", 1, "--json"
    )
    assert len(said.json["tokens"][0]) == 1
    refused(command("random-model", shape, tmp_path / "m"), "exists already; remove it")
    refused(
        command("random-model", "mixtral-1b", tmp_path / "n"),
        "unknown model shape 'mixtral-1b': did you mean mixtral-8x7b[?] Otherwise choose one of",
    )


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("policies", {"cgopipe", "layer_streaming", "resident"}),
        ("devices", {"torch"}),
        ("transports", {"inproc", "torch_distributed", "zeromq"}),
        ("models", {"mixtral-0.8b", "mixtral-8x7b", "mixtral-8x22b", "dbrx", "qwen3-30b-a3b", "olmoe-1b-7b"}),
        ("machines", {"auto", "t4"}),
        ("networks", {"10gbe", "rocev2", "infiniband"}),
        ("workloads", {"mtbench", "synthetic-reasoning", "summarization", "uniform"}),
    ],
)
def test_list_shows_what_is_there_in_a_word_and_a_line(command: Any, kind: str, names: set[str]) -> None:
    entries = command("list", kind, "--json").json[kind]
    assert names <= {entry["name"] for entry in entries}
    assert all(entry["description"] for entry in entries if entry["name"] in names)
    said = command("list", kind)
    assert said.code == 0
    assert all(name in said.out for name in names)


def test_list_shows_plugins_of_others_and_why_one_cannot_load(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "policies", theirs="theirs_is_not_installed:Theirs")
    entries = {entry["name"]: entry for entry in command("list", "policies", "--json").json["policies"]}
    assert "No module named 'theirs_is_not_installed'" in entries["theirs"]["problem"]
    assert entries["resident"]["problem"] is None
    assert re.search(r"theirs +cannot load: .*theirs_is_not_installed", command("list", "policies").out)


def test_the_summary_of_a_policy_is_its_first_sentence(command: Any) -> None:
    entries = {
        entry["name"]: entry["description"]
        for entry in command("list", "policies", "--json").json["policies"]
    }
    assert entries["ep_balanced"].endswith("the best assignment in each layer.")
    assert entries["fate"] == "The policy `prefetch_gate` with larger caches for the first layers."
    assert all(text.endswith(".") and len(text) <= 100 for text in entries.values())


class FullDisk(StringIO):
    """A file to which nothing can be written."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_logs_that_cannot_be_written_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    send_logs_to_stderr()
    structlog.get_logger().warning("on a full disk")


# -- new policies ----------------------------------------------------------------------------------------------------


def test_the_policy_runs_and_its_test_passes(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = command("new-policy", "ahead_of_time", "--dir", tmp_path / "mine", "--json")
    folder = tmp_path / "mine"
    assert said.json == {
        "policy": f"{folder}/ahead_of_time.py:AheadOfTime",
        "files": [f"{folder}/ahead_of_time.py", f"{folder}/test_ahead_of_time.py"],
    }
    monkeypatch.syspath_prepend(folder)
    written = importlib.import_module("test_ahead_of_time")
    tests = [value for name, value in vars(written).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()
    assert "NewPolicy" not in "".join(file.read_text() for file in folder.glob("*.py"))


def test_the_commands_that_it_prints_work(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = command("new-policy", "mine")
    lines = said.out.replace("\\\n", "").splitlines()
    (simulate,) = [line.split() for line in lines if "moesched simulate" in line]
    assert command(*simulate[1:], "--batch-size", 8).code == 0


@pytest.mark.parametrize("name", ["MyPolicy", "my-policy", "2nd", "../mine", "mine.py", "class", ""])
def test_a_name_that_no_module_has_is_refused(command: Any, name: str) -> None:
    refused(command("new-policy", name), "is no name of a module: give small letters")


def test_files_that_exist_are_not_replaced(command: Any, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("mine")
    refused(command("new-policy", "mine", "--dir", tmp_path), "test_mine.py exists: choose another name")
    assert [file.name for file in tmp_path.iterdir()] == ["test_mine.py"]


# -- machines from parts ---------------------------------------------------------------------------------------------


DESKTOP = (
    *("--gpu", "RTX 3090", "--pcie", "4x16", "--ram", "2xDDR5-5600"),
    *("--cpu", "Ryzen 7950X", "--disk", "7GB/s"),
)


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
    none = command("list", "parts", "abacus")
    assert (none.code, none.out, none.err) == (
        0,
        "",
        "moesched: none of the parts has 'abacus' in its name\n",
    )


def test_list_parts_has_every_part_with_its_source(command: Any) -> None:
    entries = command("list", "parts", "--json").json["parts"]
    parts = library()
    assert len(entries) == len(parts.gpus) + len(parts.chips) + len(parts.cpus) + len(parts.memories)
    assert all(entry["source"] for entry in entries)


# -- log lines of a library: never on standard output, where an application has its results --------------------------


SAYS = """
from moesched.system.logs import Log
Log("a").info("for those who ask")
Log("a").warning("slow", factor=2)
print("result")
"""


def test_warnings_go_to_standard_error_where_nobody_configured_logs() -> None:
    said = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, check=True)
    assert said.stdout == "result\n"
    [line] = said.stderr.splitlines()
    assert "slow" in line
    assert "factor" in line


def test_an_application_that_configures_structlog_gets_all_lines() -> None:
    configures = (
        "import structlog; structlog.configure(processors=[structlog.processors.KeyValueRenderer(['event'])])"
    )
    said = subprocess.run(
        [sys.executable, "-c", configures + SAYS], capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == ["event='for those who ask'", "event='slow' factor=2", "result"]
    assert said.stderr == ""
