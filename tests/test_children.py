"""Processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from patience import wait_until

PARENT = """
import subprocess, sys, time
from moesched.system.children import tied_child
child = tied_child([sys.executable, "-c", {child!r}])
print(child.pid, flush=True)
time.sleep({seconds})
"""
WAITS = "from moesched.system.children import end_with_parent; end_with_parent(); import time; time.sleep(60)"
STARTS_SLOWLY = f"import time; time.sleep(0.5); {WAITS}"


def wait_for_the_end_of(pid: int) -> None:
    wait_until(lambda: not is_alive(pid), f"the end of process {pid}")


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
    wait_for_the_end_of(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_a_stopped_child_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT.format(child=f"print(1, flush=True); {WAITS}", seconds=60)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(lambda: psutil.Process(pid).num_threads() > 1, "the thread that watches the parent")
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    wait_for_the_end_of(pid)
