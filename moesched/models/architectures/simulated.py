"""Base classes of architectures that are only simulated: no device has kernels for them, and no weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from moesched.errors import BadInput
from moesched.models.architectures.architecture import Architecture
from moesched.models.config import DType, ModelConfig
from moesched.models.config_file import AliasedKeys, ConfigFile
from moesched.models.layers import Layer, LinearAttention
from moesched.models.tensor_shapes import elements
from moesched.models.tensors import dense_shapes, expert_shapes

_NORM_EPS = 1e-6
"""Epsilon of norms, which only kernels need."""

MAY_BE_ZERO = {
    "eos_token_id",
    "first_k_dense_replace",
    "hidden_size_per_layer_input",
    "moe_intermediate_size",
    "n_shared_experts",
    "num_experts",
    "num_kv_shared_layers",
    "num_nextn_predict_layers",
    "shared_expert_intermediate_size",
    "top_k_experts",
}
"""Keys that may be 0: in models that lack a part, and for the id of a token."""


class SimulatedKeys(AliasedKeys, kw_only=True):
    """The keys of config.json that are read for all simulated architectures; subclasses add keys, with their defaults.

    Attributes:
        neutral: for each key that the simulation ignores, the values that it may have; any other value is refused.
        kinds: accepted entries of `layer_types`.
        by_layer: keys whose value is a list with one entry for each layer, or an empty list.
    """

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {"per_layer_config": ({},)}
    kinds: ClassVar[tuple[str, ...]] = ()
    by_layer: ClassVar[tuple[str, ...]] = ("layer_types",)

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    layer_types: tuple[str, ...] = ()
    per_layer_config: Any = msgspec.field(default_factory=dict)

    def kind(self, layer: int, default: str) -> str:
        """Return the kind of a layer, an entry of `layer_types`; without that key, `default`."""
        return self.layer_types[layer] if self.layer_types else default


class Family(NamedTuple):
    """An architecture that is only simulated: functions that turn its keys of config.json into a ModelConfig.

    Attributes:
        form: key of the architecture in `ARCHITECTURES`.
        keys: for each `model_type`, the class that config.json is decoded to.
        pattern: function from the keys to the model's layers, from first to last.
        unused: function from configuration and keys to the number of weights in published files that text generation
            does not need.
        expert_format: storage format of experts, as in ModelConfig.
    """

    form: str
    keys: Mapping[str, type[Any]]
    pattern: Callable[[Any], Iterable[Layer]]
    unused: Callable[[ModelConfig, Any], int] = lambda config, keys: 0
    expert_format: str | None = None

    def model(
        self, name: str, keys: SimulatedKeys, format_name: str | None = None, dtype: DType = "bfloat16"
    ) -> ModelConfig:
        """Return the ModelConfig that these keys describe.

        Args:
            format_name: storage format of the weights, a key of `FORMATS`; None for plain weights in `dtype`.
        """
        pattern = tuple(self.pattern(keys))
        if isinstance(pattern[-1].attention, LinearAttention):
            raise BadInput(
                f"{name}: its last layer has linear attention, which is not simulated: "
                "use a model whose last layer attends to all tokens"
            )
        stop = keys.eos_token_id
        config = ModelConfig(
            name=name,
            pattern=pattern,
            hidden=keys.hidden_size,
            vocabulary=keys.vocab_size,
            norm_eps=_NORM_EPS,
            max_positions=keys.max_position_embeddings,
            tied_embeddings=keys.tie_word_embeddings,
            stop_tokens=() if stop is None else (stop,) if isinstance(stop, int) else tuple(stop),
            dtype=dtype,
            form=self.form,
            format=format_name,
            expert_format=self.expert_format,
        )
        return msgspec.structs.replace(config, unused_weights=self.unused(config, keys))

    def read(self, file: ConfigFile) -> ModelConfig:
        """Convert config.json to a ModelConfig; the keys about text may be nested in `text_config`.

        Raises:
            BadInput: a value has the wrong type, is impossible, or describes layers that are not simulated.
        """
        keys = file.text_keys(self.keys[str(file.model_type)])
        _check(file, keys)
        dtype = file.dtype(keys.dtype or keys.torch_dtype, "bfloat16")
        return file.checked(self.model(file.name, keys, dtype=dtype))

    def architecture(
        self,
        models: Sequence[ModelConfig],
        sources: Sequence[str],
        left_out: Sequence[str] = (),
    ) -> Architecture:
        """Return the description of the architecture.

        Args:
            models: its known models.
            sources: for each of these models, the place where its sizes are published.
            left_out: names of tensors outside the layers that the publisher does not count among the active parameters.
        """
        return Architecture(
            model_types=tuple(self.keys),
            shapes=tuple(models),
            sources=dict(zip((model.name for model in models), sources, strict=True)),
            read=self.read,
            left_out=tuple(left_out),
            runs=False,
        )


def _check(file: ConfigFile, keys: SimulatedKeys) -> None:
    for key, accepted in keys.neutral.items():
        file.require(key, getattr(keys, key), *accepted)
    for kind in set(keys.layer_types):
        file.require("layer_types", kind, *keys.kinds)
    for field in msgspec.structs.fields(type(keys)):
        value = getattr(keys, field.name)
        if isinstance(value, int) and not isinstance(value, bool):
            file.require_size(field.name, value, least=0 if field.name in MAY_BE_ZERO else 1)
    file.require_layers(keys.num_hidden_layers)
    for key in keys.by_layer:
        if len(getattr(keys, key)) not in (0, keys.num_hidden_layers):
            what = f"{key} has {len(getattr(keys, key)):,} entries"
            raise file.impossible(what, f"num_hidden_layers is {keys.num_hidden_layers:,}")


def prediction_layer(config: ModelConfig, *, copies: int) -> int:
    """Return the number of weights of a multi-token prediction layer, which files may have after the model's layers.

    The prediction layer is built like the model's last layer, and has a projection and norms in addition.

    Args:
        copies: number of matrices of the embedding's size that the prediction layer has of its own, such as an LM head.
    """
    hidden, last = config.hidden, config.layers - 1
    layer = elements(dense_shapes(config, last).values())
    layer += config.routed.experts * elements(expert_shapes(config, last, 0).values())
    return layer + 2 * hidden * hidden + 3 * hidden + copies * config.vocabulary * hidden
