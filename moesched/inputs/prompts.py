"""Prompts: reading them, encoding them as token ids, and decoding tokens to text as they are generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from moesched.errors import BadInput
from moesched.models.config import ModelConfig

Prompt = str | Sequence[int]
"""A text, or the ids of its tokens."""

TOKENIZER_NAME = "tokenizer.json"
_UNFINISHED = "\ufffd"
_CONTEXT_TOKENS = 8
_NAMED_LINES = 20


class Tokenizer:
    """A model's own tokenizer, from its `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as FromFile

        try:
            self._tokenizer: Any = FromFile.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise BadInput(
                f"{path} is not a tokenizer: {error}: copy it again from where the checkpoint came from"
            ) from error

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens, without the special ones."""
        text: str = self._tokenizer.decode(list(ids))
        return text


class TextStream:
    """Decodes tokens to text as they are generated. A character split between tokens is held back until complete.

    Args:
        context: the tokens before the first one, since the text of a token depends on its neighbours.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-_CONTEXT_TOKENS:])
        self._shown = len(self._ids)
        self._before = 0

    def push(self, token: int) -> str:
        """Add a token; returns the text that is final now."""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """The text that was held back."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        known = self._tokenizer.decode(self._ids[self._before : self._shown])
        text = self._tokenizer.decode(self._ids[self._before :])
        fresh = text[len(known) :]
        if fresh.endswith(_UNFINISHED) and not final:
            return ""
        if fresh:
            self._before = max(self._before, self._shown - _CONTEXT_TOKENS)
            self._shown = len(self._ids)
        return fresh


def find_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a model's folder, if there is one.

    Raises:
        BadInput: there is one that cannot be read.
    """
    path = directory / TOKENIZER_NAME
    return Tokenizer(path) if path.is_file() else None


def parse_prompt_ids(text: str) -> list[list[int]]:
    """Prompts as token ids: "1,2,3;4,5" is one of three tokens and one of two.

    Raises:
        BadInput: an item is not a number.
    """
    prompts = []
    for number, prompt in enumerate(text.split(";")):
        ids = [item.strip() for item in prompt.split(",")] if prompt.strip() else []
        for item in ids:
            if not item.isdecimal():
                raise BadInput(
                    f"prompt {number}: {item!r} is not a token id: write ids with commas between them, "
                    "and semicolons between prompts, such as 1,2,3;4,5"
                )
        prompts.append([int(item) for item in ids])
    return prompts


class _Line(msgspec.Struct):
    prompt: str | None = None
    prompt_ids: list[int] | None = None


def read_prompts(path: Path, tell: Callable[[str], object] | None = None) -> list[Prompt]:
    """Prompts from a file with one JSON object a line: `{"prompt": "..."}` or `{"prompt_ids": [1, 2, 3]}`.

    Other fields are ignored, blank lines skipped.

    Args:
        tell: called once, with a message that names the malformed lines, which are skipped. Without it, such a file is
            refused.

    Raises:
        BadInput: the file cannot be read, holds no prompt, or, without `tell`, has a line that is not a prompt; the
            message names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInput(f"cannot read prompts {path}: {error.strerror}: name a file of JSON lines") from error
    prompts: list[Prompt] = []
    broken: dict[int, BadInput] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(_read_line(f"{path}:{number}", line))
            except BadInput as error:
                broken[number] = error
    if broken and (tell is None or not prompts):
        raise next(iter(broken.values()))
    if not prompts:
        raise BadInput(f'{path} holds no prompts: write one {{"prompt": "..."}} a line')
    if broken and tell is not None:
        tell(_skipped(broken))
    return prompts


def _skipped(broken: Mapping[int, BadInput]) -> str:
    """A message that names the skipped lines, and the problem of the first."""
    first, *others = broken
    rest = ""
    if others:
        named = ", ".join(map(str, others[:_NAMED_LINES]))
        more = f" and {len(others) - _NAMED_LINES} more" if len(others) > _NAMED_LINES else ""
        rest = f"; lines {named}{more} are not prompts either"
    return f"{broken[first]}{rest}; they are skipped, and the other prompts run"


def _read_line(where: str, line: bytes) -> Prompt:
    try:
        read = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadInput(f'{where}: {error}: write {{"prompt": "..."}}') from error
    given = [each for each in (read.prompt, read.prompt_ids) if each is not None]
    if len(given) != 1:
        raise BadInput(f'{where}: give "prompt" or "prompt_ids", one of them')
    if not given[0]:
        raise BadInput(f"{where}: the prompt is empty: give at least one token")
    prompt: Prompt = given[0]
    return prompt


def require_some(new_tokens: int, option: str) -> None:
    """Raise BadInput where no tokens are asked for."""
    if new_tokens < 1:
        raise BadInput(f"{option} is {new_tokens}: ask for at least 1 token")


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer | None, config: ModelConfig, new_tokens: int
) -> list[list[int]]:
    """The token ids of prompts, each checked against the model.

    Raises:
        BadInput: there are no prompts, or one is empty, has an id outside the vocabulary, leaves no room for
            `new_tokens` in the model's context, or is text without a tokenizer to read it.
    """
    if not prompts:
        raise BadInput("no prompts were given: give at least one")
    encoded = []
    for number, prompt in enumerate(prompts):
        ids = _encode(number, prompt, tokenizer)
        _check(number, ids, config, new_tokens)
        encoded.append(ids)
    return encoded


def _encode(number: int, prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    if not prompt:
        raise BadInput(f"prompt {number} is empty: give at least one token")
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer is None:
        raise BadInput(
            f"prompt {number} is text, but the model's folder has no {TOKENIZER_NAME}: "
            'add it, or give ids: --prompt-ids "1,2,3", or {"prompt_ids": [1, 2, 3]} in a file'
        )
    ids = tokenizer.encode(prompt)
    if not ids:
        raise BadInput(
            f"prompt {number}, {prompt!r}, has no tokens: give at least one that the tokenizer knows"
        )
    return ids


def _check(number: int, ids: Sequence[int], config: ModelConfig, new_tokens: int) -> None:
    for token in ids:
        if not 0 <= token < config.vocabulary:
            raise BadInput(
                f"prompt {number}: token id {token} is outside the vocabulary of {config.vocabulary}: "
                f"use ids from 0 to {config.vocabulary - 1}"
            )
    if len(ids) + new_tokens > config.max_positions:
        raise BadInput(
            f"prompt {number} has {len(ids)} tokens; with {new_tokens} new ones that is more than the model's context "
            f"of {config.max_positions}: shorten it, or lower --max-new-tokens"
        )
