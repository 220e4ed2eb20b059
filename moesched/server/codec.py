"""Text to tokens and back, with the tokenizer of the model or without one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from moesched.errors import BadInput
from moesched.inputs.tokenizer import Decodes
from moesched.system.plain_text import shown

AT_ONCE = 2_000
"""Characters that are encoded on the event loop; longer texts are encoded on another thread."""


class Codec(Decodes, Protocol):
    """Text to tokens and back."""

    def encode(self, text: str, most: int | None = None, *, bare: bool = False) -> list[int]:
        """Return the ids of a text, as `moesched.inputs.tokenizer.Tokenizer` does."""

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for."""

    def is_special(self, token: int) -> bool:
        """Test whether a token is one that texts leave out."""


class Numbers:
    """Stands in for the tokenizer of a model that has none: its text is the ids, with spaces between them."""

    def encode(self, text: str, most: int | None = None, *, bare: bool = False) -> list[int]:
        """Read ids.

        Raises:
            BadInput: the text is anything else.
        """
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise BadInput(
                f"{shown(text)} is text, and the model has no tokenizer: give the ids of tokens, or add tokenizer.json "
                "to its folder"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Write ids, each with a space behind it."""
        return "".join(f"{each} " for each in ids)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of an id as it is written."""
        return f"{token} ".encode()

    def is_special(self, token: int) -> bool:
        """No: all ids are written."""
        return False


async def encode(codec: Codec, text: str, most: int, *, bare: bool = False) -> list[int]:
    """Return the ids of a text; long ones do not hold up the event loop.

    Raises:
        BadInput: as `Codec.encode`.
    """
    if len(text) <= AT_ONCE:
        await asyncio.sleep(0)  # a request may have many prompts
        return codec.encode(text, most, bare=bare)
    return await asyncio.to_thread(codec.encode, text, most, bare=bare)
