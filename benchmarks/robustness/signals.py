"""Signals at random moments: does every command end with the right code, leave nothing behind, and keep its report?

Each command runs as a process of its own, with its own folders for temporary files, caches and outputs. At a random
moment of the time that it takes it gets SIGINT, SIGTERM or SIGHUP. Commands with nodes also get SIGKILL: then all nodes
must be gone in time. The result is written after each command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import psutil

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of
from moesched.cluster.cluster_file import Cluster, Host, LauncherAddress, cluster_toml
from moesched.cluster.curve.keys import SECRET_NAME, write_keys
from moesched.models.random_model import write_random_model

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_TO_VANISH = 2.0
SECONDS_TO_END = 60.0
MARK = "MOESCHED_BENCHMARK_CASE"
"""An environment variable that all processes of a case inherit."""

GENERATE = ["--prompt-ids", "1,2,3;4,5", "--max-new-tokens", "40", "--report", "out/report.json"]
TRACED = [*GENERATE, "--trace", "out/trace.json"]
SIMULATE = ["--model", "mixtral-8x7b", "--machine", "t4", "--workload", "mtbench"]
COMMANDS = {
    "run": ["run", "model", "--policy", "cgopipe", "--budget", "host=600MB", *TRACED],
    "run --local 2": ["run", "model", "--local", "2", "--policy", "ep_router_aided", *TRACED],
    "run --local 3": ["run", "model", "--local", "3", "--policy", "ep_balanced", *TRACED],
    "launch": ["launch", "model", "--hosts", "cluster.toml", "--key", "keys/launcher/moesched.secret",
               "--policy", "ep_naive", *TRACED],
    "simulate": ["simulate", *SIMULATE, "--policy", "twiddler", "--requests", "1000", "--report",
                 "out/report.json"],
    "plan": ["plan", *SIMULATE],
    "calibrate": ["calibrate", "--out", "out/machine.toml"],
    "random-model": ["random-model", "mixtral-0.8b", "out/model", "--layers", "3"],
    "prestack": ["prestack", "model", "out/model"],
}  # fmt: skip
WITH_NODES = ("run --local 2", "run --local 3", "launch")
NONE = {"cases": 0, "as_promised": 0}


def claims(result: Result) -> Iterator[Claim]:
    """Commands that get a signal at a random moment."""
    by_signal = result["by_signal"]
    killed = by_signal.get("SIGKILL", NONE)
    others = {key: sum(each[key] for name, each in by_signal.items() if name != "SIGKILL") for key in NONE}
    words = "commands with a signal at a random moment: right exit code, nothing left, reports readable"
    yield all_of(words, others["as_promised"], others["cases"])
    words = "launchers killed at a random moment: all nodes gone within 2 s"
    yield all_of(words, killed["as_promised"], killed["cases"])


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=COMMANDS,
    rounds=20,
    rounds_help="random moments for each command and signal",
    by_machine=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, print what fell short, write the result; 1 where a case did."""
    options = BENCHMARK.parse(arguments)
    cases: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        prepare(Path(folder))
        for name in options.only:
            cases += list(cases_of(name, Path(folder), options.rounds))
    return BENCHMARK.write(figures_of(cases))


