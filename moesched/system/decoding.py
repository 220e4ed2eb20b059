"""Decoding of JSON, TOML and MessagePack from outside to typed values, with limits of size and one-line errors."""

from __future__ import annotations

import re
from typing import Any, TypeVar, overload

import msgspec

from moesched.errors import BadInput
from moesched.system.plain_text import shown

T = TypeVar("T")

MOST_PARTS = 16
"""Limit of the parts of a TOML key, whose decoding takes time that grows with their square."""
_PART = rb"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rb"(?<![\w-])(?:%b[ \t]*+\.[ \t]*+){%d}" % (_PART, MOST_PARTS))

_TWICE = re.compile(r"Cannot (?:overwrite|declare|mutate)\b.*\(at (?:line (\d+)|end of document)")

_EXPECTED = re.compile(r"(Expected `[^,]*)(?:, got `\w+`|, got \d+)?")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\]]*)\]")
_LONGEST = 100
"""Most characters of a value in a message."""
_MOST_AGAIN = 1_000_000
"""Most bytes of JSON that is decoded again, without a type, to show the value at fault."""

DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
"""Errors that msgspec raises, where ValueError also covers bytes that are not UTF-8 and integers of 4,300 digits."""


@overload
def decode_json(
    data: bytes | msgspec.Raw, kind: type[T], where: str, remedy: str, *, most: int = ...
) -> T: ...


@overload
def decode_json(data: bytes | msgspec.Raw, kind: Any, where: str, remedy: str, *, most: int = ...) -> Any: ...


def decode_json(
    data: bytes | msgspec.Raw, kind: Any, where: str, remedy: str, *, most: int = 1_000_000
) -> Any:
    """Decode JSON to a value of a given type.

    Args:
        kind: the type.
        where: the beginning of error messages, such as "a.json" or "a.json is not a trace".
        remedy: ends error messages.
        most: the largest number of values that the JSON may contain, above what any real file has.

    Raises:
        BadInput: the data are not JSON, are not of that type, are nested too deep, or have more values.
    """
    text = bytes(data)
    require_few_values(text, most, where, remedy)
    try:
        return msgspec.json.decode(text, type=kind)
    except DECODE_ERRORS as error:
        raise BadInput(f"{where}: {reason(error, _untyped(text))}; {remedy}") from error


def _untyped(text: bytes) -> Any:
    """Decode JSON to lists, mappings and scalars; None if it is malformed, or longer than `_MOST_AGAIN` bytes."""
    try:
        return msgspec.json.decode(text) if len(text) <= _MOST_AGAIN else None
    except DECODE_ERRORS:
        return None


def require_few_values(text: bytes, most: int, where: str, remedy: str) -> None:
    """Check, without decoding it, that a JSON text has no more than about `most` values.

    Args:
        where: begins the error message.
        remedy: ends the error message.

    Raises:
        BadInput: the JSON may have more values.
    """
    # Never less than their number, as each follows a comma or a bracket.
    values = text.count(b",") + text.count(b"[") + text.count(b"{")
    if values > most:
        raise BadInput(f"{where}: it has about {values:,} values, and may have {most:,}; {remedy}")


def decode_toml(text: bytes, where: str) -> dict[str, Any]:
    """Decode TOML, and return its top-level table.

    Args:
        where: begins error messages, such as the file's path.

    Raises:
        BadInput: the text is not TOML, is nested too deep, or has an integer of more than 64 bits.
    """
    if _LONG_KEY.search(text):
        raise BadInput(f"{where}: it has a key of more than {MOST_PARTS} parts, which no real one has")
    try:
        decoded: dict[str, Any] = msgspec.toml.decode(text)
        _require_64_bits(decoded)
    except DECODE_ERRORS as error:
        raise BadInput(f"{where}: {_given_twice(text, str(error)) or reason(error)}") from error
    return decoded


def _given_twice(text: bytes, error: str) -> str:
    """Return a message about the key that a TOML file gives twice, with its line.

    Args:
        error: the parser's message; if it is about anything else, an empty text is returned.
    """
    twice = _TWICE.match(error)
    if twice is None:
        return ""
    lines = text.decode().splitlines()
    number = int(twice[1]) if twice[1] else len(lines)
    key = shown(lines[number - 1].partition("=")[0].strip(" \t[]"))
    return f"line {number} gives {key} again: give it once"


def convert_value(raw: object, kind: type[T], where: str, remedy: str) -> T:
    """Convert decoded lists, mappings and scalars to a value of a given type.

    Args:
        kind: the type.
        where: begins the error message.
        remedy: ends the error message.

    Raises:
        BadInput: the values are not of that type.
    """
    try:
        return msgspec.convert(raw, kind)
    except DECODE_ERRORS as error:
        raise BadInput(f"{where}: {reason(error, raw)}; {remedy}") from error


def reason(error: BaseException, raw: object = None) -> str:
    """Return a decoder's error message, in simpler words for some errors.

    Args:
        raw: the decoded lists, mappings and scalars, in which the value at fault is found; None if they are unknown.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if "integer string conversion" in str(error):
        return "it has a number of thousands of digits"
    message, path = fault(error, raw)
    return f"{message} - at `${path}`" if path else message


def fault(error: BaseException, raw: object) -> tuple[str, str]:
    """Return a decoder's error message with the value at fault, and the path to that value, such as `.a[0].b`.

    Args:
        raw: the decoded lists, mappings and scalars; None if they are unknown.
    """
    message, _, path = str(error).partition(" - at `$")
    path = path.removesuffix("`")
    expected, value = _EXPECTED.fullmatch(message), value_at(path, raw)
    return f"{expected[1]}, got {value}" if expected and value else message, path


def value_at(path: str, raw: Any) -> str:
    """Return the value at a path that `fault` returned, as short text; empty if the path does not lead to one value.

    Args:
        raw: the decoded lists, mappings and scalars; None if they are unknown.
    """
    if raw is None:
        return ""
    try:
        for name, index in _STEP.findall(path):
            raw = raw[name] if name else raw[int(index)]
    except (LookupError, TypeError, ValueError):  # within a mapping, whose keys msgspec does not tell
        return ""
    text = shown(raw)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _require_64_bits(value: object) -> None:
    """Raise ValueError if a TOML value contains an integer of more than 64 bits."""
    if isinstance(value, int):
        if value.bit_length() > 63:
            raise ValueError("it has an integer beyond 64 bits")
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _require_64_bits(each)
