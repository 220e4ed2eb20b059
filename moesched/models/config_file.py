"""Reads Hugging Face's config.json and checks the keys that all models have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from moesched.errors import BadInput
from moesched.models.config import DType, ModelConfig
from moesched.models.layers import Attention, GroupedAttention, Layer
from moesched.models.networks import FeedForward
from moesched.models.rotary import Rotary
from moesched.models.shards import stored_dtype
from moesched.system.decoding import convert_value, decode_json, reason
from moesched.system.input_file import is_file, read_input
from moesched.system.plain_text import plain_text, shown

T = TypeVar("T")

CONFIG_NAME = "config.json"
MOST_BYTES = 4_000_000
MOST = 10**8
"""Limit of any size in a configuration."""
MOST_ROTARY = 65_536
"""Largest number of a head's entries that the rotary embedding may rotate."""
MOST_LAYERS = 10_000
MOST_EXPERTS = 100_000
"""Limit of the number of experts of all layers together."""
FLOAT32_RANGE = (2.0**-126, 2.0**127)
"""Smallest and largest magnitude that a number may have, so that float32 holds it in full precision."""
LEAST = {"rope_theta": 1.0}
"""Lower limits of single numbers, by key. With a smaller `rope_theta`, angles of the rotary embedding overflow."""
MAY_BE_ZERO = ("unused_weights", "shared")
"""Fields that are 0 in a model without the part that they size."""
_KEYS = {
    "window": "sliding_window",
    "clip": "clip_qkv",
    "theta": "rope_theta",
    "alpha": "swiglu_alpha",
    "limit": "swiglu_limit",
    "embedding_factor": "embedding_multiplier",
    "residual_factor": "residual_multiplier",
}
"""Keys in config.json by the name of the field of ModelConfig or of its parts, where the two names differ."""
RESTORE = "restore the file that came with the checkpoint"

NULL_SAYS_SOMETHING = (
    "sliding_window",
    "eos_token_id",
    "num_key_value_heads",
    "moe_normalize_expert_weights",
    "q_lora_rank",
    "attention_chunk_size",
    "partial_rotary_factor",
)
"""Keys for which null is a value. Any other null means the default, as a missing key does."""

# float32 is the smallest supported dtype that represents every float16.
_DTYPES: dict[str, DType] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}


class AliasedKeys(msgspec.Struct, kw_only=True):
    """Keys of config.json that may have other names.

    Attributes:
        aliases: pairs (another name that transformers accepts for a key, name of the key's field here).
    """

    aliases: ClassVar[tuple[tuple[str, str], ...]] = ()


class Keys(AliasedKeys, kw_only=True):
    """The keys of config.json that are read for every model that runs on devices, with Hugging Face's defaults.

    Architectures add keys and override defaults in subclasses.
    """

    vocab_size: int = 32000
    rope_theta: float = 1e4
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = 2
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    is_causal: bool = True
    dtype: str | None = None
    torch_dtype: str | None = None
    per_layer_config: dict[str, Any] = {}


class _TypeKey(msgspec.Struct):
    model_type: str | None = None


class _QuantizationKey(msgspec.Struct):
    quantization_config: dict[str, Any] | None = None


class _GenerationKeys(msgspec.Struct):
    """The key of generation_config.json that is read: its stop tokens replace the stop tokens of config.json."""

    eos_token_id: int | list[int] | None = None


