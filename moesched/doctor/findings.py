"""Findings, the results of probes: a state in one line, and a remedy for a trouble; texts are in findings.toml."""

from __future__ import annotations

from functools import cache
from importlib import resources
from string import Formatter
from typing import Any

import msgspec

from moesched.units import format_bytes


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line about the machine.

    Attributes:
        about: the thing, in a word or two.
        says: the thing's state.
        remedy: what to do about a trouble; empty if all is well.
    """

    about: str
    says: str
    remedy: str = ""

    @property
    def is_trouble(self) -> bool:
        """True if the user has to do something, as `remedy` says."""
        return bool(self.remedy)


class _Words(Formatter):
    """Formatter for the texts of findings, which also knows the specification "bytes" for sizes, as in {size:bytes}."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return format_bytes(value) if format_spec == "bytes" else format(value, format_spec)


def finding(name: str, **values: object) -> Finding:
    """Make the finding that findings.toml has under `name`, with `values` filled into its texts."""
    words = _findings()[name]
    about, says, remedy = (
        _Words().vformat(text, (), values) for text in (words.about, words.says, words.remedy)
    )
    return Finding(about=about, says=says, remedy=remedy)


@cache
def _findings() -> dict[str, Finding]:
    text = (resources.files(__package__) / "findings.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, Finding])
