"""A line of results: the inputs of a simulation, and the figures of its report."""

from __future__ import annotations

from typing import Any

import msgspec

from moesched.jobs.report import JobReport
from moesched.sweeps.points import Inputs
from moesched.system.decoding import decode_json

MOST_VALUES = 4_000_000
"""Most JSON values in a line."""

LINE_START = b'{"key":"'
"""The beginning of each line."""


class Sizes(msgspec.Struct, frozen=True):
    """The batch size in requests, and the number of new tokens of each request, that a simulation ran with."""

    batch_size: int
    new_tokens: int


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of results, with only the keys that tables and pictures need; the line in the file has more keys.

    Attributes:
        key: hash of the simulation's inputs, the objects that they name, and the code.
        failure: the reason why the simulation failed and has no figures, or only some; None if it did not.
        plan: batch size and number of new tokens; None if the simulation failed before it ran.
        peak_bytes: peak of each memory in bytes, by name.
    """

    key: str
    inputs: Inputs
    failure: str | None = None
    plan: Sizes | None = None
    throughput_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    first_token_seconds: float | None = None
    simulated_seconds: float | None = None
    peak_bytes: dict[str, int] = {}


def encode_line(
    key: str, inputs: Inputs, code: str, report: JobReport | None, failure: str | None = None
) -> bytes:
    """Encode the results of a simulation as a line of JSON, with a newline at its end.

    Args:
        key: the simulation's key.
        code: the version of the code.
        report: the simulation's report; None if it failed before it ran.
        failure: the reason why the simulation failed; None if it did not.
    """
    content: dict[str, Any] = {} if report is None else report.as_dict()
    for name in ("request_times", "micro_batch_times"):  # thousands of numbers
        content.pop(name, None)
    if failure is not None:
        content["failure"] = failure
    return msgspec.json.encode({"key": key, "code": code, "inputs": inputs, **content}) + b"\n"


def parse_line(line: bytes, where: str) -> Line:
    """Read a line of results.

    Args:
        where: words for the line's place, such as its file and number, for the error.

    Raises:
        BadInput: the text is not a line of a sweep's results.
    """
    return decode_json(
        line, Line, f"{where}: not a result of a sweep", "name another file with --out", most=MOST_VALUES
    )
