"""GGUF files written by hand, byte by byte, so that any of their counts and lengths can be wrong."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moesched.models.gguf.types import TENSOR_TYPES

U32, F32, TEXT, ARRAY = 4, 6, 8, 9
ALIGNMENT = 32
TOKENS = "tokenizer.ggml.tokens"
VOCABULARY = ("<unk>", "<s>", "</s>", "a", "b", "ab")


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A text with its length before it, or with another length."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def number(value: int) -> bytes:
    return struct.pack("<II", U32, value)


def real(value: float) -> bytes:
    return struct.pack("<If", F32, value)


def string(value: str | bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", TEXT) + text(value, length)


def texts(values: Sequence[str], count: int | None = None) -> bytes:
    begin = struct.pack("<IIQ", ARRAY, TEXT, len(values) if count is None else count)
    return begin + b"".join(map(text, values))


def numbers(values: Sequence[int], count: int | None = None) -> bytes:
    begin = struct.pack("<IIQ", ARRAY, U32, len(values) if count is None else count)
    return begin + struct.pack(f"<{len(values)}I", *values)


def reals(values: Sequence[float]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}f", ARRAY, F32, len(values), *values)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass
class Tensor:
    """A tensor; its offset is where the one before it ends, unless it is given.

    Attributes:
        kind: number of its type; 0 is float32.
    """

    name: str
    lengths: list[int]
    kind: int = 0
    offset: int | None = None

    @property
    def nbytes(self) -> int:
        """Its bytes, as far as a file may have them."""
        kind = TENSOR_TYPES.get(self.kind, TENSOR_TYPES[0])
        nbytes = math.prod(self.lengths) // kind.block * kind.block_bytes
        return nbytes if nbytes < 1 << 40 else 0


@dataclass
class Header:
    """A header; the weights after it are holes of the file.

    Attributes:
        keys: the metadata, each value with its type.
        count: of tensors, if it is not theirs.
        missing: bytes that the file lacks at its end.
    """

    keys: list[tuple[str, bytes]]
    tensors: list[Tensor] = field(default_factory=list)
    begin: bytes = b"GGUF" + struct.pack("<I", 3)
    count: int | None = None
    key_count: int | None = None
    missing: int = 0

    def set(self, key: str, value: bytes | None) -> None:
        """Replace a value, or remove it."""
        self.keys = [each for each in self.keys if each[0] != key]
        if value is not None:
            self.keys.append((key, value))

    def tensor(self, name: str) -> Tensor:
        return next(each for each in self.tensors if each.name == name)

    def write(self, file: Path) -> Path:
        count = len(self.tensors) if self.count is None else self.count
        key_count = len(self.keys) if self.key_count is None else self.key_count
        data = self.begin + struct.pack("<QQ", count, key_count)
        data += b"".join(text(key) + value for key, value in self.keys)
        end = 0
        for each in self.tensors:
            offset = end if each.offset is None else each.offset
            data += text(each.name) + struct.pack(f"<I{len(each.lengths)}Q", len(each.lengths), *each.lengths)
            data += struct.pack("<IQ", each.kind, offset)
            end += aligned(each.nbytes)
        file.write_bytes(data)
        os.truncate(file, aligned(len(data)) + end - self.missing)
        return file


def mixtral() -> Header:
    """A Mixtral of one layer with three experts, and a tokenizer of SentencePiece."""
    sizes = {
        "block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 6,
        "attention.head_count": 2, "attention.head_count_kv": 1, "expert_count": 3, "expert_used_count": 2,
    }  # fmt: skip
    keys = [("general.architecture", string("llama"))]
    keys += [(f"llama.{name}", number(value)) for name, value in sizes.items()]
    keys += [
        ("llama.attention.layer_norm_rms_epsilon", real(1e-5)),
        ("tokenizer.ggml.model", string("llama")),
        ("tokenizer.ggml.tokens", texts(VOCABULARY)),
        ("tokenizer.ggml.scores", reals([0.0] * 5 + [1.0])),
        ("tokenizer.ggml.token_type", numbers([2, 3, 3, 1, 1, 1])),
        ("tokenizer.ggml.eos_token_id", number(2)),
    ]
    layer = {
        "attn_norm": [8], "attn_q": [8, 8], "attn_k": [8, 4], "attn_v": [8, 4], "attn_output": [8, 8],
        "ffn_norm": [8], "ffn_gate_inp": [8, 3], "ffn_gate_exps": [8, 6, 3], "ffn_down_exps": [6, 8, 3],
        "ffn_up_exps": [8, 6, 3],
    }  # fmt: skip
    tensors = [
        Tensor("token_embd.weight", [8, 6]),
        Tensor("output_norm.weight", [8]),
        Tensor("output.weight", [8, 6]),
    ]
    tensors += [Tensor(f"blk.0.{name}.weight", lengths) for name, lengths in layer.items()]
    return Header(keys, tensors)


def byte_pairs() -> Header:
    """The same with byte pairs."""
    header = mixtral()
    header.set("tokenizer.ggml.model", string("gpt2"))
    header.set("tokenizer.ggml.pre", string("gpt-2"))
    header.set("tokenizer.ggml.merges", texts(["a b"]))
    return header


def gpt_oss() -> Header:
    """A gpt-oss of two layers with three experts in MXFP4, without a tokenizer."""
    name, width, mxfp4 = "gpt-oss", 32, 39
    sizes = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": width,
        "expert_feed_forward_length": width,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 4,
        "expert_count": 3,
        "expert_used_count": 2,
        "rope.scaling.original_context_length": 16,
    }
    keys = [("general.architecture", string(name)), (f"{name}.rope.scaling.type", string("yarn"))]
    keys += [(f"{name}.{key}", number(value)) for key, value in sizes.items()]
    keys += [
        (f"{name}.attention.layer_norm_rms_epsilon", real(1e-5)),
        (f"{name}.rope.freq_base", real(150_000.0)),
        (f"{name}.rope.scaling.factor", real(4.0)),
        ("tokenizer.ggml.model", string("no_vocab")),
    ]
    tensors = [
        Tensor("token_embd.weight", [width, 6]),
        Tensor("output_norm.weight", [width]),
        Tensor("output.weight", [width, 6]),
    ]
    matrices = {
        "attn_q": [width, 32],
        "attn_k": [width, 16],
        "attn_v": [width, 16],
        "attn_output": [32, width],
    }
    matrices |= {"ffn_gate_inp": [width, 3]}
    experts = {f"ffn_{part}_exps": [width, width, 3] for part in ("gate", "down", "up")}
    for block in ("blk.0.", "blk.1."):
        vectors = {"attn_norm": width, "post_attention_norm": width, "attn_sinks": 2}
        tensors += [Tensor(f"{block}{part}.weight", [length]) for part, length in vectors.items()]
        for part, lengths in (matrices | experts).items():
            kind = mxfp4 if part in experts else 0
            tensors += [
                Tensor(f"{block}{part}.weight", lengths, kind),
                Tensor(f"{block}{part}.bias", lengths[1:]),
            ]
    return Header(keys, tensors)


Change = Callable[[Header], None]
"""A change to a header."""


def key(name: str, value: bytes | None) -> Change:
    """Another value of a key, or none."""
    return lambda header: header.set(name, value)
