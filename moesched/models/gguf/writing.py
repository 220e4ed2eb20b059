"""Makes headers of GGUF files: metadata without a tokenizer, and the place of each tensor."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from moesched.models.config import ModelConfig
from moesched.models.formats import role_of
from moesched.models.gguf.families import GGUF_FAMILIES, architecture_of
from moesched.models.gguf.header import ALIGNMENT, FLAG, FLOAT32, MAGIC, TEXT, UNSIGNED, VERSIONS
from moesched.models.gguf.tensor_names import gguf_tensors
from moesched.models.gguf.types import TENSOR_TYPES
from moesched.models.gguf.written_keys import gguf_keys
from moesched.models.published import with_shapes
from moesched.models.stored_formats import STORED_FORMATS
from moesched.models.written_tensor import WrittenTensor

NO_TOKENIZER = "no_vocab"

_NUMBERS = {each.stored.name: number for number, each in TENSOR_TYPES.items() if each.stored is not None}
"""Numbers of types in GGUF files, by storage format."""


class WrittenHeader(NamedTuple):
    """The header of a GGUF file to be written, and the places of its tensors.

    Attributes:
        data: the bytes of the header, up to the first tensor.
        starts: for each tensor, in order, its offset in the file in bytes.
        size: size of the file in bytes.
    """

    data: bytes
    starts: list[int]
    size: int


def gguf_tensors_of(config: ModelConfig) -> Iterator[WrittenTensor]:
    """Yield the tensors to write to a model's GGUF file; norms, biases and routers are in float32."""
    plain = STORED_FORMATS[config.dtype]
    family = GGUF_FAMILIES[architecture_of(config)]
    for name, tensor in with_shapes(config, gguf_tensors(family, config)).items():
        first = tensor.parts[0][0]
        is_small = role_of(first) == "small"
        stored = STORED_FORMATS["float32"] if is_small else config.kept_format(first) or plain
        yield WrittenTensor(name, tensor.shape, stored)


def written_header(config: ModelConfig, tensors: Sequence[WrittenTensor]) -> WrittenHeader:
    """Return the header of a GGUF file with these tensors."""
    architecture = architecture_of(config)
    keys = msgspec.to_builtins(gguf_keys(config))
    metadata = {
        "general.architecture": architecture,
        "general.name": config.name,
        **{f"{architecture}.{key}": value for key, value in keys.items() if value is not None},
        "tokenizer.ggml.model": NO_TOKENIZER,
    }
    data = bytearray(struct.pack("<IIQQ", MAGIC, VERSIONS[-1], len(tensors), len(metadata)))
    for key, value in metadata.items():
        data += _text(key) + _value(value)
    offsets, end = [], 0
    for tensor in tensors:
        data += _text(tensor.name) + struct.pack(
            f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape)
        )
        data += struct.pack("<IQ", _NUMBERS[tensor.stored.name], end)
        offsets.append(end)
        end = _aligned(end + tensor.nbytes)
    data += bytes(_aligned(len(data)) - len(data))
    return WrittenHeader(bytes(data), [len(data) + offset for offset in offsets], len(data) + end)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: str | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", FLAG, value)
    return (
        struct.pack("<If", FLOAT32, value)
        if isinstance(value, float)
        else struct.pack("<II", UNSIGNED, value)
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
