"""Result files: where they are, and the machine and the sources that their figures depend on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MACHINES = {
    "spr": "Xeon, Sapphire Rapids",
    "zen3": "EPYC, Zen 3",
    "zen4": "EPYC, Zen 4",
    "zen5": "EPYC, Zen 5",
    "h100": "NVIDIA H100",
}
"""Titles of machines in tables, by the names in result files."""
SOURCES = {".py", ".toml", ".csv", ".c", ".h", ".js", ".css", ".html"}


def stored(path: Path) -> dict[str, Any]:
    """The result in a file; empty if there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def named_for_machine(name: str) -> str:
    """The name of a result that depends on the machine: MOESCHED_MACHINE in the environment, or its host name."""
    machine = os.environ.get("MOESCHED_MACHINE") or platform.node() or "machine"
    return f"{name}-{re.sub('[^a-z0-9]+', '-', machine.lower()).strip('-')}"


def machine_of(file: Path) -> str | None:
    """The title of a result file's machine; None for a file without a known machine."""
    return MACHINES.get(file.stem.split("-")[-1])


def this_machine(packages: Iterable[str] = ()) -> dict[str, Any]:
    """The machine that figures were measured on, and the versions of packages."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def commit() -> str:
    """The commit of this tree, marked where files but the results differ from it; empty outside a repository."""
    sources = ["--", ".", f":!{RESULTS.relative_to(ROOT)}"]
    head, changes = (
        subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
        for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", *sources])
    )
    return f"{head}-dirty" if changes else head


def source_hash(paths: Iterable[str]) -> str:
    """A hash of the contents of files, and of the sources in folders, given from the root of the tree."""
    digest = hashlib.sha256()
    for file in sorted(set(_sources(paths))):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def older_than_the_code(result: dict[str, Any]) -> bool:
    """Test whether the sources of a result, or of a part, changed since it was measured, or were not recorded."""
    recorded = [each.get("measures") for each in result.get("parts", {"": result}).values()]
    return any(each is None or source_hash(each["paths"]) != each["hash"] for each in recorded)


def _sources(paths: Iterable[str]) -> Iterator[Path]:
    for path in paths:
        place = ROOT / path
        if place.is_dir():
            yield from (each for each in place.rglob("*") if each.suffix in SOURCES)
        elif place.is_file():
            yield place


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor()
    )
