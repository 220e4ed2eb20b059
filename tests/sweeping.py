"""Sweeps for tests: a few points of a small model that take milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moesched.sweeps.axes import Sweep, merged, sweep_of_options
from moesched.sweeps.sweep import Prepared, prepare

SHORT = ("sweep", "--model", "mixtral-0.8b", "--machine", "t4", "--gen", "1", "--batch-size", "1")
"""A command whose points are short; it lacks the policy."""

FAULTY = Path(__file__).parent / "faulty" / "sweeping.py"


def prepared(*, settings: tuple[str, ...] = (), **texts: str) -> Prepared:
    """A sweep of short points with these axes."""
    short = {"model": "mixtral-0.8b", "machine": "t4", "policy": "resident", "gen": "1", "batch_size": "1"}
    axes: dict[str, tuple[str, ...]] = {name: (text,) for name, text in (short | texts).items()}
    if settings:
        axes["settings"] = settings
    return prepare(merged(Sweep({}), sweep_of_options(axes)))


def lines_in(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results, without the time that the simulations took."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(({**line, "wall_seconds": 0} for line in lines), key=lambda line: str(line["key"]))
