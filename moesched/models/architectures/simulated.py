"""Keys and conversions common to architectures that are only simulated: no kernels, no files of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from moesched.models.architectures.architecture import COMMON_FORMATS, Architecture
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.layers import Layer, LinearAttention, elements
from moesched.models.tensors import dense_shapes, expert_shapes

_NO_INFLUENCE: dict[str, Any] = {"norm_eps": 1e-6, "rope_theta": 1e4}
"""Settings of ModelConfig that only kernels need."""


class SimulatedKeys(msgspec.Struct, kw_only=True):
    """Keys of config.json that all these architectures have."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None


K = TypeVar("K", bound=SimulatedKeys)


class Family(NamedTuple):
    """What an architecture derives from its keys.

    Attributes:
        keys: the type of the keys.
        pattern: the kinds of all layers.
        unused: weights in the published files that text does not need.
        expert_format: as in ModelConfig.
    """

    form: str
    keys: type[Any]
    pattern: Callable[[Any], Iterable[Layer]]
    unused: Callable[[ModelConfig, Any], int] = lambda config, keys: 0
    expert_format: str | None = None

    def model(self, name: str, keys: SimulatedKeys, format_name: str | None = None) -> ModelConfig:
        """The model with these keys."""
        pattern = tuple(self.pattern(keys))
        attention, network = pattern[-1].attention, pattern[-1].feed_forward
        assert not isinstance(attention, LinearAttention), "the last layer attends to all tokens"
        stop = keys.eos_token_id
        config = ModelConfig(
            name=name,
            layers=keys.num_hidden_layers,
            hidden=keys.hidden_size,
            intermediate=network.intermediate,
            heads=attention.heads,
            kv_heads=attention.cached_heads,
            head_dim=attention.attended_width // attention.heads,
            experts=network.experts,
            top_k=network.top_k,
            vocabulary=keys.vocab_size,
            sliding_window=None,
            max_positions=keys.max_position_embeddings,
            tied_embeddings=keys.tie_word_embeddings,
            stop_tokens=() if stop is None else (stop,) if isinstance(stop, int) else tuple(stop),
            dtype="bfloat16",
            form=self.form,
            pattern=pattern,
            format=format_name,
            expert_format=self.expert_format,
            **_NO_INFLUENCE,
        )
        return msgspec.structs.replace(config, unused_weights=self.unused(config, keys))

    def read(self, file: ConfigFile) -> ModelConfig:
        """Convert config.json, of which some models nest the part on text.

        Raises:
            BadInput: a value has the wrong type, or is impossible.
        """
        keys = file.text_keys(self.keys)
        return file.checked(self.model(file.name, keys, file.stored_format(keys.quantization_config)))

    def architecture(
        self,
        model_types: Sequence[str],
        models: Sequence[ModelConfig],
        sources: Sequence[str],
        left_out: Sequence[str] = (),
        formats: Sequence[str] = COMMON_FORMATS,
    ) -> Architecture:
        """The architecture, with its known models and the source of each."""
        return Architecture(
            model_types=tuple(model_types),
            shapes=tuple(models),
            sources=dict(zip((model.name for model in models), sources, strict=True)),
            formats=tuple(formats),
            read=self.read,
            left_out=tuple(left_out),
            runs=False,
        )


def prediction_layer(config: ModelConfig, *, copies: int) -> int:
    """Weights of an extra prediction layer: a layer like the last one, and the projection and norms before it.

    copies: matrices as large as the embedding that the files hold once more for it.
    """
    hidden, last = config.hidden, config.layers - 1
    layer = elements(dense_shapes(config, last).values())
    layer += config.experts * elements(expert_shapes(config, last, 0).values())
    return layer + 2 * hidden * hidden + 3 * hidden + copies * config.vocabulary * hidden
