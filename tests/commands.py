"""The result of a command, and the form of a refusal."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

RUN_KEYS = {
    "tokens", "text", "prefill_seconds", "decode_tokens_per_second", "throughput_tokens_per_second",
    "peak_bytes", "lanes", "policy", "plan",
}  # fmt: skip
"""Keys in the JSON of every run and simulation."""

ONLY_FIGURES = ("--no-band", "--no-helps")
"""Options of `simulate` that save its runs for the band, and its replays."""

EXPLAINED = ("simulate", "--model", "mixtral-0.8b", "--machine", "t4", "--workload", "mtbench")
SIMULATE = (*EXPLAINED, *ONLY_FIGURES)


class Said(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value on standard output."""
        return json.loads(self.out)


def refused(said: Said, pattern: str) -> None:
    """Bad input: exit code 2, one line that says what, and nothing on standard output."""
    assert said.code == 2
    assert said.out == ""
    in_one_line(said, pattern)


def failed(said: Said, pattern: str) -> None:
    """The run began and failed: exit code 1, and one line that says why."""
    assert said.code == 1
    in_one_line(said, pattern)


def in_one_line(said: Said, pattern: str) -> None:
    """Standard error has one line, which says this."""
    assert re.fullmatch(r"moesched: [^\n]+\n", said.err), said.err
    assert re.search(pattern, said.err), said.err
