"""The configuration of a model, read from the config.json of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from moesched.errors import BadInput

DType = Literal["float32", "bfloat16"]
T = TypeVar("T")

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernels and the planner need to know of a model. Sizes are in elements.

    A dense model has one expert and no router. stop_tokens end a sequence. dtype is what the model computes
    in unless somebody asks for another one.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    vocabulary: int
    norm_eps: float
    rope_theta: float
    sliding_window: int | None
    max_positions: int
    tied_embeddings: bool
    stop_tokens: tuple[int, ...]
    dtype: DType


class _Family(msgspec.Struct, frozen=True, kw_only=True):
    """What models of one model_type have where their config.json is silent."""

    intermediate: int = 14336
    kv_heads: int | None = 8
    max_positions: int = 131072
    norm_eps: float = 1e-6
    rope_theta: float = 1e4
    sliding_window: int | None = None
    is_mixture: bool = False
    has_window: bool = True


_FAMILIES = {
    "mixtral": _Family(norm_eps=1e-5, rope_theta=1e6, is_mixture=True),
    "mistral": _Family(sliding_window=4096),
    "llama": _Family(intermediate=11008, kv_heads=None, max_positions=2048, has_window=False),
}

# float32 is the smaller of our dtypes that holds every float16.
_DTYPES: dict[str, DType] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}


class _Rope(msgspec.Struct):
    """The settings of the rotary embedding, in either spelling."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    partial_rotary_factor: float | None = None


class _File(msgspec.Struct):
    """The keys of config.json that matter; UNSET where a missing key and a null mean different things."""

    model_type: str | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | UnsetType | None = UNSET
    head_dim: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None
    vocab_size: int | None = None
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    partial_rotary_factor: float | None = None
    sliding_window: int | UnsetType | None = UNSET
    layer_types: list[str] | None = None
    max_position_embeddings: int | None = None
    tie_word_embeddings: bool | None = None
    eos_token_id: int | list[int] | UnsetType | None = UNSET
    hidden_act: str | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class _GenerationFile(msgspec.Struct):
    """generation_config.json, whose stop tokens go before those of config.json."""

    eos_token_id: int | list[int] | None = None


def read_config(directory: Path | str) -> ModelConfig:
    """The configuration in directory/config.json: model_type mixtral, llama or mistral.

    A missing or null setting has Hugging Face's default. Raises BadInput, naming the file, the value and the
    remedy, where the file cannot be read or asks for something that the kernels do not compute.
    """
    directory = Path(directory)
    path = directory / "config.json"
    file = _decode(path, _File)
    family = _FAMILIES.get(file.model_type or "")
    if family is None:
        raise _unsupported(path, "model_type", file.model_type, f"one of {', '.join(sorted(_FAMILIES))}")
    _refuse_unknown_features(path, file, family)
    config = _resolve(path, file, family)
    _check(path, config)
    return config


def _decode(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        remedy = "give the directory of a Hugging Face checkpoint"
        raise BadInput(f"{path.parent} has no {path.name}; {remedy}") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; check the path and its permissions") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: {error}; restore the file that came with the checkpoint") from error


def _unsupported(path: Path, key: str, value: object, supported: str) -> BadInput:
    return BadInput(f"{path}: {key} is {value!r}, which is not supported; use a checkpoint with {supported}")


def _refuse_unknown_features(path: Path, file: _File, family: _Family) -> None:
    for rope in (file.rope_parameters, file.rope_scaling):
        if rope is not None:
            rope_type = rope.rope_type or rope.type or "default"
            if rope_type != "default":
                raise _unsupported(path, "rope_type", rope_type, "rope_type 'default'")
            _require(path, "partial_rotary_factor", rope.partial_rotary_factor, (None, 1.0))
    _require(path, "partial_rotary_factor", file.partial_rotary_factor, (None, 1.0))
    _require(path, "hidden_act", file.hidden_act, (None, "silu", "swish"))
    _require(path, "attention_bias", file.attention_bias, (None, False))
    _require(path, "mlp_bias", file.mlp_bias, (None, False))
    if file.quantization_config is not None:
        method = file.quantization_config.get("quant_method")
        raise _unsupported(path, "quantization_config", method, "weights in bfloat16, float16 or float32")
    if family.has_window and len(set(file.layer_types or ())) > 1:
        raise _unsupported(path, "layer_types", sorted(set(file.layer_types or ())), "one kind of layer")


