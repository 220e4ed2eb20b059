"""Published rows as runs of the simulator: machine, model, policy, and the reason for each choice.

A row's measured figures are not among the inputs of its mapping: `mapped` sees the texts of a row only.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from moesched.machines.build import Parts

HERE = Path(__file__).parent


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file; rates are as printed, and empty where none is.

    Attributes:
        use: "fit" may set rates, "predict" may not, "shown" may not and counts in no figure, since its error was
            estimated before it was added, "skip" cannot be expressed.
        tier: how sure it is that the figure was read right; A is the surest.
    """

    use: str
    tier: str
    model: str
    quant: str
    machine: str
    setting: str
    prefill_tok_s: str
    decode_tok_s: str
    source: str
    note: str

    def measured(self, figure: str) -> float | None:
        """The tokens per second of "prefill" or "decode"; None where none were measured."""
        text = self.prefill_tok_s if figure == "prefill" else self.decode_tok_s
        return float(text.split()[0]) if text else None


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulated run.

    Attributes:
        options: keywords of `simulate_model`.
        popular: whether the policy knows how popular experts are; it then gets a profile of them.
        why: the reasons for what the row leaves open.
    """

    parts: Parts
    model: str
    policy: str
    why: str
    options: Mapping[str, Any]
    prompt: int = 512
    new_tokens: int = 32
    capacity: Mapping[str, str] = {}
    popular: bool = False


class Skipped(msgspec.Struct, frozen=True):
    """A row that cannot be expressed."""

    why: str


BY_SOURCE: dict[str, dict[str, Any]] = msgspec.toml.decode((HERE / "measured_rows.toml").read_bytes())
"""The runs, by a part of the source's name."""


def published_rows() -> list[PublishedRow]:
    """All rows, in the order of the file."""
    with (HERE / "measured_rows.csv").open(newline="") as file:
        return [PublishedRow(**row) for row in csv.DictReader(file)]


def mapped(row: PublishedRow) -> Run | Skipped:
    """The run of a row, or the reason why there is none."""
    if row.use == "skip":
        return Skipped("the model's name is not published")
    found = next((run for source, run in BY_SOURCE.items() if source in row.source), None)
    if found is None:
        raise ValueError(f"no run for the source {row.source!r}: add one to measured_rows.toml")
    run = {key: value for key, value in found.items() if key != "changes"}
    words = f"{row.model}; {row.quant}; {row.setting},"
    for text, change in found.get("changes", {}).items():
        if text in words:
            run = _changed(run, change)
    if "skip" in run:
        return Skipped(run["skip"])
    if (HERE / run["model"]).is_dir():
        run["model"] = str(HERE / run["model"])
    return msgspec.convert(run, Run)


def _changed(run: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A run with another's values in their places."""
    return {
        **run,
        **{
            key: _changed(run.get(key, {}), value) if isinstance(value, dict) else value
            for key, value in change.items()
        },
    }
