"""Finds the bytes of text that a token stands for, from the token's name in the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"


def stands_for_bytes(tokenizer: tokenizers.Tokenizer) -> bool:
    """Test whether characters in the token names of a `tokenizers.Tokenizer` stand for bytes, as in GPT-2's."""
    decoder = tokenizer.decoder
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def token_bytes(name: str, *, in_bytes: bool) -> bytes:
    """Return the bytes of text that a token stands for, given the token's name in the vocabulary.

    The name of a special token is encoded in UTF-8.

    Args:
        in_bytes: whether the characters of names stand for bytes; otherwise names are text, with ▁ for a space.
    """
    if in_bytes:
        table = _bytes_by_character()
        if all(character in table for character in name):
            return bytes(table[character] for character in name)
        return name.encode()
    if found := _BYTE.fullmatch(name):
        return bytes.fromhex(found[1])
    return name.replace(_SPACE, " ").encode()


@cache
def _bytes_by_character() -> Mapping[str, int]:
    """Return the byte that each character stands for in names of GPT-2's tokens.

    Printable bytes have their own Latin-1 character; the others, in order, have the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
