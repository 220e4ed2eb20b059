"""Reads the bodies of requests: a limited number of bytes, as JSON with fields of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from moesched.errors import BadInput
from moesched.server.errors import ApiError, ClientLeft, bad_request
from moesched.server.fields import CHOICES, HARMLESS, NEUTRAL, Generated
from moesched.system.decoding import DECODE_ERRORS, decode_json, reason, value_at
from moesched.system.near_names import nearest_of
from moesched.system.plain_text import shown

MOST_BYTES = 4 << 20
"""Largest number of bytes of a body: enough for a prompt of half a million token ids."""
MOST_VALUES = 2_000_000
"""Largest number of values in a body: more than any prompt of token ids has."""
MOST_LISTS = 20_000
"""Largest number of lists and objects in a body: more than any conversation has."""
MOST_NAME = 100
"""Largest number of characters of a field's name that an error repeats."""


async def read_bytes(request: Request) -> bytes:
    """Read the body of a request; a body that is too long is refused before all of it has arrived.

    Raises:
        ApiError: the content type is not JSON, the body is compressed, or it is longer than MOST_BYTES.
        ClientLeft: the client has closed the connection.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"the body is {kind or 'of no type'}: send JSON, with Content-Type: application/json"
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            415, f"the body is encoded as {shown(coding)}: send JSON as it is, without Content-Encoding"
        )
    announced = request.headers.get("content-length", "0")
    if int(announced) > MOST_BYTES:  # h11 has checked that it is a number
        raise _too_long()
    pieces, left = [], MOST_BYTES
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece: bytes = message.get("body", b"")
        left -= len(piece)
        if left < 0:
            raise _too_long()
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_long() -> ApiError:
    return ApiError(413, f"the body has more than {MOST_BYTES:,} bytes: shorten it")


Body = TypeVar("Body", bound=Generated)


def read_body(data: bytes, kind: type[Body], model: str) -> Body:
    """Decode the JSON body of a request into a struct of its fields.

    Args:
        kind: the type of the struct.
        model: name of the model that is served, for the error.

    Raises:
        ApiError: the body is not JSON, lacks a field, or has a wrong or unsupported field.
    """
    _require_few_lists(data)
    try:
        fields = decode_json(data, dict[str, Any], "the body", "send JSON", most=MOST_VALUES)
    except BadInput as error:
        raise bad_request(str(error)) from error
    known = kind.__struct_fields__
    left = {}
    for name, value in fields.items():
        if name in known:
            left[name] = value
        elif not _is_taken(name, value):
            raise _unknown(name, value, known)
    try:
        return msgspec.convert(left, kind)
    except DECODE_ERRORS as error:
        raise _of_wrong_type(reason(error), left, model) from error


def _require_few_lists(data: bytes) -> None:
    """Refuse a body with more than MOST_LISTS lists and objects: decoding them would hold up the answers to others."""
    if data.count(b"[") + data.count(b"{") > MOST_LISTS:
        outside = _STRING.sub(b"", data)
        lists = outside.count(b"[") + outside.count(b"{")
        if lists > MOST_LISTS:
            raise bad_request(
                f"the body has {lists:,} lists and objects, and may have {MOST_LISTS:,}: send fewer"
            )


def _is_taken(name: str, value: object) -> bool:
    """Test whether the unsupported field `name` can be ignored, since with this value it changes no answer."""
    return name in HARMLESS or (name in NEUTRAL and (value is None or value in NEUTRAL[name]))


def _unknown(name: str, value: object, known: tuple[str, ...]) -> ApiError:
    if name in NEUTRAL:
        return bad_request(
            f"{name} is {shown(value)}, and this server does not have it: omit it",
            name,
            "unsupported_parameter",
        )
    near = nearest_of(name, known)
    remedy = "omit it" if near is None else f"did you mean {near}? Otherwise omit it"
    return bad_request(f"unknown field {shown(name)}: {remedy}", name[:MOST_NAME], "unknown_parameter")


_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_PATH = re.compile(r"(.*?) - at `(?:key )?\$\.?(.*)`$")
_MISSING = re.compile(r"Object missing required field `(.*)`")


def _of_wrong_type(message: str, fields: Mapping[str, Any], model: str) -> ApiError:
    """Make the error for msgspec's message about a body's fields; it names the field at fault, and its value."""
    found = _PATH.match(message)
    fault, path = (found[1], found[2]) if found else (message, "")
    if missing := _MISSING.match(fault):
        path = ".".join(filter(None, [path, missing[1]]))
        remedy = f"ask for {model}" if path == "model" else "give it"
        return bad_request(f"{path} is missing: {remedy}", path, "missing_required_parameter")
    if fault.startswith("Invalid enum value"):
        fault = f"give {' or '.join(CHOICES[path.rpartition('.')[2]])}"
    value = value_at(path, fields) if path else ""
    where = f"{path} is {value}" if value else path
    return bad_request(f"{where}: {fault[:1].lower()}{fault[1:]}", path or None, "invalid_value")
