"""From a command's start to its end with one greedy token of a prompt of 128, all weights in the page cache."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.peers.environment import Peer
from benchmarks.peers.protocol import LONGEST_REASON, Message, PeerFailed
from benchmarks.peers.registry import LLAMA_CPP, OURS
from benchmarks.peers.rounds import spread, undisturbed, wait_for_quiet
from benchmarks.record.benchmark import children_seconds
from moesched.calibration.timing import OtherLoad
from moesched.system.cores import usable_cores

SOURCE = Path(__file__).with_name("first_token.c")
PROMPT = [7 * number + 1 for number in range(128)]
SECONDS = 120


def compare(model: Path, rounds: int) -> dict[str, Any]:
    """Seconds of everybody's command, in turn; the first round only warms up."""
    commands: dict[str, Callable[[], Sequence[str]]] = {
        OURS.name: lambda: our_command(model),
        LLAMA_CPP.name: lambda: llama_command(LLAMA_CPP, model),
    }
    rows: dict[str, dict[str, Any]] = {name: {} for name in commands}
    runs: dict[str, list[Message]] = {name: [] for name in commands}
    made = {name: made_or_failed(make, rows[name]) for name, make in commands.items()}
    for number in range(rounds + 1):
        for name, command in made.items():
            if command and "failed" not in rows[name]:
                wait_for_quiet()
                run = timed(command, rows[name])
                runs[name] += [run] * (number > 0)
    for name, each in runs.items():
        if each:
            rows[name]["seconds"] = spread([each[n]["seconds"] for n in undisturbed(each)])
            rows[name]["runs"] = each
    return rows


def made_or_failed(make: Callable[[], Sequence[str]], row: dict[str, Any]) -> Sequence[str]:
    """A command; empty, and the reason in the row, if it cannot be made."""
    try:
        command = make()
    except (PeerFailed, subprocess.CalledProcessError) as error:
        row["failed"] = str(error)[:LONGEST_REASON]
        return ()
    row["command"] = " ".join(Path(word).name if len(word) < 100 else "…" for word in command)
    return command


def timed(command: Sequence[str], row: dict[str, Any]) -> Message:
    """Seconds of a command, and the cores that others kept busy meanwhile; the row says why if it failed."""
    load, before, started = OtherLoad(), children_seconds(), perf_counter()
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    except (subprocess.SubprocessError, OSError) as error:
        row["failed"] = str(error)[:LONGEST_REASON]
    seconds = perf_counter() - started
    others = load.cores() - (children_seconds() - before) / seconds
    return {"seconds": seconds, "other_cores": round(max(0.0, others), 2)}


def our_command(model: Path) -> list[str]:
    """Ours, as users type it."""
    ids = ",".join(map(str, PROMPT))
    options = ["--policy", "resident", "--prompt-ids", ids, "--max-new-tokens", "1"]
    return [sys.executable, "-m", "moesched", "run", str(model), *options]


def llama_command(peer: Peer, model: Path) -> list[str]:
    """A small C program on the library that the peer's environment has, compiled there on first use."""
    folder = peer.python().parent.parent
    program, file = folder / SOURCE.stem, folder / f"{model.name}.gguf"
    if not file.exists():
        peer.start(str(model)).close()  # writes it
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        [packages] = folder.glob("lib/python*/site-packages")
        libraries = packages / "llama_cpp" / "lib"
        linking = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", f"-Wl,-rpath-link,{libraries}", "-lllama"]
        compiling = ["cc", "-O2", f"-I{packages / 'include'}", str(SOURCE), "-o", str(program), *linking]
        subprocess.run(compiling, check=True, capture_output=True)
    return [str(program), str(file), str(len(PROMPT)), str(usable_cores())]
