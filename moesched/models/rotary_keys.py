"""Reads and writes the keys of config.json for the rotary embedding, in the spelling of old and of new files."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from moesched.models.config_file import RESTORE, ConfigFile, Keys
from moesched.models.rotary import LongRope, Rotary, Scaling
from moesched.system.decoding import convert_value
from moesched.system.near_names import nearest_of

DEFAULT = "default"
LONGROPE = LongRope.__struct_config__.tag
TRAINED = "original_max_position_embeddings"
KINDS = (DEFAULT, *(str(each.__struct_config__.tag) for each in get_args(Scaling)))
"""Values of `rope_type`."""


class RopeKeys(msgspec.Struct):
    """Keys that all types of rotary embedding share; `type` is the older name of the key `rope_type`."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    partial_rotary_factor: float | None = None


def read_rotary(
    file: ConfigFile,
    keys: Keys,
    *,
    head_dim: int,
    max_positions: int,
    theta: float | None = None,
    partial: bool = False,
) -> Rotary:
    """Return the rotary embedding that config.json describes.

    Args:
        max_positions: the longest context in tokens. It is taken as the context length in training if no key states
            that length.
        theta: base of the frequencies where the nested keys (`rope_parameters` or `rope_scaling`) have no `rope_theta`;
            None to take `keys.rope_theta` there.
        partial: whether models of this family may rotate only a part of each head.

    Raises:
        BadInput: the type is unknown, a value is impossible, layers differ, or only a part of each head is rotated in
            a family that rotates whole heads.
    """
    file.require_size("head_dim", head_dim)
    file.require_size("max_position_embeddings", max_positions)
    nested = _nested(file, keys)
    rope = convert_value(nested, RopeKeys, str(file.path), RESTORE)
    share = keys.partial_rotary_factor if rope.partial_rotary_factor is None else rope.partial_rotary_factor
    if not partial:
        file.require("partial_rotary_factor", share, None, 1.0)
    elif share is not None:
        file.require_number("partial_rotary_factor", share)
    bases = (rope.rope_theta, theta, keys.rope_theta)
    lengths = (keys.original_max_position_embeddings, nested.get(TRAINED), max_positions)
    trained = next(each for each in lengths if each is not None)
    rotary = Rotary(
        theta=next(each for each in bases if each is not None),
        width=None if share in (None, 1.0) else int(head_dim * share),
        scaling=_scaling(file, rope, nested | {TRAINED: trained}, max_positions),
    )
    if rotary.scaling is not None and rotary.theta == 1:
        raise file.impossible("rope_theta is 1", "frequencies that are scaled need a larger base")
    return rotary


def _nested(file: ConfigFile, keys: Keys) -> dict[str, Any]:
    """Return the nested keys of the rotary embedding, which newer files call rope_parameters, older ones rope_scaling.

    Raises:
        BadInput: the file has both and they differ, or layers of different kinds have their own.
    """
    newer, older = keys.rope_parameters or {}, keys.rope_scaling or {}
    if newer and older and _spelled(newer, keys) != _spelled(older, keys):
        raise file.impossible("rope_parameters and rope_scaling differ", "they must agree")
    nested = older or newer
    if by_kind := [key for key, value in nested.items() if isinstance(value, dict)]:
        raise file.unsupported("rope_parameters", by_kind, "one rotary embedding for all layers")
    return nested


def _spelled(nested: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """Return nested keys as newer files spell them; a missing base or type is added."""
    usual = {"rope_theta": keys.rope_theta, "rope_type": nested.get("type", DEFAULT)}
    return usual | {key: value for key, value in nested.items() if key != "type"}


def rotary_json(rotary: Rotary) -> dict[str, Any]:
    """Return the keys of config.json that describe a rotary embedding of whole heads."""
    scaling = {} if rotary.scaling is None else {"rope_scaling": msgspec.to_builtins(rotary.scaling)}
    return {"rope_theta": rotary.theta, **scaling}


def _scaling(file: ConfigFile, rope: RopeKeys, values: dict[str, Any], longest: int) -> Scaling | None:
    kind = rope.rope_type or rope.type or DEFAULT
    if kind == DEFAULT:
        return None
    if kind not in KINDS:
        near = nearest_of(kind, KINDS)
        raise file.unsupported("rope_type", kind, f"rope_type {', '.join(KINDS) if near is None else near}")
    values = {key: value for key, value in values.items() if value is not None}
    if kind == LONGROPE and isinstance(values[TRAINED], int) and values[TRAINED]:
        values = {"factor": longest / values[TRAINED]} | values
    where = f"{file.path}: rotary embedding of type {kind}"
    values |= {"rope_type": kind, "max_position_embeddings": longest}
    scaling: Scaling = convert_value(values, Scaling, where, RESTORE)  # type: ignore[arg-type]  # a union is no type to mypy
    return scaling
