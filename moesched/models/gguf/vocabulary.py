"""Reads the vocabulary, that is the tokenizer, from a GGUF file's metadata."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

import msgspec

from moesched.errors import BadInput
from moesched.models.gguf.parts import GgufParts
from moesched.models.headers import RESTORE
from moesched.system.decoding import convert_value

PREFIX = "tokenizer.ggml."
ENDS = frozenset(
    [
        "</s>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    ]
)
"""Control tokens that end a text in some model, whether the metadata name them or not."""
END_OF_MESSAGE, ENDS_OF_TURN = "<|end|>", frozenset(["<|return|>", "<|call|>"])
"""Tokens of gpt-oss: one that ends a message within a turn, after which the text goes on, and those that end the turn.

In a vocabulary that has all of them, the first does not end a text.
"""


class TokenType(IntEnum):
    """Types of tokens, with their numbers in GGUF files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The keys in the metadata that describe a tokenizer, without the `PREFIX` that they have in files.

    Attributes:
        model: kind of tokenizer.
        pre: name of the rule that splits text into words; None if the file has none.
        tokens: text of each token.
        scores: score of each token; if two merges are possible, the one whose token has the higher score goes first.
        merges: pairs of tokens with a space between them, in the order in which they are merged.
    """

    model: str = "none"
    pre: str | None = None
    tokens: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    token_type: tuple[int, ...] = ()
    merges: tuple[str, ...] = ()
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None
    eom_token_id: int | None = None
    unknown_token_id: int | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool = False
    add_space_prefix: bool = True

    def has_type(self, token: int, *types: TokenType) -> bool:
        """Test whether a token, given by its id, has one of these types."""
        return bool(self.token_type) and self.token_type[token] in types

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids of tokens that end a text: those that the metadata name, then other tokens whose text is in `ENDS`."""
        named = (self.eos_token_id, self.eot_token_id, self.eom_token_id)
        found = {
            token: number
            for number, token in enumerate(self.tokens)
            if token in ENDS and self.has_type(number, TokenType.CONTROL, TokenType.USER_DEFINED)
        }
        stops = dict.fromkeys([*(each for each in named if each is not None), *found.values()])
        if found.keys() >= ENDS_OF_TURN:
            stops.pop(found.get(END_OF_MESSAGE, -1), None)
        return tuple(stops)


def read_vocabulary(parts: GgufParts) -> Vocabulary:
    """Read the vocabulary of a model; it has no tokens if the files have none.

    Raises:
        BadInput: a value is of the wrong type, lists have different lengths, or a special token's id is out of range.
    """
    keys = {
        key.removeprefix(PREFIX): value for key, value in parts.metadata.items() if key.startswith(PREFIX)
    }
    vocabulary = convert_value(keys, Vocabulary, f"{parts.path}: {PREFIX.rstrip('.')}", RESTORE)
    _require_lengths(parts.path, vocabulary)
    return vocabulary


def _require_lengths(path: Path, vocabulary: Vocabulary) -> None:
    count = len(vocabulary.tokens)
    for name in ("scores", "token_type"):
        length = len(getattr(vocabulary, name))
        if length not in (0, count):
            raise BadInput(f"{path}: {PREFIX}{name} has {length:,} entries for {count:,} tokens; {RESTORE}")
    for name in ("bos", "eos", "eot", "eom", "unknown"):
        token = getattr(vocabulary, f"{name}_token_id")
        if token is not None and count and not 0 <= token < count:
            raise BadInput(
                f"{path}: {PREFIX}{name}_token_id is {token:,}, and there are {count:,} tokens; {RESTORE}"
            )
