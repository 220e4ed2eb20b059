"""Traces that cannot be written: one line says why, and what was there before stays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moesched.errors import BadInput
from moesched.trace import check_trace, write_trace
from runs import FORTY_PERCENT, Run, virtual_run
from traces import largest_file


@pytest.fixture(scope="module")
def run() -> Run:
    """CGOPipe under 40 % of the weights: every kind of lane, transfers in two hops, views of many pages."""
    return virtual_run("cgopipe", budgets=FORTY_PERCENT)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full; this system has none")
def test_a_full_disk_is_said_in_one_line(run: Run) -> None:
    with pytest.raises(
        BadInput, match=r"^cannot write trace /dev/full: No space left on device: free some space"
    ):
        write_trace("/dev/full", run.recording, run.about)
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_disk_that_fills_while_writing_leaves_what_was_there_before(
    name: str, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(b"before")
    with largest_file(4096), pytest.raises(BadInput, match="File too large: raise the limit"):
        write_trace(path, run.recording, run.about)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("missing/trace.json", "No such file or directory: make its folder first"),
        ("file/trace.json", "Not a directory: a part of its path is a file"),
        ("folder", "Is a directory: it is a folder: name a file in it"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_named(
    place: str, complaint: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match=re.escape(f"cannot write trace {tmp_path / place}: {complaint}")):
        write_trace(tmp_path / place, run.recording, run.about)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


def test_a_link_to_a_trace_stays_a_link(run: Run, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "trace.json")
    write_trace(tmp_path / "link.json", run.recording, run.about)
    assert (tmp_path / "link.json").is_symlink()
    assert check_trace(tmp_path / "trace.json") == []
