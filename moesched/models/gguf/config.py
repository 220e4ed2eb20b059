"""Reads the configuration of a model from the metadata and the tensors of its GGUF files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from moesched.errors import BadInput
from moesched.models.architectures import BY_MODEL_TYPE
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.gguf.families import GGUF_FAMILIES, GgufFamily
from moesched.models.gguf.keys import GgufKeys
from moesched.models.gguf.parts import GgufParts, gguf_name
from moesched.models.gguf.rotation import rope_scaling
from moesched.models.gguf.tensor_names import as_in_gguf
from moesched.models.gguf.types import BY_NAME
from moesched.models.gguf.vocabulary import Vocabulary
from moesched.models.headers import RESTORE, FoundTensor
from moesched.models.stored_formats import PLAIN
from moesched.system.decoding import convert_value
from moesched.system.near_names import with_nearest
from moesched.system.plain_text import shown

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
QUERY_NORM = "blk.0.attn_q_norm.weight"
MEAN_NORM_EPSILON = 1e-5
"""Epsilon of norms by mean and variance, in all published models."""


def family_of(parts: GgufParts) -> GgufFamily:
    """Return the family of a model, which its metadata give as `general.architecture`.

    Raises:
        BadInput: no device has kernels for the architecture.
    """
    name = parts.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in GGUF_FAMILIES:
        remedy = with_nearest(str(name), GGUF_FAMILIES, f"use a model of {', '.join(GGUF_FAMILIES)}")
        raise BadInput(
            f"{parts.path}: no device has kernels for general.architecture {shown(name)}: {remedy}"
        )
    return GGUF_FAMILIES[name]


def gguf_config(parts: GgufParts, vocabulary: Vocabulary) -> ModelConfig:
    """Convert metadata to a ModelConfig, as if all weights were plain.

    Raises:
        BadInput: a key is missing, asks for a feature that the kernels do not support, or contradicts the tensors.
    """
    family, tensors = family_of(parts), {found.name: found for found in parts.shards.tensors}
    if EMBEDDING not in tensors or len(tensors[EMBEDDING].entry.shape) != 2:
        raise BadInput(f"{parts.path} has no {EMBEDDING} of two dimensions: give a file with weights")
    keys = _keys(parts, family)
    values = family.config_json(keys) | {
        "vocab_size": _vocabulary_size(parts, tensors[EMBEDDING], len(vocabulary.tokens), keys.vocab_size),
        "tie_word_embeddings": HEAD not in tensors,
        "use_qk_norm": QUERY_NORM in tensors,
        "rope_scaling": rope_scaling(parts.path, keys, tensors, truncate=family.truncate),
    }
    file = ConfigFile(
        parts.path, values, gguf_name(parts.path), lambda: _dtype(tensors.values()), vocabulary.stop_tokens
    )
    return as_in_gguf(BY_MODEL_TYPE[values["model_type"]].read(file))


def _keys(parts: GgufParts, family: GgufFamily) -> GgufKeys:
    """Return the keys of the metadata that describe the model.

    Raises:
        BadInput: a key is missing, or a value has the wrong type or asks for a feature that the kernels do not support.
    """
    prefix = f"{parts.metadata['general.architecture']}."
    values = {
        key.removeprefix(prefix): value for key, value in parts.metadata.items() if key.startswith(prefix)
    }
    if missing := [f"{prefix}{key}" for key in family.needed if key not in values]:
        raise BadInput(f"{parts.path} has no key {', '.join(missing)}; {RESTORE}")
    keys = convert_value(values, GgufKeys, f"{parts.path}: {prefix[:-1]}", RESTORE)

    def require(key: str, value: object, *accepted: object) -> None:
        if value not in accepted:
            raise BadInput(
                f"{parts.path}: {prefix}{key} is {shown(value)}, which is not supported; use a model with "
                f"{shown(accepted[0])}"
            )

    require("expert_gating_func", keys.expert_gating_func, family.score, None)
    if not family.partial:
        require("rope.dimension_count", keys.rope__dimension_count, keys.head_dim, None)
    if family.windows_in_turn:
        require("rope.freq_base_swa", keys.rope__freq_base_swa, keys.rope__freq_base, None)
    require("attention.value_length", keys.attention__value_length, keys.head_dim, None)
    if family.rotation_switch:
        require("rope.scaling.finetuned", keys.rope__scaling__finetuned, True, None)
    require("attention.layer_norm_epsilon", keys.attention__layer_norm_epsilon, MEAN_NORM_EPSILON, None)
    return keys


def _vocabulary_size(parts: GgufParts, embedding: FoundTensor, tokens: int, described: int | None) -> int:
    """Return the number of tokens of the vocabulary: the number of rows of the embedding.

    Args:
        tokens: number of the tokenizer's tokens; 0 without a tokenizer.
        described: the metadata's `vocab_size`; None without this key.

    Raises:
        BadInput: the embedding, the tokenizer and the key give different numbers.
    """
    rows = embedding.entry.shape[0]
    for what, size in (("tokenizer.ggml.tokens", tokens or rows), ("vocab_size", described or rows)):
        if size != rows:
            raise BadInput(
                f"{parts.path}: {what} says {size:,} tokens, and {EMBEDDING} has {rows:,} rows; {RESTORE}"
            )
    return rows


def _dtype(tensors: Iterable[FoundTensor]) -> str:
    """Return the dtype of most bytes of the matrices; bfloat16 if most bytes are in a quantised format."""
    weights: Counter[str] = Counter()
    for found in tensors:
        if len(found.entry.shape) > 1:
            weights[found.entry.dtype] += found.nbytes
    stored = BY_NAME[weights.most_common(1)[0][0]].stored
    return stored.name if stored is not None and stored.name in PLAIN else "bfloat16"
