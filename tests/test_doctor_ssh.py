"""`moesched doctor --hosts` with an ssh that fails in each way: the node, the reason and the remedy are named."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from clusters import cluster, host
from moesched.doctor.cluster_facts import cluster_facts
from moesched.doctor.cluster_probes import probe_cluster
from moesched.doctor.findings import Finding
from patience import wait_until
from test_doctor import WELL

Ssh = Callable[[str], Path]
HOST = host(0, ssh="me@mac-0", port=0, command="/opt/moesched")
VERSION = version("moesched")

KEY_CHANGED = """
echo '@@@@@@@@@@@@@@@@@@@@@@@@@@@' >&2
echo 'WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!' >&2
echo 'Host key verification failed.' >&2
exit 255
"""
REFUSALS = {
    "a password": (
        "echo 'me@mac-0: Permission denied (publickey).' >&2; exit 255",
        "password",
        "ssh-copy-id me@mac-0",
    ),
    "another key": (KEY_CHANGED, "Host key verification failed", "ssh-keygen -R"),
    "an unknown name": (
        "echo 'ssh: Could not resolve hostname mac-0: Name or service not known' >&2; exit 255",
        "Could not resolve hostname",
        "cluster file",
    ),
    "no ssh server": (
        "echo 'ssh: connect to host mac-0 port 22: Connection refused' >&2; exit 255",
        "runs no ssh server",
        "Remote Login",
    ),
    "a machine that is off": (
        "echo 'ssh: connect to host mac-0 port 22: Connection timed out' >&2; exit 255",
        "does not answer ssh",
        "keep it awake",
    ),
    "a reason of its own": (
        "echo 'kex_exchange_identification: Connection closed' >&2; exit 255",
        "is not reached by ssh: kex_exchange_identification",
        "ssh -o BatchMode=yes me@mac-0 true",
    ),
    "no reason": ("exit 255", "it says nothing", "ssh -o BatchMode=yes me@mac-0 true"),
    "a short PATH": (
        "echo 'sh: /opt/moesched: not found' >&2; exit 127",
        "does not find `/opt/moesched`",
        "whole path",
    ),
    "a broken installation": (
        "echo 'Traceback' >&2; echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1",
        "cannot start moesched: ModuleNotFoundError",
        "/opt/moesched --version",
    ),
    "another version": ("echo 0.0.1", f"has moesched 0.0.1, and this machine {VERSION}", "same version"),
}
"""Scripts in place of ssh, what the finding says, and its remedy."""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ssh:
    """Makes a program `ssh`, the first one on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def made(script: str) -> Path:
        program = tmp_path / "ssh"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return program

    return made


def found(seconds: float = 30) -> Finding:
    """The doctor's finding of the only node."""
    facts = replace(WELL, cluster=cluster_facts(cluster(HOST, port=0), seconds))
    (finding,) = (each for each in probe_cluster(facts) if each.about.startswith("ssh"))
    return finding


@pytest.mark.parametrize("name", REFUSALS)
def test_each_way_in_which_ssh_fails_is_named_with_its_remedy(ssh: Ssh, name: str) -> None:
    script, says, remedy = REFUSALS[name]
    ssh(script)
    trouble = found()
    assert trouble.is_trouble
    assert trouble.says.startswith("node 0 (mac-0) ")
    assert says in trouble.says
    assert remedy in trouble.remedy
    assert "\n" not in trouble.says + trouble.remedy


def has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_an_ssh_that_hangs_is_given_up_with_all_that_it_started(ssh: Ssh, tmp_path: Path) -> None:
    """Its own child, as of a ProxyCommand, keeps the output open."""
    ssh(f"sleep 60 & echo $! > {tmp_path}/child; wait")
    trouble = found(seconds=1)
    assert "no answer within 1 s" in trouble.says
    assert "keep it awake" in trouble.remedy
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: has_ended(child), "the end of what ssh started")


def test_ssh_is_asked_for_the_version_without_a_password_and_what_a_login_prints_is_no_trouble(
    ssh: Ssh, tmp_path: Path
) -> None:
    ssh(f'echo "$@" > {tmp_path}/asked; echo "Welcome to mac-0"; echo {VERSION}')
    assert not found().is_trouble
    assert (tmp_path / "asked").read_text() == "-o BatchMode=yes -- me@mac-0 /opt/moesched --version\n"


def test_without_ssh_on_the_path_that_is_the_trouble(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found().remedy == "install OpenSSH, or start `moesched node` yourself on each machine"
