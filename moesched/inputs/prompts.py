"""Reads users' prompts: parses token ids, reads files of prompts, and encodes texts as token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set, Sized
from numbers import Integral
from pathlib import Path

import msgspec

from moesched.errors import BadInput
from moesched.inputs.tokenizer import TOKENIZER_NAME, Tokenizer
from moesched.models.config import ModelConfig
from moesched.system.decoding import decode_json
from moesched.system.input_file import read_input
from moesched.system.plain_text import is_number, shown

Prompt = str | Sequence[int]
"""A prompt: a text, or token ids."""

MOST_BYTES = 64_000_000
"""Largest number of bytes of a prompts file; about 16 million tokens."""
MOST_PROMPTS = 1_000_000
MOST_IDS = 16_000_000
"""The most token ids of a prompt."""
MOST_DIGITS = 18
_NAMED_LINES = 20


def parse_prompt_ids(text: str) -> list[list[int]]:
    """Parse prompts given as token ids: "1,2,3;4,5" is a prompt of three tokens and a prompt of two.

    Raises:
        BadInput: an item is not a number.
    """
    prompts = []
    for number, prompt in enumerate(text.split(";")):
        ids = [item.strip() for item in prompt.split(",")] if prompt.strip() else []
        for item in ids:
            if not is_number(item, MOST_DIGITS):
                raise BadInput(
                    f"prompt {number}: {shown(item)} is not a token id: write ids with commas between them, "
                    "and semicolons between prompts, such as 1,2,3;4,5"
                )
        prompts.append([int(item) for item in ids])
    return prompts


class _Line(msgspec.Struct):
    prompt: str | None = None
    prompt_ids: list[int] | None = None


def read_prompts(path: Path, tell: Callable[[str], object] | None = None) -> list[Prompt]:
    """Read prompts from a file with one JSON object per line: `{"prompt": "..."}` or `{"prompt_ids": [1, 2, 3]}`.

    Other fields are ignored, blank lines skipped.

    Args:
        tell: if given, malformed lines are skipped, and `tell` is called once with a message that names them. None
            refuses a file with a malformed line.

    Raises:
        BadInput: the file cannot be read, holds no prompt, or, without `tell`, has a line that is not a prompt; the
            message names the line.
    """
    lines = read_input(path, "prompts", MOST_BYTES, remedy="name a file of JSON lines").splitlines()
    if len(lines) > MOST_PROMPTS:
        raise BadInput(f"{path} has {len(lines):,} lines, and may have {MOST_PROMPTS:,}: divide it")
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
    """Return a message that names the skipped lines, and the problem of the first one.

    Args:
        broken: the error of each malformed line, by line number from 1.
    """
    first, *others = broken
    rest = ""
    if others:
        named = ", ".join(map(str, others[:_NAMED_LINES]))
        more = f" and {len(others) - _NAMED_LINES} more" if len(others) > _NAMED_LINES else ""
        rest = f"; lines {named}{more} are not prompts either"
        if len(others) == 1:
            rest = f"; line {named} is not a prompt either"
    return f"{broken[first]}{rest}; {'they are' if others else 'it is'} skipped, and the other prompts run"


def _read_line(where: str, line: bytes) -> Prompt:
    read = decode_json(line, _Line, where, 'write {"prompt": "..."}', most=MOST_IDS)
    given = [each for each in (read.prompt, read.prompt_ids) if each is not None]
    if len(given) != 1:
        raise BadInput(f'{where}: give "prompt" or "prompt_ids", one of them')
    if not given[0]:
        raise BadInput(f"{where}: the prompt is empty: give at least one token")
    prompt: Prompt = given[0]
    return prompt


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer | None, config: ModelConfig, new_tokens: int
) -> list[list[int]]:
    """Return the token ids of each prompt, and check the ids against the model's vocabulary and context.

    Args:
        prompts: texts or token ids.
        tokenizer: encodes texts; None if the model has no tokenizer.
        new_tokens: number of tokens to generate, for which the context needs room after the prompt.

    Raises:
        BadInput: there are no prompts, or one is neither text nor ids, is empty, has an id outside the vocabulary,
            leaves no room for `new_tokens` in the model's context, or is text without a tokenizer to read it.
    """
    require_prompts(prompts)
    encoded = []
    for number, prompt in enumerate(prompts):
        ids = _encode(number, prompt, tokenizer, config.max_positions - new_tokens)
        _check(number, ids, config, new_tokens)
        encoded.append(ids)
    return encoded


def require_prompts(prompts: object) -> None:
    """Raise BadInput if the prompts are not a list, or if the list is empty."""
    if isinstance(prompts, str):
        raise BadInput(f"prompts are {shown(prompts)}, one text: give a list of texts, [{shown(prompts)}]")
    if not isinstance(prompts, Sized) or isinstance(prompts, bytes | Mapping | Set):
        raise BadInput(f"prompts are {shown(prompts)}: give a list of texts, or of lists of token ids")
    if len(prompts) == 0:
        raise BadInput("no prompts were given: give at least one")


def _encode(number: int, prompt: Prompt, tokenizer: Tokenizer | None, most: int) -> list[int]:
    given = prompt if isinstance(prompt, str) else _ids(number, prompt)
    if not given:
        raise BadInput(f"prompt {number} is empty: give at least one token")
    if not isinstance(given, str):
        return given
    if tokenizer is None:
        raise BadInput(
            f"prompt {number} is text, but the model has no tokenizer: add {TOKENIZER_NAME} to its folder, "
            'or give ids: --prompt-ids "1,2,3", or {"prompt_ids": [1, 2, 3]} in a file'
        )
    try:
        ids = tokenizer.encode(given, most)
    except BadInput as error:
        raise BadInput(f"prompt {number}: {error}") from error
    if not ids:
        raise BadInput(
            f"prompt {number}, {shown(given)}, has no tokens: give at least one that the tokenizer knows"
        )
    return ids


def _ids(number: int, prompt: Sequence[int]) -> list[int]:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
    if not is_list or not all(isinstance(token, Integral) for token in prompt):
        raise BadInput(f"prompt {number} is {shown(prompt)}: give a text, or a list of token ids")
    return list(prompt)


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
