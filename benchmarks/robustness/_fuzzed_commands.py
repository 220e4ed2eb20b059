"""Commands that read a damaged file, each in a forked process of its own, so that libraries are imported once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, NoReturn

from moesched.cli.main import main
from mutations import mutated
from parsers import PARSERS, Bench
from small_models import small_model

SIMULATED = ("simulate", "--policy", "cgopipe", "--batch-size", "2", "--gen", "2")
MODEL, MACHINE, WORKLOAD = ("--model", "mixtral-0.8b"), ("--machine", "t4"), ("--workload", "uniform")
RUN = ("--policy", "resident", "--max-new-tokens", "2")

COMMANDS: dict[str, tuple[str, Callable[[Path], tuple[Any, ...]]]] = {
    "simulate --machine": ("machine", lambda file: (*SIMULATED, *MODEL, *WORKLOAD, "--machine", file)),
    "simulate --workload": ("workload", lambda file: (*SIMULATED, *MODEL, *MACHINE, "--workload", file)),
    "simulate --model": (
        "config.json",
        lambda file: (*SIMULATED, *MACHINE, *WORKLOAD, "--model", file.parent),
    ),
    "simulate --routing": (
        "routing profile",
        lambda file: (*SIMULATED, *MODEL, *MACHINE, *WORKLOAD, "--routing", file),
    ),
    "simulate --routing, a trace": (
        "routing trace of Megatron",
        lambda file: (*SIMULATED, *MODEL, *MACHINE, *WORKLOAD, "--routing", file),
    ),
    "roofline --machine": (
        "machine",
        lambda file: ("roofline", "--model", "mixtral-8x7b", "--machine", file),
    ),
    "compare, traces": ("trace", lambda file: ("compare", file, "--replayed")),
    "explain": (
        "trace",
        lambda file: ("explain", file, "--what-if", "no handovers", "--report", file.with_suffix(".html")),
    ),
    "compare, reports": ("report", lambda file: ("compare", file, file)),
    "run, weights": ("safetensors", lambda file: ("run", file.parent, *RUN, "--prompt-ids", "1,2")),
    "run, tokenizer": ("tokenizer.json", lambda file: ("run", file.parent, *RUN, "--prompt", "a text")),
    "run --prompts": ("prompts", lambda file: ("run", file.parent, *RUN, "--prompts", file)),
    "launch --hosts": (
        "cluster",
        lambda file: (
            "launch",
            "model",
            "--hosts",
            file,
            "--dry-run",
            "--policy",
            "ep_naive",
            "--prompt-ids",
            "1",
        ),
    ),
}
"""Commands by name: the parser whose file is damaged, and the arguments, given that file."""

WITH_MODEL = {"run, tokenizer", "run --prompts"}
"""Commands that need a model beside the file."""


class Ended(NamedTuple):
    """The end of one command."""

    code: int
    errors: str
    seconds: float
    memory_bytes: int

    def problem(self, most_seconds: float, most_bytes: int) -> str | None:
        """The reason why it did not end as it should."""
        if self.seconds > most_seconds:
            return f"{self.seconds:.1f} s"
        if self.memory_bytes > most_bytes:
            return f"{self.memory_bytes:,} bytes"
        lines = self.errors.splitlines()
        if self.code == 0 and not lines:
            return None
        one_line = len(lines) == 1 and lines[0].startswith("moesched: ")
        return None if self.code == 2 and one_line else f"exit code {self.code}: {self.errors[-600:]}"


def damaged_commands(name: str, count: int, folder: Path, seed: int) -> Iterator[Ended]:
    """Run a command `count` times, each on another damaged file."""
    parser, arguments = COMMANDS[name]
    if name in WITH_MODEL:
        small_model(folder, text=True, max_positions=2_000)  # no prompt is work for seconds
    bench = Bench(parser, folder)
    given = [str(each) for each in arguments(bench.file)]
    for number in range(count):
        bench.file.write_bytes(mutated(bench.example, Random(f"{seed}/{name}/{number}")))
        yield _run(given, folder / "errors.txt")


def _run(arguments: list[str], errors: Path) -> Ended:
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        _work(arguments, errors)
    _, status, used = os.wait4(child, 0)
    seconds = time.perf_counter() - began
    text = errors.read_text(errors="replace")
    return Ended(os.waitstatus_to_exitcode(status), text, seconds, used.ru_maxrss * 1024)


def _work(arguments: list[str], errors: Path) -> NoReturn:
    signal.alarm(60)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    code = main(arguments)
    sys.stdout.flush()
    os._exit(code)


assert all(parser in PARSERS for parser, _ in COMMANDS.values())
