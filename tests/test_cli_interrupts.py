"""Ctrl-C during a run keeps what there is so far."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from commands import Said
from forked_commands import ForkedCommand
from moesched.trace import check_trace
from patience import PATIENCE_SECONDS
from test_faulty_policies import line_of


def interrupt(arguments: Sequence[object], *, after: str, by: signal.Signals = signal.SIGINT) -> Said:
    """Run a command in a process of its own and send it a signal as soon as `after` stands in its output."""
    with TemporaryDirectory() as folder:
        command = ForkedCommand(Path(folder), arguments)
        command.wait_for(after)
        command.send(by)
        return command.end()


ENDLESS_POLICIES = Path(__file__).parent / "faulty" / "endless.py"
ENDLESS = ("--max-new-tokens", 150_000)


@pytest.mark.parametrize(
    ("by", "code", "named"),
    [(signal.SIGINT, 130, ""), (signal.SIGTERM, 143, " (SIGTERM)"), (signal.SIGHUP, 129, " (SIGHUP)")],
)
def test_a_signal_keeps_the_text_so_far_and_the_report_and_leaves_nothing_else(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: signal.Signals, code: int, named: str
) -> None:
    for each in ("out", "tmp", "cache"):
        (tmp_path / each).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("MOESCHED_CACHE", str(tmp_path / "cache"))
    report = tmp_path / "out" / "report.json"
    arguments = ["run", model, "--policy", "cgopipe", "--prompt", "abc", *ENDLESS, "--report", report]
    said = interrupt(arguments, after="abc", by=by)
    assert said.code == code
    assert said.out.startswith("abc")
    assert "tokens/s" in said.out
    assert re.search(rf"^moesched: interrupted{re.escape(named)} after \d+ tokens$", said.err, re.MULTILINE)
    assert "Traceback" not in said.err
    assert json.loads(report.read_text())["interrupted"] is True
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["report.json"]
    assert [each.name for each in (tmp_path / "tmp").iterdir()] == []
    assert [each.name for each in (tmp_path / "cache").rglob("*") if each.is_file()] in (
        [],
        ["expert-kernel.json"],
    )


def test_ctrl_c_keeps_tokens_trace_and_page(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESCHED_LOG", "info")
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    arguments = ["run", model, "--policy", "cgopipe", "--prompt-ids", "1,2;3;4", "--batch-size", 2, *ENDLESS]
    said = interrupt([*arguments, "--json", "--trace", trace, "--report", page], after="first token")
    assert said.code == 130
    assert "Traceback" not in said.err
    assert said.json["interrupted"] is True
    assert [len(tokens) < 150_000 for tokens in said.json["tokens"]] == [True] * 3
    assert said.json["tokens"][2] == []
    assert check_trace(trace) == []
    assert "The run was interrupted" in page.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "trace.json"]


@pytest.mark.parametrize("name", ["NeverEnds", "AwaitsOneHandleForEver", "NeverEndsOnHardware"])
def test_the_first_ctrl_c_ends_a_policy_that_does_not_end_and_names_its_line(
    no_text: Path, name: str
) -> None:
    marked = line_of(ENDLESS_POLICIES.read_text(), name, "#!")
    policy = f"{ENDLESS_POLICIES}:{name}"
    said = interrupt(["run", no_text, "--policy", policy, "--prompt-ids", "1,2;3"], after="decoding")
    assert said.code == 130
    named = re.search(r"interrupted in the policy.*endless\.py:(\d+)\n", said.err)
    assert named is not None, said.err
    assert int(named[1]) in range(marked - 2, marked + 1)  # the loop, or the print before it
    assert "Traceback" not in said.err


@pytest.mark.skipif(sys.platform != "linux", reason="needs setsid of util-linux")
def test_a_closed_terminal_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    """The progress bar is on the terminal, and cannot be written any more."""
    leader, terminal = pty.openpty()
    out = str(tmp_path / "machine.toml")
    command = ["setsid", "--ctty", sys.executable, "-m", "moesched", "calibrate", "--out", out]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        seen = b""
        while b"measuring" not in seen:
            seen += os.read(leader, 1000)
        os.close(leader)
        assert process.wait(PATIENCE_SECONDS) == 129
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs a terminal that ends with its other side")
def test_what_a_closed_terminal_cannot_show_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """The signal comes once, from elsewhere, so that the command ends in order and has a message."""
    leader, terminal = pty.openpty()
    command = [sys.executable, "-m", "moesched", "calibrate", "--out", str(tmp_path / "machine.toml")]
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    ) as process:
        os.close(terminal)
        seen = b""
        while b"measuring" not in seen:
            seen += os.read(leader, 1000)
        process.send_signal(signal.SIGSTOP)
        os.close(leader)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGCONT)
        assert process.wait(PATIENCE_SECONDS) == 129
