"""Text to tokens and back, with the tokenizer of the model or without one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from moesched.errors import BadInput
from moesched.inputs.prompts import MOST_DIGITS
from moesched.inputs.tokenizer import Decodes
from moesched.system.plain_text import is_number, shown

AT_ONCE = 2_000
"""The most characters of a text that is encoded on the event loop; longer ones are encoded on another thread."""


class Codec(Decodes, Protocol):
    """Conversion between text and token ids."""

    def encode(self, text: str, most: int | None = None, *, bare: bool = False) -> list[int]:
        """Return the token ids of a text.

        Args:
            most: the most tokens that the caller can use; None for no limit. A text with far more tokens may be refused
                before all of it is encoded; a text with a few more is encoded in full.
            bare: whether to add no special tokens.
        """

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of text that a token id stands for."""

    def is_special(self, token: int) -> bool:
        """Test whether a token id stands for a special token, which texts leave out."""


class Numbers:
    """Stand-in for a missing tokenizer: a text is a list of token ids with spaces between them.

    Each id has its space before it, so that an answer can follow the text of its prompt.
    """

    def encode(self, text: str, most: int | None = None, *, bare: bool = False) -> list[int]:
        """Read token ids from a text; `most` and `bare` change nothing.

        Raises:
            BadInput: the text has anything but numbers.
        """
        words = text.split()
        if not all(is_number(word, MOST_DIGITS) for word in words):
            raise BadInput(
                f"{shown(text)} is text, and the model has no tokenizer: give the ids of tokens, or add tokenizer.json "
                "to its folder"
            )
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """Write token ids, each after a space."""
        return "".join(f" {each}" for each in ids)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a space and the digits of a token id, as `decode` writes it."""
        return f" {token}".encode()

    def is_special(self, token: int) -> bool:
        """Return False: no id is special, so that texts show all ids."""
        return False


async def encode(codec: Codec, text: str, most: int, *, bare: bool = False) -> list[int]:
    """Return the token ids of a text; a long text is encoded on another thread, so that the event loop goes on.

    Args:
        most, bare: passed on to `codec.encode`.

    Raises:
        BadInput: the text cannot be encoded, or is too long.
    """
    if len(text) <= AT_ONCE:
        await asyncio.sleep(0)  # a request may have many prompts
        return codec.encode(text, most, bare=bare)
    return await asyncio.to_thread(codec.encode, text, most, bare=bare)
