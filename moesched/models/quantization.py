"""Reads the storage format of weights from `quantization_config` in config.json, as several tools write this key."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec.structs import replace

from moesched.models.coded_models import METHOD, MIXES, coded_as
from moesched.models.config import ModelConfig
from moesched.models.config_file import RESTORE, ConfigFile
from moesched.models.formats import EXPERTS_ONLY, GROUPS, integer_format
from moesched.models.mxfp4 import with_experts_in_mxfp4
from moesched.system.decoding import convert_value

ATTENTION = re.compile(r"attn(?!.*(norm|kv_a_proj))")
"""Matches names of attention's projections, but not of its norms or of DeepSeek's small projection."""
METHODS = (METHOD, "fp8", "mxfp4", "awq", "gptq", "auto-round", "compressed-tensors", "bitsandbytes")
BLOCK_OF_NF4 = 64
"""Weights that share a scale in the four-bit formats of bitsandbytes."""


class _Weights(msgspec.Struct, frozen=True):
    """Keys of config.json for the quantised weights of a group of layers, as written by compressed-tensors."""

    num_bits: int = 8
    type: str = "int"
    group_size: int | None = None


class _Group(msgspec.Struct):
    weights: _Weights | None = None


class _Keys(msgspec.Struct, kw_only=True):
    """The keys of quantization_config for all tools, which spell some of them differently."""

    quant_method: str | None = None
    format: str = ""
    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    config_groups: dict[str, _Group] = {}
    expert_dtype: str = "fp8"
    ignore: list[str] = []
    ignored_layers: list[str] = []
    modules_to_not_convert: list[str] = []
    llm_int8_skip_modules: list[str] | None = None
    load_in_4bit: bool = False
    load_in_8bit: bool = False


def in_stored_format(config: ModelConfig, file: ConfigFile, quantization: dict[str, Any]) -> ModelConfig:
    """Return the model with its weights in the storage format that config.json describes.

    Args:
        file: config.json; messages name it.
        quantization: the file's value of the key `quantization_config`.

    Raises:
        BadInput: no known format fits the value.
    """
    keys = convert_value(quantization, _Keys, f"{file.path}: quantization_config", RESTORE)
    if keys.quant_method == "mxfp4" and config.routed.alternating:
        return with_experts_in_mxfp4(config)
    if keys.quant_method != METHOD:
        return replace(config, format=_average_format(file, keys))
    if keys.format not in MIXES:
        raise file.unsupported("format", keys.format, f"one of {', '.join(MIXES)}")
    return coded_as(config, keys.format)


def _average_format(file: ConfigFile, keys: _Keys) -> str:
    """Return the storage format that the settings describe, as a key of `FORMATS`.

    If the tool left attention unquantised, the format is one in which only experts are quantised.
    """
    name = _format_of_matrices(file, keys)
    left_out = [
        *keys.ignore,
        *keys.ignored_layers,
        *keys.modules_to_not_convert,
        *(keys.llm_int8_skip_modules or ()),
    ]
    attention_stays = any(map(ATTENTION.search, left_out))
    return name + EXPERTS_ONLY if attention_stays and name != "mxfp4" else name


def _format_of_matrices(file: ConfigFile, keys: _Keys) -> str:
    match keys.quant_method:
        case "fp8":
            file.require("expert_dtype", keys.expert_dtype, "fp8")
            return "fp8"
        case "mxfp4":
            return "mxfp4"
        case "awq":
            return _integers(file, keys.bits or keys.w_bit or 4, keys.group_size or keys.q_group_size)
        case "gptq" | "auto-round":
            return _integers(file, keys.bits, keys.group_size)
        case "compressed-tensors":
            return _compressed(file, keys)
        case "bitsandbytes" if keys.load_in_4bit:
            return _integers(file, 4, BLOCK_OF_NF4)
        case "bitsandbytes":
            return _integers(file, 8 if keys.load_in_8bit else None, None)
    raise file.unsupported(
        "quant_method", keys.quant_method, f"one of {', '.join(METHODS)}, or simulate it with --format"
    )


def _compressed(file: ConfigFile, keys: _Keys) -> str:
    kinds = {group.weights for group in keys.config_groups.values() if group.weights is not None}
    if len(kinds) != 1:
        described = sorted(f"{kind.num_bits}-bit {kind.type}" for kind in kinds)
        raise file.unsupported("config_groups", described, "one kind of weights")
    [weights] = kinds
    if weights.type == "float":
        file.require("num_bits", weights.num_bits, 8)
        return "fp8"
    return _integers(file, weights.num_bits, weights.group_size)


def _integers(file: ConfigFile, bits: int | None, group: int | None) -> str:
    if bits not in (4, 8):
        raise file.unsupported("bits", bits, "bits 4 or 8")
    size = GROUPS[-1] if group is None or group < 1 else group  # -1 is a whole row
    return integer_format(bits, min(GROUPS, key=lambda known: abs(known - size)))
