"""Packages of others with plug-ins, as pip installs them."""

from __future__ import annotations

from pathlib import Path

import pytest


def install(folder: Path, patch: pytest.MonkeyPatch, group: str, **named: str) -> None:
    """Install a package whose entry points of a group are these."""
    package = folder / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    entries = "".join(f"{name} = {target}\n" for name, target in named.items())
    (package / "entry_points.txt").write_text(f"[moesched.{group}]\n{entries}")
    patch.syspath_prepend(folder)
