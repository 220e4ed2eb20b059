"""Reads the scaling of rotary embeddings from GGUF files: from metadata, or from a tensor of factors (Llama 3.1)."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesched.errors import BadInput
from moesched.models.gguf.keys import GgufKeys
from moesched.models.headers import RESTORE, FoundTensor
from moesched.models.rotary import Linear, LongRope, Yarn
from moesched.system.input_file import open_input
from moesched.system.near_names import with_nearest
from moesched.system.plain_text import shown

FACTORS = "rope_freqs.weight"
NONE, LINEAR, YARN = "none", str(Linear.__struct_config__.tag), str(Yarn.__struct_config__.tag)
KINDS = (NONE, LINEAR, YARN)
"""Values of `rope.scaling.type`."""


def rope_scaling(
    path: Path, keys: GgufKeys, tensors: Mapping[str, FoundTensor], *, truncate: bool
) -> dict[str, Any] | None:
    """Return the keys of config.json that describe the scaling of a rotary embedding; None without scaling.

    Args:
        path: the file, for error messages.
        tensors: the tensors in the files, by name.
        truncate: YaRN's setting of this name, for which GGUF files have no key.

    Raises:
        BadInput: the type of scaling is unknown or has no factor, one of the keys `attn_factor`, `yarn_attn_factor` and
            `yarn_ext_factor` has another value than 1, the files have both a type and a tensor of factors, or the
            tensor is not a float32 vector with one factor for each pair of a head's entries that are rotated.
    """
    kind = keys.rotation_kind
    if kind not in KINDS:
        remedy = with_nearest(kind, KINDS, f"use a model with {', '.join(KINDS)}")
        raise BadInput(f"{path}: rope.scaling.type is {shown(kind)}, which is not supported: {remedy}")
    _require_one(path, "attn_factor", keys.rope__scaling__attn_factor)
    if FACTORS in tensors:
        if kind != NONE:
            raise BadInput(f"{path}: {FACTORS} and rope.scaling.type {kind} both scale rotations; {RESTORE}")
        return _by_factors(tensors[FACTORS], (keys.rope__dimension_count or keys.head_dim) // 2)
    if kind == NONE:
        return None
    if keys.rotation_factor is None:
        raise BadInput(f"{path} has rope.scaling.type {kind} and no rope.scaling.factor; {RESTORE}")
    scaling = {"rope_type": kind, "factor": keys.rotation_factor}
    if kind == LINEAR:
        return scaling
    _require_one(path, "yarn_attn_factor", keys.rope__scaling__yarn_attn_factor)
    _require_one(path, "yarn_ext_factor", keys.rope__scaling__yarn_ext_factor)
    return scaling | {
        "original_max_position_embeddings": keys.rope__scaling__original_context_length,
        "beta_fast": keys.rope__scaling__yarn_beta_fast,
        "beta_slow": keys.rope__scaling__yarn_beta_slow,
        "truncate": truncate,
    }


def _require_one(path: Path, name: str, value: float | None) -> None:
    """Raise BadInput if the file has the key `rope.scaling.NAME`, with another value than 1."""
    if value not in (None, 1.0):
        raise BadInput(
            f"{path}: rope.scaling.{name} is {shown(value)}, which is not supported; use a model with 1.0"
        )


def _by_factors(found: FoundTensor, pairs: int) -> dict[str, Any]:
    """Read the tensor of factors, and return it as the keys of config.json for LongRoPE.

    The factors are returned both as long and as short ones, so that the length of the context does not matter.

    Args:
        pairs: number of pairs of a head's entries that are rotated; each pair has one factor.

    Raises:
        BadInput: the tensor has another shape or type, or an entry that is not a positive number.
    """
    if found.entry.dtype != "F32" or found.entry.shape != (pairs,):
        what = f"{list(found.entry.shape)} of type {found.entry.dtype}"
        raise BadInput(f"{found.file}: {FACTORS} is {what}, and [{pairs}] of type F32 is needed; {RESTORE}")
    with open_input(found.file, "weights", remedy=RESTORE) as file:
        file.seek(found.data_start + found.entry.data_offsets[0])
        factors = struct.unpack(f"<{pairs}f", file.read(found.nbytes))
    for place, factor in enumerate(factors):
        if not (math.isfinite(factor) and factor > 0):
            raise BadInput(
                f"{found.file}: entry {place} of {FACTORS} is {factor:g}, but it must be positive; {RESTORE}"
            )
    return {
        "rope_type": str(LongRope.__struct_config__.tag),
        "factor": 1.0,
        "long_factor": factors,
        "short_factor": factors,
    }
