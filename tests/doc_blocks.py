"""The code and the commands of a page of the documentation, and a reader who types them in.

A block after a line that ends in `file.py`: is that file, of any kind. Other Python of a page is one module. A console
block has commands behind `$`, and what they print; `…` stands for any text in a line, or alone for any lines. Blocks
after a line that says why the tests do not run them are only read: CONTRIBUTING.md shows the mark.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

NOT_RUN = re.compile(r"\(((?:needs|takes|serves) [^;]+); the tests do not run it\)")
FILE = re.compile(r"`([\w.-]+\.\w+)`:$")
FENCE = re.compile(r"( *)(```+|~~~+)(.*)")


class Block(NamedTuple):
    """A fenced block, with its language, and the last line of text before it."""

    page: str
    line: int
    language: str
    text: str
    before: str

    @property
    def where(self) -> str:
        """Its place, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def why_not(self) -> str | None:
        """The reason for which the tests do not run it, such as "needs CUDA"."""
        found = NOT_RUN.search(self.before)
        return found.group(1) if found else None

    @property
    def runs(self) -> bool:
        """True if the reader can follow it anywhere, in a moment, without CUDA or other machines."""
        return self.why_not is None

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        found = FILE.search(self.before)
        return found.group(1) if found and self.language != "console" else None


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in their order, those of lists included."""
    found, before = [], ""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    for number, line in lines:
        if opened := FENCE.fullmatch(line):
            text = dedent("".join(f"{each}\n" for each in _to_the_fence(lines, opened.group(2))))
            found.append(Block(page.name, number, opened.group(3), text, before))
            before = ""
        elif line.strip():
            before = line
    return found


def _to_the_fence(lines: Iterator[tuple[int, str]], fence: str) -> Iterator[str]:
    for _, line in lines:
        if line.strip() == fence:
            return
        yield line
    raise AssertionError("the last block of the page has no end")


def commands(block: Block) -> list[tuple[list[str], str]]:
    """The commands of a console block, each with the output that the page shows."""
    found = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        typed, *shown = re.split(r"(?<!\\)\n", part, maxsplit=1)
        found.append((shlex.split(typed.replace("\\\n", ""), comments=True), "".join(shown)))
    return found


def outputs(page: Path) -> str:
    """Everything that the page's commands are said to print."""
    shown = [block for block in blocks(page) if block.language == "console" and block.runs]
    return "\n".join(output for block in shown for _, output in commands(block))


def agrees(shown: str, printed: str) -> bool:
    """Test whether a command printed what the page shows."""
    lines = [line.rstrip() + "\n" for line in printed.strip("\n").splitlines()]
    pattern = "".join(
        "(?:.*\n)*?" if line.strip() == "…" else re.escape(line.rstrip()).replace("…", ".*") + "\n"
        for line in shown.splitlines()
    )
    return re.fullmatch(pattern, "".join(lines)) is not None