def _require(path: Path, key: str, value: object, accepted: tuple[object, ...]) -> None:
    if value not in accepted:
        raise _unsupported(path, key, value, f"{key} {accepted[1]!r}")


def _resolve(path: Path, file: _File, family: _Family) -> ModelConfig:
    heads = _or(file.num_attention_heads, 32)
    hidden = _or(file.hidden_size, 4096)
    return ModelConfig(
        name=path.parent.resolve().name,
        layers=_or(file.num_hidden_layers, 32),
        hidden=hidden,
        intermediate=_or(file.intermediate_size, family.intermediate),
        heads=heads,
        kv_heads=_or(_or_unset(file.num_key_value_heads, family.kv_heads), heads),
        head_dim=_or(file.head_dim, hidden // max(heads, 1)),
        experts=_or(file.num_local_experts, 8) if family.is_mixture else 1,
        top_k=_or(file.num_experts_per_tok, 2) if family.is_mixture else 1,
        vocabulary=_or(file.vocab_size, 32000),
        norm_eps=_or(file.rms_norm_eps, family.norm_eps),
        rope_theta=_rope_theta(file, family),
        sliding_window=_or_unset(file.sliding_window, family.sliding_window) if family.has_window else None,
        max_positions=_or(file.max_position_embeddings, family.max_positions),
        tied_embeddings=bool(file.tie_word_embeddings),
        stop_tokens=_stop_tokens(path, file),
        dtype=_dtype(path, file),
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _or_unset(value: T | UnsetType | None, default: T | None) -> T | None:
    return default if isinstance(value, UnsetType) else value


def _rope_theta(file: _File, family: _Family) -> float:
    nested = [rope.rope_theta for rope in (file.rope_scaling, file.rope_parameters) if rope is not None]
    return next((theta for theta in [*nested, file.rope_theta] if theta is not None), family.rope_theta)


def _stop_tokens(path: Path, file: _File) -> tuple[int, ...]:
    tokens: int | list[int] | None = 2 if isinstance(file.eos_token_id, UnsetType) else file.eos_token_id
    generation = path.with_name("generation_config.json")
    if generation.is_file():
        tokens = _or(_decode(generation, _GenerationFile).eos_token_id, tokens)
    if tokens is None:
        return ()
    return (tokens,) if isinstance(tokens, int) else tuple(tokens)


def _dtype(path: Path, file: _File) -> DType:
    name = _or(_or(file.dtype, file.torch_dtype), "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise _unsupported(path, "dtype", name, "bfloat16, float16 or float32")
    return _DTYPES[name]


def _check(path: Path, config: ModelConfig) -> None:
    for field in msgspec.structs.fields(ModelConfig):
        value = getattr(config, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            raise _impossible(path, f"{field.name} is {value}", "it must be positive")
    if config.heads % config.kv_heads:
        what = f"{config.heads} attention heads and {config.kv_heads} key-value heads"
        raise _impossible(path, what, "the second must divide the first")
    if config.head_dim % 2:
        raise _impossible(path, f"head_dim is {config.head_dim}", "rotary embedding needs an even number")
    if config.top_k > config.experts:
        what = f"num_experts_per_tok is {config.top_k}, num_local_experts {config.experts}"
        raise _impossible(path, what, "the first cannot be larger")


def _impossible(path: Path, what: str, why: str) -> BadInput:
    return BadInput(f"{path}: {what}, but {why}; restore the file that came with the checkpoint")