def cases_of(name: str, folder: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Stop one command by each signal, `rounds` times, and print what falls short."""
    numbers = (*ENDING, *([signal.SIGKILL] if name in WITH_NODES else []))
    plans = [(number, moment) for number in numbers for moment in range(rounds)]
    last = seconds_of(folder, name)
    for number, moment in track(plans, f"stopping {name}"):
        share = Random(f"{name}/{number}/{moment}").random()
        case = one_case(folder, name, number, share * last)
        if case["problems"]:
            print(case, flush=True)
        yield case


def figures_of(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the cases, and those that fell short."""
    by_signal: dict[str, dict[str, int]] = {}
    for case in cases:
        counts = by_signal.setdefault(case["signal"], dict(NONE))
        counts["cases"] += 1
        counts["as_promised"] += not case["problems"]
    return {
        "by_signal": by_signal,
        "seconds_to_end": round(max(case["seconds_to_end"] for case in cases), 2),
        "codes": dict(Counter(str(case["code"]) for case in cases)),
        "fell_short": [case for case in cases if case["problems"]],
    }


def prepare(folder: Path) -> None:
    """Write a model, and a cluster of two nodes whose `ssh` is a shell on this machine."""
    write_random_model("mixtral-0.8b", folder / "model", layers=3)
    keys = {name: write_keys(folder / "keys" / name) for name in ("launcher", "0", "1")}
    hosts = [
        Host(name=f"node-{rank}", address="127.0.0.1", port=17_461 + rank, rank=rank, key=keys[str(rank)].public,
             secret=f"keys/{rank}/{SECRET_NAME}", command=f"{sys.executable} -m moesched")
        for rank in range(2)
    ]  # fmt: skip
    launcher = LauncherAddress(address="127.0.0.1", port=17_460, key=keys["launcher"].public)
    (folder / "cluster.toml").write_text(cluster_toml(Cluster(launcher=launcher, hosts=hosts)))
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\nfor command; do :; done\nexec sh -c "exec $command"\n')
    ssh.chmod(0o755)


def start(folder: Path, case: Path, name: str) -> subprocess.Popen[str]:
    """Start a command with folders of its own below `case`."""
    for each in ("tmp", "cache", "out"):
        (case / each).mkdir()
    for each in ("model", "keys", "cluster.toml", "bin"):
        (case / each).symlink_to(folder / each)
    environment = os.environ | {
        MARK: str(case),
        "TMPDIR": str(case / "tmp"),
        "MOESCHED_CACHE": str(case / "cache"),
        "MOESCHED_LOG": "info",
        "PATH": f"{case / 'bin'}:{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "moesched", *COMMANDS[name]]
    return subprocess.Popen(
        command, cwd=case, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def seconds_of(folder: Path, name: str) -> float:
    """The time that a command takes where nothing stops it."""
    with TemporaryDirectory() as case:
        begun = time.perf_counter()
        with start(folder, Path(case), name) as process:
            _, said = process.communicate()
        if process.returncode:
            raise SystemExit(f"{name} fails by itself: {said}")
        return time.perf_counter() - begun


def one_case(folder: Path, name: str, number: signal.Signals, seconds: float) -> dict[str, Any]:
    """Send one signal after some seconds; returns what came of it."""
    with TemporaryDirectory() as place:
        case = Path(place)
        with start(folder, case, name) as process:
            time.sleep(seconds)
            process.send_signal(number)
            sent = time.perf_counter()
            try:
                _, said = process.communicate(timeout=SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                said = f"it did not end: {process.communicate()[1]}"
        ended = time.perf_counter()
        left = processes_left(place)
        problems = [f"processes are left: {left}"] if left else []
        if number != signal.SIGKILL:
            problems += what_is_wrong(case, name, number, process.returncode, said)
        return {
            "command": name,
            "signal": number.name,
            "after_seconds": round(seconds, 2),
            "code": process.returncode,
            "seconds_to_end": round(ended - sent, 2),
            "problems": problems,
        }


def what_is_wrong(case: Path, name: str, number: int, code: int, said: str) -> list[str]:
    """Promises that the command broke."""
    found = []
    if not ended_in_pythons_start(number, code, said):
        if code not in (128 + number, -number, 0):
            found.append(f"exit code {code}")
        if "Traceback" in said or "Exception ignored" in said:
            found.append(said[-2000:])
    if left := [str(each.relative_to(case)) for each in (case / "tmp").iterdir()]:
        found.append(f"temporary files: {left}")
    partial = [each.name for each in (case / "out").iterdir() if each.name.startswith(".")]
    partial += [each.name for each in (case / "cache").rglob("*") if each.parent.name == "scratch"]
    partial += [each.name for each in (case / "cache").glob("moesched-*")]
    if partial:
        found.append(f"partial files: {partial}")
    report = case / "out" / "report.json"
    if "first token" in said and "report.json" in " ".join(COMMANDS[name]) and not report.exists():
        found.append(f"no report, although it began: {said[-500:]}")
    for file in (report, case / "out" / "trace.json"):
        if file.exists():
            try:
                msgspec.json.decode(file.read_bytes())
            except msgspec.DecodeError as error:
                found.append(f"{file.name}: {error}")
    return found


def ended_in_pythons_start(number: int, code: int, said: str) -> bool:
    """Test whether Ctrl-C came before any line of the program had run; Python then shows its own traceback."""
    return number == signal.SIGINT and code == 1 and "KeyboardInterrupt" in said and "moesched" not in said


def processes_left(case: str) -> list[str]:
    """Processes of a case that are still there after a moment."""
    deadline = time.monotonic() + SECONDS_TO_VANISH
    while (left := _marked(case)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _marked(case: str) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        try:
            if process.info["status"] != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == case:
                found.append(" ".join(process.info["cmdline"] or [])[:200])
        except psutil.Error:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
