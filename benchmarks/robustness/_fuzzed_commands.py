"""Commands that read a damaged file, each in a forked process of its own, so that libraries are imported once."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple, NoReturn

import msgspec

from moesched.cli.main import main
from mutations import mutated
from parsers import PARSERS, Bench
from small_models import small_model


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command line.

    Attributes:
        parser: the one whose file is damaged.
        with_model: whether there has to be a model beside the file.
    """

    parser: str
    line: str
    with_model: bool = False

    def words(self, file: Path) -> list[str]:
        """The arguments, given the file."""
        places = {"file": file, "folder": file.parent, "page": file.with_suffix(".html")}
        return [word.format_map(places) for word in shlex.split(self.line)]


COMMANDS = msgspec.toml.decode(
    Path(__file__).with_name("fuzzed_commands.toml").read_bytes(), type=dict[str, Command]
)


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
    command = COMMANDS[name]
    if command.with_model:
        small_model(folder, text=True, max_positions=2_000)  # no prompt is work for seconds
    bench = Bench(command.parser, folder)
    given = command.words(bench.file)
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


assert all(command.parser in PARSERS for command in COMMANDS.values())
