"""Commands that are refused in one line, and leave nothing behind: refusals.md has them, with what they say."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from doc_blocks import agrees, blocks, commands

PAGE = Path(__file__).with_name("refusals.md")
TYPED = [each for block in blocks(PAGE) for each in commands(block)]


@pytest.mark.parametrize(("typed", "said"), TYPED, ids=[shlex.join(typed[1:]) for typed, _ in TYPED])
def test_a_command_is_refused_in_one_line_and_leaves_nothing_behind(
    command: Any, no_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.symlink_to(no_text)
    refusal = command(*typed[1:])
    assert (refusal.code, refusal.out) == (2, "")
    assert agrees(f"moesched: {said}", refusal.err), refusal.err
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]
