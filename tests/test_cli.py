"""The command line as a whole, and the commands that only list or write something."""

from __future__ import annotations

import errno
import re
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import structlog

from commands import refused
from moesched.cli.logs import send_logs_to_stderr


def test_the_version_is_printed(command: Any) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", command("--version").out)


def test_random_model_writes_a_model_that_runs(command: Any, tmp_path: Path) -> None:
    said = command("random-model", "mixtral-0.8b", tmp_path / "m", "--layers", 1, "--seed", 3, "--json")
    assert said.json["directory"] == str(tmp_path / "m")
    assert said.json["layers"] == 1
    said = command(
        "run", tmp_path / "m", "--policy", "cgopipe", "--prompt-ids", "1", "--max-new-tokens", 1, "--json"
    )
    assert len(said.json["tokens"][0]) == 1
    refused(command("random-model", "mixtral-0.8b", tmp_path / "m"), "exists already; remove it")
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
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[moesched.policies]\ntheirs = theirs_is_not_installed:Theirs\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entries = {entry["name"]: entry for entry in command("list", "policies", "--json").json["policies"]}
    assert "No module named 'theirs_is_not_installed'" in entries["theirs"]["problem"]
    assert entries["resident"]["problem"] is None
    assert re.search(r"theirs +cannot load: .*theirs_is_not_installed", command("list", "policies").out)


def test_the_summary_of_a_policy_is_its_first_sentence(command: Any) -> None:
    entries = {
        entry["name"]: entry["description"]
        for entry in command("list", "policies", "--json").json["policies"]
    }
    assert entries["ep_balanced"].endswith("the best assignment of the chosen experts.")
    assert entries["fate"] == "`prefetch_gate` with larger caches for the first layers."
    assert all(text.endswith(".") for text in entries.values())


class FullDisk(StringIO):
    """A file to which nothing can be written."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_logs_that_cannot_be_written_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    send_logs_to_stderr()
    structlog.get_logger().warning("on a full disk")
