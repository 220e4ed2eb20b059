"""Configurations: what is read of a config.json, and how a bad one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesched.models.checkpoint import open_checkpoint
from moesched.models.headers import header_copy
from moesched.models.layers import FeedForward, GroupedAttention
from moesched.models.reading import read_config
from stored_checkpoints import (
    published,
    refusal,
    write,
    write_config,
    write_sharded,
)


def config_of(directory: Path, **changes: Any) -> Any:
    write_config(directory, **changes)
    return read_config(directory)


def test_every_setting_reaches_the_configuration(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        rms_norm_eps=1e-4,
        rope_theta=5e5,
        sliding_window=8,
        max_position_embeddings=99,
        tie_word_embeddings=True,
        eos_token_id=[3, 4],
        torch_dtype="bfloat16",
    )
    assert (config.name, config.layers, config.hidden, config.vocabulary) == (tmp_path.name, 2, 6, 11)
    assert config.attention == GroupedAttention(heads=3, kv_heads=1, head_dim=4, rope_theta=5e5, window=8)
    assert config.routed == FeedForward(experts=3, top_k=2, intermediate=5)
    assert (config.norm_eps, config.max_positions, config.tied_embeddings) == (1e-4, 99, True)
    assert (config.stop_tokens, config.dtype) == ((3, 4), "bfloat16")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 77.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        {"rope_theta": 77, "rope_scaling": None, "rope_parameters": None},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 77.0}},
        {"rope_theta": 5.0, "rope_scaling": {"type": "default", "rope_theta": 77.0}},
    ],
)
def test_rope_settings_are_read_in_either_spelling(tmp_path: Path, rope: dict[str, Any]) -> None:
    assert config_of(tmp_path, **rope).attention.rope_theta == 77.0


def test_a_null_means_the_default_of_hugging_face(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        model_type="mistral",
        head_dim=None,
        num_key_value_heads=None,
        rope_theta=None,
        rms_norm_eps=None,
        sliding_window=None,
        eos_token_id=None,
    )
    attention = config.attention
    assert (attention.head_dim, attention.kv_heads) == (2, 3)  # hidden_size // heads, as many as heads
    assert (attention.rope_theta, config.norm_eps) == (1e4, 1e-6)
    assert (attention.window, config.stop_tokens) == (None, ())  # null switches these off


def test_stop_tokens_of_generation_go_before_those_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert config_of(tmp_path, eos_token_id=2).stop_tokens == (7, 8)


def test_a_directory_without_config_json_is_refused(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        assert f"cannot read configuration {directory / 'config.json'}: No such file" in refusal(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", "not json", '"\\ud800"', '{"hidden_size": "large"}'])
def test_a_config_that_is_no_json_object_of_settings_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "config.json: " in refusal(tmp_path)


def test_a_config_in_no_known_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff\xfe"}')
    assert "config.json: " in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"model_type": None}, "model_type is None"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type is 'llama3'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "exl2"}}, "quant_method is 'exl2'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is ['full_attention'"),
        ({"model_type": "ministral", "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"model_type": "ministral", "layer_types": ["chunked"] * 2}, "layer_types is 'chunked'"),
        ({"torch_dtype": "float8"}, "dtype is 'float8'"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"vocab_size": -5}, "vocabulary is -5"),
        ({"num_attention_heads": 0}, "heads is 0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "3 attention heads and 2 key-value heads"),
        ({"head_dim": 3}, "head_dim is 3"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4"),
    ],
)
def test_a_model_that_the_kernels_do_not_compute_is_refused_with_its_value(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    message = refusal(write(tmp_path, published(), **changes))
    assert message.startswith(str(tmp_path / "config.json"))
    assert complaint in message


# ---------------------------------------------------------------- facts that only the weights tell


@pytest.mark.parametrize(
    ("stored_as", "dtype"), [("BF16", "bfloat16"), ("F32", "float32"), ("F16", "float32")]
)
@pytest.mark.parametrize("sharded", [False, True])
def test_without_a_dtype_the_model_has_that_of_its_weights(
    tmp_path: Path, stored_as: str, dtype: str, sharded: bool
) -> None:
    (write_sharded if sharded else write)(tmp_path, published(stored_as))
    write_config(tmp_path, torch_dtype=None)
    assert read_config(tmp_path).dtype == open_checkpoint(tmp_path).config.dtype == dtype


def test_a_copy_of_a_header_tells_the_dtype_too(tmp_path: Path) -> None:
    write_sharded(tmp_path, published("BF16"))
    write_config(tmp_path, torch_dtype=None)
    for file in tmp_path.glob("*.safetensors"):
        data = file.read_bytes()
        header_copy(file).write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
        file.unlink()
    assert read_config(tmp_path).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 1e-300),
        ("rope_theta", 0.5),
        ("rope_theta", 1e300),
        ("rms_norm_eps", 1e-300),
        ("rms_norm_eps", 1e39),
    ],
)
def test_a_number_that_float32_cannot_compute_with_is_refused(tmp_path: Path, key: str, value: float) -> None:
    write_config(tmp_path, **{key: value})
    assert f"{value!r}" in refusal(tmp_path)
