"""Processes that end with the one that started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import moesched
from patience import PATIENCE_SECONDS, wait_until

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


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


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
    wait_until(lambda: not is_alive(pid), f"the end of process {pid}")


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_a_stopped_child_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT.format(child=f"print(1, flush=True); {WAITS}", seconds=60)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(lambda: psutil.Process(pid).num_threads() > 1, "the thread that watches the parent")
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    wait_until(lambda: not is_alive(pid), f"the end of process {pid}")


# -- `moesched run --local`: real processes, of which none outlives the command --------------------------------------


def start(model: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "moesched", "run", model, "--local", 2, *arguments]
    environment = os.environ | {"MOESCHED_LOG": "info"}
    return subprocess.Popen(
        [str(each) for each in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def nodes_once_it_runs(command: subprocess.Popen[str]) -> tuple[list[psutil.Process], str]:
    """The nodes' processes, when the first token is there, and what was said until then."""
    assert command.stderr is not None
    said = ""
    for line in command.stderr:
        said += line
        if "first token" in line:
            return psutil.Process(command.pid).children(), said
    pytest.fail(f"it ended before its first token: {said}")


def alive(nodes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end; an ended process that nobody waited for counts as ended."""
    _, left = psutil.wait_procs(nodes, timeout=PATIENCE_SECONDS)
    return [node for node in left if node.status() != psutil.STATUS_ZOMBIE]


def test_ctrl_c_ends_all_and_keeps_the_tokens_so_far(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    command = start(
        model,
        *("--policy", "ep_router_aided", "--prompt", "abc", "--max-new-tokens", 50_000),
        *("--json", "--trace", trace),
    )
    nodes, said = nodes_once_it_runs(command)
    assert len(nodes) == 2
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=PATIENCE_SECONDS)
    assert command.returncode == 130
    report = json.loads(out)
    assert report["interrupted"] is True
    assert 0 < len(report["tokens"][0]) < 50_000
    assert "Traceback" not in said + err
    assert moesched.check_trace(trace) == []
    assert alive(nodes) == []


def test_nodes_end_when_their_launcher_is_killed(model: Path) -> None:
    command = start(model, "--policy", "ep_naive", "--prompt", "abc", "--max-new-tokens", 50_000, "--json")
    nodes, _ = nodes_once_it_runs(command)
    command.kill()
    command.communicate(timeout=PATIENCE_SECONDS)
    assert alive(nodes) == []
