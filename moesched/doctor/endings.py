"""Checks of runs in child processes: a proper end at Ctrl-C or for lack of memory, and a peak memory as predicted."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moesched.doctor.facts import Facts
from moesched.doctor.findings import Finding
from moesched.doctor.policy_runs import REPORT
from moesched.doctor.tiny_model import TINY
from moesched.inputs.lookup import find_machine
from moesched.machines.commented_toml import commented_toml

PATIENCE_SECONDS = 60.0
"""Seconds that a run may take to begin, and to end by itself."""
INTERRUPTED_SECONDS = 5.0
"""Seconds that a run may take to end after Ctrl-C."""
MAPPED = 6 * 10**9
"""Bytes that a CPU run may map in the test of running out of memory; its KV cache needs three times as many."""
NOT_TRIED_ON_MLX = (
    "is not tried on MLX: allocations pass its memory limit, and filling the machine would harm others"
)
NEW_TOKENS = 100_000
KV_BYTES = 2 * TINY.layers * TINY.attention.kv_heads * TINY.attention.head_dim * 4
"""Bytes of KV cache per token of the tiny model."""
EXIT_BY_SIGINT = 130
MOST_SLACK, LEAST_SLACK = 0.1, 64_000_000
"""Allowed error of a process's predicted memory: relative, and in bytes."""


def _command(model: Path, device: str, *more: str) -> list[str]:
    run = [sys.executable, "-m", "moesched", "run", str(model), "--device", device, "--foreign-machine"]
    return [*run, *more]


def check_memory(model: Path, device: str) -> Finding:
    """Run a model, and check that the peak memory of the run's process is not far above the prediction.

    On devices that do not predict the memory of the whole process, the finding says so.
    """
    arguments = ["--policy", "cgopipe", "--prompt-ids", "1,2,3;4,5", "--max-new-tokens", "8", "--json"]
    done = _finished(_command(model, device, *arguments))
    if done.returncode:
        return Finding(about="memory of a run", says=f"it fails: {_last(done.stderr)}", remedy=REPORT)
    process: dict[str, Any] = json.loads(done.stdout).get("process_bytes") or {}
    predicted, measured = process.get("predicted"), process.get("measured")
    if predicted is None or measured is None:
        return Finding(about="memory of a run", says="the process's own memory is not predicted here")
    return judge_peak("memory of a run", predicted, measured)


def judge_peak(about: str, predicted: int, measured: int) -> Finding:
    """Return the finding that states a measured and a predicted peak of memory, both given in bytes.

    The finding has a remedy only if the measured peak is above the predicted one by more than the allowed error.

    Args:
        about: the subject of the finding, such as the name of what was measured.
    """
    says = f"peak of {measured / 1e6:,.0f} MB, predicted {predicted / 1e6:,.0f} MB"
    if measured > predicted + max(MOST_SLACK * predicted, LEAST_SLACK):
        return Finding(about=about, says=says, remedy=f"lower budgets by the difference, and {REPORT}")
    return Finding(about=about, says=says)


def check_lack_of_memory(model: Path, device: str, facts: Facts, scratch: Path) -> Finding:
    """Check that a run whose KV cache does not fit in the device's memory ends with an error of one line.

    On the CPU, the check limits the process's address space to less than the cache takes; on a GPU, the cache is larger
    than the GPU's memory.

    Args:
        scratch: an existing folder for temporary files.
    """
    if facts.device == "mlx":
        return Finding(about="lack of memory", says=NOT_TRIED_ON_MLX)
    in_processor = facts.device == "cpu"
    wanted = 3 * MAPPED if in_processor else 2 * facts.cuda.gpus[0].total
    requests = 1 + wanted // (NEW_TOKENS * KV_BYTES)
    command = _command(model, device, "--policy", "resident", "--max-new-tokens", str(NEW_TOKENS))
    command += ["--machine", str(_boundless(device, scratch)), "--micro-batch-size", "1"]
    limit = MAPPED if in_processor else None
    prompts = ";".join(["1"] * requests)
    sizes = ["--prompt-ids", prompts, "--batch-size", str(requests)]
    done = _finished([*command, *sizes], address_space=limit)
    last = _last(done.stderr)
    if done.returncode in (1, 2) and "out of memory" in last and "Traceback" not in done.stderr:
        return Finding(about="lack of memory", says="ends a run with one clear line")
    return Finding(
        about="lack of memory", says=f"ends a run with code {done.returncode}: {last}", remedy=REPORT
    )


