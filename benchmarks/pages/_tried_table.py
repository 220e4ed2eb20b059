"""The README's table of what has run where, from the files that `moesched doctor --device … --out FILE` wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.record.results import ROOT, stored
from benchmarks.record.tables import markdown

DOCTORS = ROOT / "docs" / "doctor"
COLUMNS = ("hardware", "device", "policies", "troubles")
NOT_YET: dict[str, Callable[[dict[str, Any]], bool]] = {
    "NVIDIA GPUs": lambda facts: facts["device"] == "cuda",
    "Apple silicon": lambda facts: facts["device"] == "mlx" and facts["metal"]["metal"],
    "several hosts": lambda facts: facts["cluster"] is not None,
}
"""Kinds of hardware, and whether a file is of one."""
MOST_TROUBLES = 3


def doctors() -> list[tuple[str, dict[str, Any]]]:
    """The names and contents of the files that people sent."""
    return [(file.name, stored(file)) for file in sorted(DOCTORS.glob("*.json"))]


def tried(files: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """A line for each file, and one for each kind of hardware that there is no file of."""
    rows = [_row(name, found) for name, found in files]
    rows += [
        [kind, "", "nothing yet", ""]
        for kind, is_one in NOT_YET.items()
        if not any(is_one(found["facts"]) for _, found in files)
    ]
    return markdown(COLUMNS, rows)


def _row(name: str, found: dict[str, Any]) -> list[str]:
    facts = found["facts"]
    ran = [each["says"] for each in found["trial"] if each["about"] == "policies"]
    return [
        f"[{_hardware(facts)}](docs/doctor/{name})",
        facts["device"],
        *(ran or [""]),
        _troubles(each["about"] for each in (*found["findings"], *found["trial"]) if each["remedy"]),
    ]


def _hardware(facts: dict[str, Any]) -> str:
    if facts["device"] == "cuda":
        return ", ".join(gpu["name"] for gpu in facts["cuda"]["gpus"])
    if facts["device"] == "mlx" and facts["metal"]["metal"]:
        return str(facts["metal"]["gpu"])
    return f"{facts['processor']['name']}, {facts['cores']['cores']} cores"


def _troubles(abouts: Iterable[str]) -> str:
    named = list(dict.fromkeys(abouts))
    more = f" and {len(named) - MOST_TROUBLES} more" if len(named) > MOST_TROUBLES else ""
    return ", ".join(named[:MOST_TROUBLES]) + more or "none"
