"""Result files: where they are, and the machine of their figures."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
OF_A_VERSION = RESULTS / "of_a_version"
"""Results that stay those of the commit that they name, until they are measured anew."""
MACHINES = {
    "spr": "Xeon, Sapphire Rapids",
    "zen3": "EPYC, Zen 3",
    "zen4": "EPYC, Zen 4",
    "zen5": "EPYC, Zen 5",
    "h100": "NVIDIA H100",
    "h200": "NVIDIA H200",
}
"""Titles of machines in tables, by the names in result files."""
LIBRARIES = {
    "grpcio",
    "mlx",
    "numpy",
    "playwright",
    "pyzmq",
    "simpy",
    "tokenizers",
    "torch",
    "transformers",
    "uvloop",
}
IN_LINES = re.compile(r"\[\n +([^][{}|]*?)\n +\]")
"""A list without lists inside, and without lines of tables."""


def stored(path: Path) -> dict[str, Any]:
    """The result in a file, or that of a version in its place; empty if there is none."""
    file = OF_A_VERSION / path.name if path.parent == RESULTS and not path.is_file() else path
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def store(result: dict[str, Any], path: Path) -> None:
    """Write a result at once; lists of numbers and words take one line."""
    begun = path.with_suffix(".part")
    begun.write_text(IN_LINES.sub(_in_one_line, json.dumps(result, indent=2, ensure_ascii=False)) + "\n")
    begun.replace(path)


def _in_one_line(found: re.Match[str]) -> str:
    return "[" + re.sub(r",\n +", ", ", found[1]) + "]"


def named_for_machine(name: str) -> str:
    """The name of a result that depends on the machine: MOESCHED_MACHINE in the environment, or its host name."""
    machine = os.environ.get("MOESCHED_MACHINE") or platform.node() or "machine"
    return f"{name}-{re.sub('[^a-z0-9]+', '-', machine.lower()).strip('-')}"


def machine_of(file: Path) -> str | None:
    """The title of a result file's machine; None for a file without a known machine."""
    return MACHINES.get(file.stem.split("-")[-1])


def this_machine() -> dict[str, Any]:
    """The machine that figures were measured on, and the versions of libraries."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **_versions(),
    }


@cache
def _versions() -> dict[str, str]:
    """The versions of libraries that figures depend on."""
    return {each.name: each.version for each in distributions() if each.name in LIBRARIES}


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


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor()
    )
