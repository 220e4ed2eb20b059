"""The code and the commands of a page of the documentation, and a reader who types them in.

A block of Python after a line that ends in `file.py`: is that file. A console block has commands behind `$`, and what
they print; `…` stands for any text in a line, or alone for any lines. Blocks after a line that is marked as not run by
the tests are left alone.
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from moesched.cli.main import main

NOT_RUN = "the tests do not run it"
FILE = re.compile(r"`(\w+\.py)`:$")


class Block(NamedTuple):
    """A fenced block, with its language, and the last line of text before it."""

    page: str
    line: int
    language: str
    text: str
    before: str

    @property
    def runs(self) -> bool:
        """Whether the reader can follow it anywhere, without CUDA or other machines."""
        return NOT_RUN not in self.before

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        found = FILE.search(self.before)
        return found.group(1) if found and self.language == "python" else None


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in their order."""
    found, before = [], ""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    for number, line in lines:
        if line.startswith("```"):
            text = "".join(f"{each}\n" for each in _to_the_fence(lines))
            found.append(Block(page.name, number, line.removeprefix("```"), text, before))
        elif line.strip():
            before = line
    return found


def _to_the_fence(lines: Iterator[tuple[int, str]]) -> Iterator[str]:
    for _, line in lines:
        if line == "```":
            return
        yield line


def commands(block: Block) -> list[tuple[list[str], str]]:
    """The commands of a console block, each with the output that the page shows."""
    found = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        typed, _, shown = part.replace("\\\n", "").partition("\n")
        found.append((shlex.split(typed), shown))
    return found


def outputs(page: Path) -> str:
    """Everything that the page's commands are said to print."""
    shown = [block for block in blocks(page) if block.language == "console" and block.runs]
    return "\n".join(output for block in shown for _, output in commands(block))


def agrees(shown: str, printed: str) -> bool:
    """Whether a command printed what the page shows."""
    lines = [line.rstrip() + "\n" for line in printed.splitlines()]
    pattern = "".join(
        "(?:.*\n)*?" if line.strip() == "…" else re.escape(line.rstrip()).replace("…", ".*") + "\n"
        for line in shown.splitlines()
    )
    return re.fullmatch(pattern, "".join(lines)) is not None


class Reader:
    """Does what a page says, in the current folder."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def follow(self, block: Block) -> None:
        """Write the file, or type the commands and compare what they print."""
        where = f"{block.page}:{block.line}"
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
            return
        assert block.language == "console", f"{where}: which file is this {block.language}?"
        for command, shown in commands(block):
            printed = self._typed(command)
            assert agrees(shown, printed), (
                f"{where}: {shlex.join(command)} prints:\n{printed}\nand the page shows:\n{shown}"
            )

    def _typed(self, command: list[str]) -> str:
        self._capture.readouterr()
        program, *arguments = command
        if program == "moesched":
            failed = main(arguments) != 0
            printed = "".join(self._capture.readouterr())
            assert failed == ("moesched: " in printed), printed
            return printed
        if program == "python":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", arguments)
                runpy.run_path(arguments[0], run_name="__main__")
            return self._capture.readouterr().out
        assert program == "pytest", f"nobody types {program}"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout
