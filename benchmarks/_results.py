"""What all benchmarks share: a result file with the machine in it, and a guard against runs that do not end."""

from __future__ import annotations

import json
import os
import platform
import re
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"


class Stuck(Exception):
    """Something did not end in time."""


def within(seconds: float, run: Callable[[], T]) -> T:
    """What `run` returns or raises; it is left behind on its thread when it takes too long.

    Raises:
        Stuck: it took longer.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise Stuck(f"no end after {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]


def write_result(name: str, figures: dict[str, Any], *packages: str) -> Path:
    """Write figures to results/NAME.json, with this machine and the versions of `packages`; returns the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    text = json.dumps({"machine": this_machine(packages), **figures}, indent=2)
    path.write_text(text + "\n")
    return path


def named_for_machine(name: str) -> str:
    """The name of a result that depends on the machine: MOESCHED_MACHINE in the environment, or its host name."""
    machine = os.environ.get("MOESCHED_MACHINE") or platform.node() or "machine"
    return f"{name}-{re.sub('[^a-z0-9]+', '-', machine.lower()).strip('-')}"


def this_machine(packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """The machine that figures were measured on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor()
    )
