"""A model's own chat template: the Jinja template that turns a conversation into one text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from moesched.errors import BadInput
from moesched.models.gguf.parts import is_gguf, read_parts
from moesched.models.gguf.vocabulary import read_vocabulary
from moesched.system.decoding import convert_value, decode_json
from moesched.system.input_file import is_file, read_input

FILE_NAME = "chat_template.jinja"
CONFIG_NAME = "tokenizer_config.json"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of the special tokens whose texts templates may use."""
MOST_BYTES = 20_000_000
MOST_TEMPLATE_BYTES = 1_000_000
_REMEDY = "copy it again from where the checkpoint came from"


class ChatTemplate(msgspec.Struct, frozen=True):
    """A chat template.

    Attributes:
        text: the template in Jinja.
        special: texts of the special tokens that the template may use, by name, such as "bos_token".
    """

    text: str
    special: dict[str, str] = {}


class _Named(msgspec.Struct, frozen=True):
    name: str
    template: str


class _Token(msgspec.Struct, frozen=True):
    content: str


class _Config(msgspec.Struct, frozen=True):
    """The keys of tokenizer_config.json that say how chats are written."""

    chat_template: str | list[_Named] | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None


def find_chat_template(model: Path) -> ChatTemplate | None:
    """Read the chat template of a model's folder, or of its GGUF file; None if the model has none.

    In a folder, the file `chat_template.jinja` is preferred to `tokenizer_config.json`. If the latter has several
    templates, the one with the name "default" is taken.

    Raises:
        BadInput: a file cannot be read, or has something else in the place of the template.
    """
    return _of_gguf(model) if is_gguf(model) else _of_folder(model)


def _of_folder(model: Path) -> ChatTemplate | None:
    config = _read_config(model / CONFIG_NAME)
    own = model / FILE_NAME
    if is_file(own):
        text = _as_text(read_input(own, "chat template", MOST_TEMPLATE_BYTES), own)
    elif isinstance(config.chat_template, list):
        named = {each.name: each.template for each in config.chat_template}
        if "default" not in named:
            return None
        text = named["default"]
    elif config.chat_template is not None:
        text = config.chat_template
    else:
        return None
    tokens = {name: getattr(config, name) for name in SPECIAL}
    return ChatTemplate(
        text,
        {
            name: token.content if isinstance(token, _Token) else token
            for name, token in tokens.items()
            if token is not None
        },
    )


def _read_config(path: Path) -> _Config:
    if not is_file(path):
        return _Config()
    return decode_json(read_input(path, "tokenizer configuration", MOST_BYTES), _Config, str(path), _REMEDY)


def _as_text(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8: {error}; {_REMEDY}") from error


def _of_gguf(model: Path) -> ChatTemplate | None:
    parts = read_parts(model)
    found: Any = parts.metadata.get("tokenizer.chat_template")
    if found is None:
        return None
    text = convert_value(found, str, f"{parts.path}: tokenizer.chat_template", _REMEDY)
    vocabulary = read_vocabulary(parts)
    ids: Mapping[str, int | None] = {
        "bos_token": vocabulary.bos_token_id,
        "eos_token": vocabulary.eos_token_id,
        "unk_token": vocabulary.unknown_token_id,
    }
    return ChatTemplate(
        text,
        {
            name: vocabulary.tokens[token]
            for name, token in ids.items()
            if token is not None and vocabulary.tokens
        },
    )
