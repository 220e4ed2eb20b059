"""The configuration of a model, read from the config.json of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from moesched.errors import BadInput
from moesched.models.config_keys import DbrxKeys, GenerationKeys, Keys, ModelType

DType = Literal["float32", "bfloat16"]
NormKind = Literal["rms", "layer"]
Form = Literal["llama", "dbrx"]
T = TypeVar("T")

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernels and the planner need to know of a model. Sizes are in elements.

    A dense model has one expert and no router. stop_tokens end a sequence. dtype is what the model computes
    in unless somebody asks for another one. norm: by the root mean square, or by mean and variance.
    clip_qkv: the largest magnitude that queries, keys and values keep. form: how its files name and cut
    tensors (see `published.py`). ranks: over how many it is cut (see `tensor_parallel.py`); heads, kv_heads and
    intermediate are then those of one rank, all else is the whole model's.
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
    norm: NormKind = "rms"
    clip_qkv: float | None = None
    form: Form = "llama"
    ranks: int = 1

    @property
    def transposed_down(self) -> bool:
        """Whether its files hold the experts' down matrices as (inputs, outputs)."""
        return self.form == "dbrx"


class _Family(msgspec.Struct, frozen=True, kw_only=True):
    """What models of one model_type have where their config.json is silent, or has no key for it."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int | None = 8
    experts: int = 1
    top_k: int = 1
    max_positions: int = 131072
    norm_eps: float = 1e-6
    rope_theta: float = 1e4
    sliding_window: int | None = None
    has_window: bool = True
    stop_tokens: int | None = 2
    norm: NormKind = "rms"
    form: Form = "llama"


_FAMILIES = {
    "mixtral": _Family(norm_eps=1e-5, rope_theta=1e6, experts=8, top_k=2),
    "mistral": _Family(sliding_window=4096),
    "llama": _Family(intermediate=11008, kv_heads=None, max_positions=2048, has_window=False),
    "dbrx": _Family(
        layers=24,
        hidden=2048,
        intermediate=3584,
        heads=16,
        kv_heads=1,
        experts=4,
        max_positions=2048,
        norm_eps=1e-5,
        has_window=False,
        stop_tokens=None,
        norm="layer",
        form="dbrx",
    ),
}

# float32 is the smaller of our dtypes that holds every float16.
_DTYPES: dict[str, DType] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}


def read_config(directory: Path | str) -> ModelConfig:
    """The configuration in directory/config.json: model_type mixtral, llama, mistral or dbrx.

    A missing or null setting has Hugging Face's default. Raises BadInput, naming the file, the value and the
    remedy, where the file cannot be read or asks for something that the kernels do not compute.
    """
    directory = Path(directory)
    path = directory / "config.json"
    model_type = _decode(path, ModelType).model_type
    family = _FAMILIES.get(model_type or "")
    if family is None:
        raise _unsupported(path, "model_type", model_type, f"one of {', '.join(sorted(_FAMILIES))}")
    file = _read_dbrx(path) if family.form == "dbrx" else _decode(path, Keys)
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


def _read_dbrx(path: Path) -> Keys:
    file = _decode(path, DbrxKeys).common()
    # Weights that sum to 1 are those of a softmax over the chosen experts alone, which is what the kernel computes.
    _require(path, "moe_normalize_expert_weights", file.moe_normalize_expert_weights, (UNSET, 1.0))
    published, newer = file.rope_theta, file.rope_parameters and file.rope_parameters.rope_theta
    if published and newer and published != newer:
        what = f"rope_theta is {published:g} in attn_config and {newer:g} in rope_parameters"
        raise _impossible(path, what, "they must agree")
    return file


def _unsupported(path: Path, key: str, value: object, supported: str) -> BadInput:
    return BadInput(f"{path}: {key} is {value!r}, which is not supported; use a checkpoint with {supported}")


def _refuse_unknown_features(path: Path, file: Keys, family: _Family) -> None:
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


def _resolve(path: Path, file: Keys, family: _Family) -> ModelConfig:
    heads = _or(file.num_attention_heads, family.heads)
    hidden = _or(file.hidden_size, family.hidden)
    is_mixture = family.experts > 1
    return ModelConfig(
        name=path.parent.resolve().name,
        layers=_or(file.num_hidden_layers, family.layers),
        hidden=hidden,
        intermediate=_or(file.intermediate_size, family.intermediate),
        heads=heads,
        kv_heads=_or(_or_unset(file.num_key_value_heads, family.kv_heads), heads),
        head_dim=_or(file.head_dim, hidden // max(heads, 1)),
        experts=_or(file.num_local_experts, family.experts) if is_mixture else 1,
        top_k=_or(file.num_experts_per_tok, family.top_k) if is_mixture else 1,
        vocabulary=_or(file.vocab_size, 32000),
        norm_eps=_or(file.rms_norm_eps, family.norm_eps),
        rope_theta=_rope_theta(file, family),
        sliding_window=_or_unset(file.sliding_window, family.sliding_window) if family.has_window else None,
        max_positions=_or(file.max_position_embeddings, family.max_positions),
        tied_embeddings=bool(file.tie_word_embeddings),
        stop_tokens=_stop_tokens(path, file, family),
        dtype=_dtype(path, file),
        norm=family.norm,
        clip_qkv=file.clip_qkv,
        form=family.form,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _or_unset(value: T | UnsetType | None, default: T | None) -> T | None:
    return default if isinstance(value, UnsetType) else value


def _rope_theta(file: Keys, family: _Family) -> float:
    nested = [rope.rope_theta for rope in (file.rope_scaling, file.rope_parameters) if rope is not None]
    return next((theta for theta in [*nested, file.rope_theta] if theta is not None), family.rope_theta)


def _stop_tokens(path: Path, file: Keys, family: _Family) -> tuple[int, ...]:
    tokens = family.stop_tokens if isinstance(file.eos_token_id, UnsetType) else file.eos_token_id
    generation = path.with_name("generation_config.json")
    if generation.is_file():
        tokens = _or(_decode(generation, GenerationKeys).eos_token_id, tokens)
    if tokens is None:
        return ()
    return (tokens,) if isinstance(tokens, int) else tuple(tokens)


def _dtype(path: Path, file: Keys) -> DType:
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
