"""Processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import moesched
from forked_commands import ForkedCommand
from patience import PATIENCE_SECONDS, wait_for_end, wait_until

pytestmark = pytest.mark.slow

PARENT = """
import subprocess, sys, time
from moesched.system.children import tied_child
child = tied_child([sys.executable, "-c", {child!r}])
print(child.pid, flush=True)
time.sleep({seconds})
"""
WAITS = "from moesched.system.children import end_with_parent; end_with_parent(); import time; time.sleep(60)"
STARTS_SLOWLY = f"import time; time.sleep(0.5); {WAITS}"


@pytest.mark.parametrize("child", [WAITS, STARTS_SLOWLY], ids=["that runs", "that starts"])
@pytest.mark.parametrize("end", ["killed", "done"])
def test_a_child_ends_with_its_parent(child: str, end: str) -> None:
    seconds = 60 if end == "killed" else 0
    command = [sys.executable, "-c", PARENT.format(child=child, seconds=seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if end == "killed":
            parent.kill()
    wait_for_end(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_a_stopped_child_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT.format(child=f"print(1, flush=True); {WAITS}", seconds=60)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(lambda: psutil.Process(pid).num_threads() > 1, "the thread that watches the parent")
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    wait_for_end(pid)


# -- `moesched run --local`: real processes, of which none outlives the command --------------------------------------


def running(
    folder: Path, model: Path, policy: str, *more: object
) -> tuple[ForkedCommand, list[psutil.Process]]:
    """A command whose nodes have generated a token, and their processes."""
    asked = ("--policy", policy, "--prompt", "abc", "--max-new-tokens", 50_000, "--json")
    command = ForkedCommand(folder, ["run", model, "--local", 2, *asked, *more])
    command.wait_for("first token")
    return command, psutil.Process(command.pid).children()


def alive(nodes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end; an ended process that nobody waited for counts as ended."""
    _, left = psutil.wait_procs(nodes, timeout=PATIENCE_SECONDS)
    return [node for node in left if node.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands say when the first token is there."""
    monkeypatch.setenv("MOESCHED_LOG", "info")


@pytest.mark.usefixtures("logged")
def test_ctrl_c_ends_all_and_keeps_the_tokens_so_far(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    command, nodes = running(tmp_path, model, "ep_router_aided", "--trace", trace)
    assert len(nodes) == 2
    command.send(signal.SIGINT)
    said = command.end()
    assert said.code == 130
    assert said.json["interrupted"] is True
    assert 0 < len(said.json["tokens"][0]) < 50_000
    assert "Traceback" not in said.err
    assert moesched.check_trace(trace) == []
    assert alive(nodes) == []


@pytest.mark.usefixtures("logged")
def test_nodes_end_when_their_launcher_is_killed(model: Path, tmp_path: Path) -> None:
    command, nodes = running(tmp_path, model, "ep_naive")
    command.send(signal.SIGKILL)
    command.end()
    assert alive(nodes) == []
