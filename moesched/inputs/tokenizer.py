"""A model's own tokenizer, and decoding of tokens to text while they are generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from moesched.errors import BadInput
from moesched.inputs.gguf_tokenizer import gguf_tokenizer
from moesched.models.checkpoint import Checkpoint, checkpoint_of, read_contents
from moesched.models.gguf.parts import is_gguf, read_parts
from moesched.models.gguf.vocabulary import Vocabulary, read_vocabulary
from moesched.system.decoding import require_few_values
from moesched.system.input_file import is_file, read_input
from moesched.system.silence import STDERR, silent

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"

A = TypeVar("A")
R = TypeVar("R")

TOKENIZER_NAME = "tokenizer.json"
MOST_BYTES = 50_000_000
"""Largest number of bytes of a tokenizer.json; the largest published ones have 35 MB."""
MOST_VALUES = 3_000_000
"""The most values in a tokenizer.json, each up to 130 bytes in the library; the largest published have 2 million."""
PIECE = 200_000
"""Characters encoded at once to see whether a prompt is too long; each takes about 400 bytes of memory."""

UNFINISHED = "\ufffd"
"""The character that a decoder puts for bytes that are not a whole character."""
_CONTEXT_TOKENS = 8
_RESTORE = "copy it again from where the checkpoint came from"


def read_json(path: Path) -> tokenizers.Tokenizer:
    """Load a tokenizer.json as a `tokenizers.Tokenizer`.

    Raises:
        BadInput: the file cannot be read, or has more JSON values than any real tokenizer.
    """
    from tokenizers import Tokenizer as Loaded

    data = read_input(path, "tokenizer", MOST_BYTES)
    require_few_values(data, MOST_VALUES, str(path), _RESTORE)
    return Loaded.from_buffer(data)


class Tokenizer:
    """A model's own tokenizer: encodes text as token ids, and decodes ids to text.

    Args:
        path: the file of the tokenizer, a tokenizer.json or a GGUF file.
        load: reads the file, and returns a `tokenizers.Tokenizer`.

    Raises:
        BadInput: the file cannot be read, or is no tokenizer.
    """

    def __init__(self, path: Path, load: Callable[[Path], tokenizers.Tokenizer] = read_json) -> None:
        self._path = path
        with silent(STDERR):
            self._tokenizer = self._call(load, path, "is not a tokenizer")
            # Files keep the settings of the training; transformers resets them as well.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        self._in_bytes = stands_for_bytes(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str, most: int | None = None, *, bare: bool = False) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer adds.

        Args:
            most: the most tokens that the caller can use; a much longer text is refused before all of it is encoded.
                None for no limit.
            bare: True to leave out the special tokens, as for a text that has them already.

        Raises:
            BadInput: the text is not valid Unicode, is too long, or the tokenizer fails.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadInput(f"its character {error.start} is not valid Unicode: write it in UTF-8") from None
        with silent(STDERR):
            if most is not None and len(text) > PIECE:
                self._require_short(text, most)
            return self._encode(text, bare=bare)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens.

        Raises:
            BadInput: the tokenizer fails.
        """
        return self._call(self._tokenizer.decode, list(ids), "cannot decode tokens")

    def is_special(self, token: int) -> bool:
        """Test whether a token id stands for a special token, which decoded text omits."""
        return token in self._special

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of text that a token id stands for; empty for an unknown id.

        Special tokens give their names in UTF-8.
        """
        name = self._tokenizer.id_to_token(token)
        return b"" if name is None else token_bytes(name, in_bytes=self._in_bytes)

    def _encode(self, text: str, *, bare: bool = False) -> list[int]:
        # A batch, also of one text, lets other threads run meanwhile.
        encode = partial(self._tokenizer.encode_batch, add_special_tokens=not bare)
        [encoded] = self._call(encode, [text], "cannot encode the text")
        return encoded.ids

    def _require_short(self, text: str, most: int) -> None:
        """Raise BadInput for a text with far more than `most` tokens, without encoding all of it.

        A text is refused at once if it has more than 4 * `most` * n characters, where n is the number of characters of
        the vocabulary's longest token. The factor 4 allows for tokenizers that drop or join characters. A shorter text
        is encoded piece by piece, and refused when its pieces have more than 2 * `most` tokens. The factor 2 allows for
        the cuts, which at most double the tokens of a text.
        """
        longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        pieces = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
        totals = accumulate(len(self._encode(piece)) for piece in pieces)
        if len(text) > 4 * longest * most or any(tokens > 2 * most for tokens in totals):
            raise BadInput(
                f"it has {len(text):,} characters, and the context ends at {most:,} tokens: shorten it"
            )

    def _call(self, function: Callable[[A], R], argument: A, problem: str) -> R:
        """Call a function of the library `tokenizers`, and raise BadInput if it fails.

        Panics of the library count as failures, although they are not instances of `Exception`.

        Args:
            problem: the reason in the error message, after the file's path.
        """
        try:
            return function(argument)
        except (BadInput, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            raise BadInput(f"{self._path} {problem}: {error}: {_RESTORE}") from error


class Decodes(Protocol):
    """Anything that can decode token ids to text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these token ids."""


class TextStream:
    """Decodes tokens to text one by one as they are generated, and holds back characters that are incomplete.

    Args:
        context: ids of the tokens before the first generated one, since the text of a token depends on its neighbours.
    """

    def __init__(self, tokenizer: Decodes, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-_CONTEXT_TOKENS:])
        # The rest of a character: some decoders give no character of the bytes behind it.
        while len(context) > len(self._ids) > 0 and tokenizer.decode(self._ids).startswith(UNFINISHED):
            del self._ids[0]
        self._shown = len(self._ids)
        self._before = 0

    def push(self, token: int) -> str:
        """Add one token id, and return the text that it completes; empty if it completes none."""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        known = self._tokenizer.decode(self._ids[self._before : self._shown])
        text = self._tokenizer.decode(self._ids[self._before :])
        before = end = self._shown
        if not text.startswith(known):  # the context ended within a character, which is whole now
            before = self._before
            while known.endswith(UNFINISHED):
                end -= 1
                known = self._tokenizer.decode(self._ids[before:end])
        fresh = text[len(known) :]
        held = len(self._ids) - self._shown
        if (
            fresh.endswith(UNFINISHED) and not final and held < _CONTEXT_TOKENS
        ):  # more are no character's bytes
            return ""
        if fresh:
            self._before, self._shown = before, len(self._ids)  # both between characters
        return fresh


def find_tokenizer(model: Path) -> Tokenizer | None:
    """Read the tokenizer of a model's folder, or of its GGUF file; None if the model has none.

    Raises:
        BadInput: the tokenizer cannot be read.
    """
    return make_tokenizer(model, read_vocabulary(read_parts(model)) if is_gguf(model) else None)


def make_tokenizer(model: Path, vocabulary: Vocabulary | None) -> Tokenizer | None:
    """Make a tokenizer from a GGUF file's vocabulary or a folder's tokenizer.json; None if the model has none.

    Args:
        model: path of the model's folder or GGUF file.
        vocabulary: the vocabulary of the GGUF file; None for a folder.

    Raises:
        BadInput: the tokenizer cannot be read.
    """
    if vocabulary is not None:
        return Tokenizer(model, partial(gguf_tokenizer, vocabulary=vocabulary)) if vocabulary.tokens else None
    path = model / TOKENIZER_NAME
    return Tokenizer(path) if is_file(path) else None


def open_model(model: Path, *, partial: bool = False) -> tuple[Checkpoint, Tokenizer | None]:
    """Open a model's weights, and make its tokenizer (None if the model has none); each file header is read only once.

    Args:
        partial: whether to accept a missing safetensors file if the folder has a copy of its header.
    """
    contents = read_contents(model, partial=partial)
    return checkpoint_of(contents), make_tokenizer(contents.path, contents.vocabulary)


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