def _boundless(device: str, scratch: Path) -> Path:
    """Write a machine file for `device` that states a thousand times this machine's memory, and return its path.

    With this file no plan is refused for lack of memory.
    """
    from msgspec.structs import replace

    machine = find_machine("auto", device, foreign=True)
    tiers = {name: replace(tier, capacity=tier.nbytes * 1000) for name, tier in machine.memories.items()}
    file = scratch / "boundless.toml"
    toml = commented_toml(replace(machine, memories=tiers), {}, "More memory than there is")
    file.write_text(toml, "utf-8")
    return file


def check_interrupt(model: Path, device: str, scratch: Path) -> Finding:
    """Check that a run of the model ends within seconds of Ctrl-C, and that its report then has the results so far.

    Args:
        scratch: an existing folder for temporary files.
    """
    report = scratch / "interrupted.json"
    arguments = ["--policy", "cgopipe", "--prompt-ids", "1,2,3", "--max-new-tokens", str(NEW_TOKENS)]
    command = _command(model, device, *arguments, "--report", str(report))
    environment = os.environ | {"MOESCHED_LOG": "info"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    ) as process:
        try:
            began = begins(process)
            process.send_signal(signal.SIGINT)
            sent = time.monotonic()
            process.communicate(timeout=PATIENCE_SECONDS)
            seconds = time.monotonic() - sent
        except subprocess.TimeoutExpired:
            return Finding(about="Ctrl-C", says="does not end a run", remedy=REPORT)
        finally:
            process.kill()
    kept = report.is_file() and json.loads(report.read_bytes()).get("interrupted") is True
    if began and process.returncode == EXIT_BY_SIGINT and kept and seconds <= INTERRUPTED_SECONDS:
        return Finding(about="Ctrl-C", says=f"ends a run within {seconds:.1f} s, and keeps its results")
    says = f"ends a run with code {process.returncode} after {seconds:.1f} s, results kept: {kept}"
    if not began:
        says = f"is not tried: a run ended before its first token, or had none after {PATIENCE_SECONDS:.0f} s"
    return Finding(about="Ctrl-C", says=says, remedy=REPORT)


def begins(process: subprocess.Popen[bytes], patience: float = PATIENCE_SECONDS) -> bool:
    """Wait until a run logs "first token"; return False if the run's process ends without this line.

    Args:
        process: the run, with its standard error as a pipe.
        patience: seconds after which the process is killed if it has not logged the line.
    """
    assert process.stderr is not None
    watchdog = threading.Timer(patience, process.kill)
    watchdog.start()
    try:
        return any(b"first token" in line for line in process.stderr)
    finally:
        watchdog.cancel()


def _finished(
    command: Sequence[str], *, address_space: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. A command that takes too long is killed, and the returned standard error says so.

    Args:
        address_space: the largest number of bytes of address space that the command may map; None for no limit.
    """
    limit = None if address_space is None else partial(_limit_address_space, address_space)
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_SECONDS,
            check=False,
            preexec_fn=limit,
        )
    except subprocess.TimeoutExpired:
        problem = f"it did not end within {PATIENCE_SECONDS:.0f} s"
        return subprocess.CompletedProcess(command, -signal.SIGKILL, "", problem)


def _limit_address_space(nbytes: int) -> None:
    limit = settable_limit(nbytes, resource.getrlimit(resource.RLIMIT_AS)[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def settable_limit(nbytes: int, most: int) -> int:
    """Return `nbytes` as a limit of address space, or the hard limit `most` if lower: only root may go beyond that."""
    return nbytes if most == resource.RLIM_INFINITY else min(nbytes, most)


def _last(text: str) -> str:
    """Return the last line of a text; "it says nothing" for an empty text."""
    return (text.strip().splitlines() or ["it says nothing"])[-1]
