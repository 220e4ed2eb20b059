"""Compiled parts that do not fit their sources: tests of them would be skipped, or call C with other arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from moesched.devices.native.compiled import why_unusable

ROOT = Path(__file__).resolve().parents[1]
REMEDY = f"build it again with `{Path(sys.executable).name} -m pip install --no-deps -e .`"
SOURCES = {
    "devices/native/_kernels*.so": "devices/native/*.[ch]",
    "moesched/_engine*.so": "moesched/engine.c",
    "moesched/system/_bound_call*.so": "moesched/system/bound_call.c",
}
"""The sources of each library, as patterns of paths below the root."""


def stale(root: Path = ROOT) -> str:
    """The libraries that are older than a source, or do not load, and the remedy; empty if none is."""
    found = [*_older(root), *filter(None, [_unusable()])]
    return f"{'; '.join(found)}: {REMEDY}" if found else ""


def _older(root: Path) -> Iterator[str]:
    for libraries, sources in SOURCES.items():
        newest = max(root.glob(sources), key=_changed)
        for library in root.glob(libraries):
            if _changed(library) < _changed(newest):
                yield f"{library.relative_to(root)} is older than {newest.relative_to(root)}"


def _unusable() -> str:
    return why_unusable() if any(ROOT.glob("devices/native/_kernels*.so")) else ""


def _changed(path: Path) -> float:
    return path.stat().st_mtime