class ConfigFile:
    """The values of a config.json, or of a GGUF file's metadata that were converted to the keys of config.json.

    Args:
        path: the file, for error messages.
        values: values by key.
        name: the model's name.
        stored_dtype: function that returns the dtype of most weights in the files; None without weights.
        stop_tokens: ids of tokens that end a sequence, instead of those in `values`; None for those in `values`.
    """

    def __init__(
        self,
        path: Path,
        values: dict[str, Any],
        name: str,
        stored_dtype: Callable[[], str | None],
        stop_tokens: tuple[int, ...] | None = None,
    ) -> None:
        self.path = path
        self.name = name
        self._values = values
        self._stored_dtype = stored_dtype
        self._stop_tokens = stop_tokens

    @classmethod
    def in_folder(cls, directory: Path) -> ConfigFile:
        """Read the config.json in a folder.

        Raises:
            BadInput: the file cannot be read, or is not a JSON object.
        """
        path = directory / CONFIG_NAME
        return cls(
            path,
            _read(path),
            plain_text(directory.resolve().name),
            partial(stored_dtype, directory),
            _generation_stops(directory / "generation_config.json"),
        )

    @property
    def model_type(self) -> str | None:
        """The value of the key `model_type`, which selects the architecture; None without the key."""
        return self.keys(_TypeKey).model_type

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The value of `quantization_config`, by which a quantising tool describes the weights; None without it."""
        return self.text_keys(_QuantizationKey).quantization_config

    def keys(self, kind: type[T]) -> T:
        """Decode the keys to an object of the class `kind`, which declares keys, types and defaults.

        Raises:
            BadInput: a value has the wrong type; the message names its key.
        """
        return self._decode(self._values, kind)

    def text_keys(self, kind: type[T]) -> T:
        """Decode the keys to an object of the class `kind`; keys nested in `text_config` take precedence.

        The only exception is `tie_word_embeddings`, whose outer value takes precedence.

        Raises:
            BadInput: a value has the wrong type; the message names its key.
        """
        nested = self._values.get("text_config")
        if not isinstance(nested, dict):
            return self.keys(kind)
        # The head belongs to the outer model, and so does the key that ties it.
        outer = {key: self._values[key] for key in ("tie_word_embeddings",) if key in self._values}
        return self._decode(self._values | nested | outer, kind)

    def _decode(self, values: dict[str, Any], kind: type[T]) -> T:
        aliases = kind.aliases if issubclass(kind, AliasedKeys) else ()
        named = {name: values[alias] for alias, name in aliases if alias in values}
        return convert_value(values | named, kind, str(self.path), RESTORE)

    def dtype(self, given: str | None, otherwise: DType) -> DType:
        """Return the dtype to compute in: `given`, else that of the weights, else `otherwise`; float32 for float16.

        Args:
            given: name of the dtype in config.json; None if there is none.

        Raises:
            BadInput: the dtype is not supported, or the weights cannot be read.
        """
        name = (given or self._stored_dtype() or otherwise).removeprefix("torch.")
        if name not in _DTYPES:
            raise self.unsupported("dtype", name, "bfloat16, float16 or float32")
        return _DTYPES[name]

    def checked(self, config: ModelConfig) -> ModelConfig:
        """Check that the values of a configuration are possible, and return the configuration.

        Raises:
            BadInput: a value is impossible.
        """
        self._check(config)
        return config

    def build(self, keys: Keys, layers: int, kinds: Sequence[Layer], **particular: Any) -> ModelConfig:
        """Return the ModelConfig made from the common keys and from settings of the architecture.

        Args:
            layers: number of layers.
            kinds: the first layers; the model repeats them in this order up to its number of layers.
            particular: further fields of `ModelConfig`.

        Raises:
            BadInput: a feature is not supported by the kernels, or a value is impossible.
        """
        self._refuse_unknown_features(keys)
        self.require_layers(layers)
        settings: dict[str, Any] = {
            "name": self.name,
            "pattern": tuple(islice(cycle(kinds), layers)),
            "vocabulary": keys.vocab_size,
            "tied_embeddings": keys.tie_word_embeddings,
            "stop_tokens": self._stops(keys),
            "dtype": self.dtype(keys.dtype or keys.torch_dtype, "float32"),
        }
        return self.checked(ModelConfig(**(settings | particular)))

    def require(self, key: str, value: object, *accepted: object) -> None:
        """Raise BadInput unless the value of a key is one of `accepted`."""
        if value not in accepted:
            raise self.unsupported(key, value, f"{key} {accepted[0]!r}")

    def unsupported(self, key: str, value: object, supported: str) -> BadInput:
        """Return the error for a key's value that the kernels do not support.

        Args:
            supported: key and value of a supported checkpoint, in words.
        """
        return BadInput(
            f"{self.path}: {key} is {shown(value)}, which is not supported; use a checkpoint with {supported}"
        )

    def impossible(self, what: str, why: str) -> BadInput:
        """Return the error for values that no model can have.

        Args:
            what: the values, in words.
            why: the reason why they are impossible, in words.
        """
        return BadInput(f"{self.path}: {what}, but {why}; {RESTORE}")

    def _refuse_unknown_features(self, keys: Keys) -> None:
        self.require("hidden_act", keys.hidden_act, "silu", "swish")
        self.require("attention_bias", keys.attention_bias, False)
        self.require("mlp_bias", keys.mlp_bias, False)
        self.require("is_causal", keys.is_causal, True)
        self.require("per_layer_config", keys.per_layer_config, {})

    def _stops(self, keys: Keys) -> tuple[int, ...]:
        return _token_ids(keys.eos_token_id) if self._stop_tokens is None else self._stop_tokens

    def require_size(self, key: str, value: int, least: int = 1) -> None:
        """Raise BadInput if a size is less than `least`, or beyond a limit that no model reaches."""
        if value < least:
            raise self.impossible(
                f"{key} is {shown(value)}", "it must be positive" if least else "it must not be negative"
            )
        if value > MOST:
            raise self.impossible(f"{key} is {shown(value)}", f"it may be {MOST:,}")

    def require_layers(self, layers: int) -> None:
        """Raise BadInput if the number of layers is 0, or beyond a limit that no model reaches."""
        self.require_size("num_hidden_layers", layers)
        if layers > MOST_LAYERS:
            raise self.impossible(f"num_hidden_layers is {layers:,}", f"it may be {MOST_LAYERS:,}")

    def require_number(self, name: str, value: float) -> None:
        """Raise BadInput if a number is too large or too small for float32; an int has the limits of `require_size`.

        Args:
            name: the key, for the message.
        """
        if isinstance(value, int):
            self.require_size(name, value)
        elif not LEAST.get(name, FLOAT32_RANGE[0]) <= value <= FLOAT32_RANGE[1]:
            raise self.impossible(f"{name} is {shown(value)}", "float32 overflows or loses it")

    def _require_numbers(self, of: msgspec.Struct) -> None:
        for name in of.__struct_fields__:
            value = getattr(of, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and name not in MAY_BE_ZERO:
                self.require_number(_KEYS.get(name, name), value)

    def _check(self, config: ModelConfig) -> None:
        self._require_numbers(config)
        routed = config.routed
        self._require_numbers(routed)
        self._require_numbers(routed.activation)
        self.require_size("shared_intermediate_size", routed.shared, least=0)
        self.require_number("routed_scaling_factor", routed.router.scale)
        for layer in config.kinds:
            self._check_attention(layer.attention)
        if config.layers * routed.experts > MOST_EXPERTS:
            what = f"{config.layers:,} layers have {routed.experts:,} experts each"
            raise self.impossible(what, f"there may be {MOST_EXPERTS:,} in all")
        if routed.top_k > routed.experts:
            what = f"num_experts_per_tok is {routed.top_k}, num_local_experts {routed.experts}"
            raise self.impossible(what, "the first cannot be larger")
        self._check_groups(routed)

    def _check_groups(self, routed: FeedForward) -> None:
        groups, kept, experts = routed.router.groups, routed.router.kept_groups, routed.experts
        self.require_size("n_group", groups)
        self.require_size("topk_group", kept)
        if groups == 1 and kept == 1:
            return
        if experts % groups or experts < 2 * groups:
            what = f"n_group is {groups:,} and there are {experts:,} experts"
            raise self.impossible(what, "groups are equal in size and have at least two")
        if kept > groups:
            raise self.impossible(f"topk_group is {kept:,}, n_group {groups:,}", "the first cannot be larger")
        if routed.top_k > kept * (experts // groups):
            what = f"num_experts_per_tok is {routed.top_k:,}"
            raise self.impossible(what, f"the kept groups have {kept * (experts // groups):,} experts")

    def _check_attention(self, attention: Attention) -> None:
        self._require_numbers(attention)
        if attention.heads % attention.cached_heads:
            what = f"{attention.heads} attention heads and {attention.cached_heads} key-value heads"
            raise self.impossible(what, "the second must divide the first")
        if isinstance(attention, GroupedAttention):
            self._check_rotary(attention.rotary, attention.head_dim)

    def _check_rotary(self, rotary: Rotary, head_dim: int) -> None:
        self._require_numbers(rotary)
        width = rotary.turning(head_dim)
        if width % 2:
            what = (
                f"head_dim is {head_dim}" if width == head_dim else f"the rotary width of a head is {width}"
            )
            raise self.impossible(what, "rotary embedding needs an even number")
        most = min(head_dim, MOST_ROTARY)
        if width > most:
            raise self.impossible(f"the rotary width of a head is {width:,}", f"it may be {most:,}")
        if rotary.scaling is not None:
            self._require_numbers(rotary.scaling)
            if problem := rotary.scaling.problem(width // 2):
                raise BadInput(f"{self.path}: {problem}; {RESTORE}")


def _generation_stops(path: Path) -> tuple[int, ...] | None:
    """Return the stop tokens in generation_config.json; None if there is no such file, or no such key."""
    if not is_file(path):
        return None
    tokens = convert_value(_read(path), _GenerationKeys, str(path), RESTORE).eos_token_id
    return None if tokens is None else _token_ids(tokens)


def _token_ids(tokens: int | list[int] | None) -> tuple[int, ...]:
    if tokens is None:
        return ()
    return (tokens,) if isinstance(tokens, int) else tuple(tokens)


def _read(path: Path) -> dict[str, Any]:
    remedy = "give the directory of a Hugging Face checkpoint, or a GGUF file"
    data = read_input(path, "configuration", MOST_BYTES, remedy=remedy)
    values = decode_json(data, dict[str, Any], str(path), RESTORE)
    try:
        return _without_defaults(values)
    except RecursionError as error:
        raise BadInput(f"{path}: {reason(error)}; {RESTORE}") from error


def _without_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy without the keys whose value is null; keys in NULL_SAYS_SOMETHING stay with any value."""
    return {
        key: _without_defaults(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None or key in NULL_SAYS_SOMETHING
    }
