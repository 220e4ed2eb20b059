"""Temporary files are removed in the end, and those of a killed process at the next start."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moesched.system.scratch import new_scratch_folder, remove, scratch_beside, scratch_folder, sweep
from moesched.system.whole_file import whole_file
from traces import largest_file

OWNER = """
import sys
from pathlib import Path
from moesched.system.scratch import new_scratch_folder, scratch_beside
made = new_scratch_folder(Path("."))
(made / "file").touch()
with scratch_beside(Path("out.json")) as partial:
    partial.touch()
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that no other process uses."""
    monkeypatch.setenv("MOESCHED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    (tmp_path / "outputs").mkdir()
    return tmp_path / "outputs"


@contextmanager
def owner(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has temporary files in a folder."""
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as it:
        assert it.stdout is not None
        assert it.stdout.readline() == "ready\n"
        try:
            yield it
        finally:
            it.kill()


def test_what_a_killed_process_left_is_swept_and_what_a_live_one_has_is_not(
    cache: Path, outputs: Path
) -> None:
    with owner(outputs) as lives:
        with owner(outputs) as dies:
            dies.kill()
            dies.wait()
            assert len(list(outputs.iterdir())) == 4
        sweep()
        assert len(list(outputs.iterdir())) == 2
        assert len(list((cache / "scratch").iterdir())) == 1
        lives.communicate("")
    assert len(list(outputs.iterdir())) == 1, "the folder that it never removed"
    sweep()
    assert list(outputs.iterdir()) == list((cache / "scratch").iterdir()) == []


def test_a_ledger_cannot_make_a_sweep_remove_other_files(cache: Path, tmp_path: Path) -> None:
    kept = tmp_path / "thesis.tex"
    kept.touch()
    (cache / "scratch").mkdir(parents=True)
    with owner(tmp_path) as process:
        (ledger,) = (cache / "scratch").iterdir()
        process.kill()
    cut_off = tmp_path / "moesched-notes"
    cut_off.mkdir()
    ledger.write_bytes(os.fsencode(kept) + b"\0relative.partial\0\0" + os.fsencode(cut_off))
    sweep()
    assert kept.exists() and cut_off.exists()


def test_a_sweep_leaves_files_of_a_machine_whose_name_begins_alike(cache: Path, outputs: Path) -> None:
    kept = outputs / ".report.json.partial"
    kept.touch()
    (cache / "scratch").mkdir(parents=True)
    (cache / "scratch" / f"{platform.node()}-2-1234-abcd").write_bytes(os.fsencode(kept) + b"\0")
    sweep()
    assert kept.exists()


def test_a_folder_is_private_and_goes_with_its_context(outputs: Path) -> None:
    with scratch_folder(outputs) as folder:
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "deep").mkdir()
    assert list(outputs.iterdir()) == []


def test_a_file_beside_its_target_goes_unless_it_was_renamed(outputs: Path) -> None:
    for keep in (False, True):
        with scratch_beside(outputs / "target") as partial:
            partial.touch()
            if keep:
                partial.rename(outputs / "target")
    assert [each.name for each in outputs.iterdir()] == ["target"]


def test_without_a_cache_folder_files_are_removed_all_the_same(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESCHED_CACHE", "/dev/null/cache")
    with whole_file(outputs / "report.json", "report") as file:
        file.write(b"{}")
    remove(new_scratch_folder(outputs))
    assert [each.name for each in outputs.iterdir()] == ["report.json"]


def test_where_the_disk_of_the_cache_is_full_other_disks_are_written(outputs: Path) -> None:
    with largest_file(0):
        folder = new_scratch_folder(outputs)
        assert folder.is_dir()
        remove(folder)
    assert list(outputs.iterdir()) == []


def test_a_forked_process_removes_nothing_of_its_parents(outputs: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from moesched.system.scratch import new_scratch_folder, remove_all
new_scratch_folder(Path("."))
if os.fork() == 0:
    remove_all()
    os._exit(0)
os.wait()
print(len(list(Path(".").iterdir())))
remove_all()
"""
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=outputs, capture_output=True, text=True, check=True
    )
    assert said.stdout == "1\n"
    assert list(outputs.iterdir()) == []
