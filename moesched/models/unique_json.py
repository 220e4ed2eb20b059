"""Decodes JSON, and refuses objects that have a key twice; Python's and msgspec's decoders keep the last value."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, TypeVar

import msgspec

from moesched.errors import BadInput
from moesched.system.decoding import require_few_values

T = TypeVar("T")

MOST_VALUES = 2_000_000
"""Most values in a header, each of which takes up to 100 bytes; a header with 131,072 matrices has half as many."""


def decode_unique(text: bytes, kind: type[T], where: str, remedy: str) -> T:
    """Decode JSON to an object of the type `kind`.

    Args:
        where: the file, in words, for messages.
        remedy: the remedy, in words, which ends messages.

    Raises:
        BadInput: the text is not JSON, has a key twice, does not fit the type, or is nested too deep.
    """
    require_few_values(text, MOST_VALUES, where, remedy)
    try:
        return msgspec.convert(_DECODER.decode(text.decode()), kind)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise BadInput(f"{where}: {reason}; {remedy}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has {twice!r} twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
