"""A run of the tests ends at once where a compiled part is older than its source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compiled_parts import SOURCES, stale


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Sources and libraries of one age."""
    for pattern in (*SOURCES, *SOURCES.values()):
        file = tmp_path / pattern.replace("*.[ch]", "a.h").replace("*", "")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (1, 1))
    return tmp_path


def test_libraries_as_new_as_their_sources_fit(tree: Path) -> None:
    assert stale(tree) == ""


@pytest.mark.parametrize(
    ("source", "library"),
    [("devices/native/a.h", "devices/native/_kernels.so"), ("moesched/engine.c", "moesched/_engine.so")],
)
def test_a_library_older_than_a_source_is_named_with_the_remedy(
    tree: Path, source: str, library: str
) -> None:
    os.utime(tree / source, (2, 2))
    assert stale(tree).startswith(f"{library} is older than {source}: build it again with `python")


def test_a_library_that_was_not_compiled_is_not_stale(tree: Path) -> None:
    for pattern in SOURCES:
        (tree / pattern.replace("*", "")).unlink()
    assert stale(tree) == ""
