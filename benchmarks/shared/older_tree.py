"""Trees of older commits beside this one, ready to be imported by processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.record.results import ROOT

SETUP = "from setuptools import setup; setup()"


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A worktree of an older commit, ready to be imported."""
    with TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", tree, commit], cwd=ROOT, check=True)
        try:
            with prepared(tree):
                yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


@contextmanager
def prepared(tree: Path) -> Iterator[Path]:
    """A tree with its compiled kernel, and with its plug-ins' names, which a run finds before those installed."""
    command = [sys.executable, "-c", SETUP, "-q", "egg_info", "build_ext", "--inplace"]
    subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield tree
    finally:
        for file in (tree / "moesched.egg-info").glob("*"):
            file.unlink()
        (tree / "moesched.egg-info").rmdir()


def variables(tree: Path) -> dict[str, str]:
    """Environment variables of a process that imports a tree; its cache is its own, as formats of files change."""
    cache = tree.parent / "cache"
    cache.mkdir(exist_ok=True)
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "MOESCHED_CACHE": str(cache)}
