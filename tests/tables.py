"""Tables of the pages in tests/: published figures, names, and files that are refused."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from doc_blocks import blocks

TESTS = Path(__file__).parent


@cache
def table(page: str, title: str) -> list[tuple[Any, ...]]:
    """The rows of the table below a heading.

    A cell is code, as it stands, with `⏎` for the end of a line; or else a value of JSON, or a text.
    """
    text = (TESTS / page).read_text(encoding="utf-8")
    [section] = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    return [tuple(map(_value, re.split(r"(?<!\\)\|", row)[1:-1])) for row in rows]


def files(page: str) -> dict[str, str]:
    """The files of a page, by name."""
    return {block.file: block.text for block in blocks(TESTS / page) if block.file}


def _value(cell: str) -> Any:
    text = cell.strip().replace(r"\|", "|")
    if code := re.fullmatch("(`+)(.*)\\1", text):
        return code.group(2).replace("⏎", "\n")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
