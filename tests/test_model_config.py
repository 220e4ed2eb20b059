"""Configurations: what is read of a config.json, and how a bad one is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from moesched.errors import BadInput
from moesched.inputs.lookup import find_shape
from moesched.models.checkpoint import open_checkpoint
from moesched.models.headers import header_copy
from moesched.models.layers import GroupedAttention
from moesched.models.networks import FeedForward
from moesched.models.random_model import write_random_model
from moesched.models.reading import read_config
from moesched.models.rotary import Rotary
from moesched.models.shapes import SHAPES
from small_models import TINY
from stored_checkpoints import (
    published,
    refusal,
    write,
    write_config,
    write_sharded,
)
from tables import files, table

PUBLISHED = files("published.md")
"""Texts of config.json."""


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
    assert config.attention == GroupedAttention(
        heads=3, kv_heads=1, head_dim=4, rotary=Rotary(theta=5e5), window=8
    )
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
    assert config_of(tmp_path, **rope).attention.rotary.theta == 77.0


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
    assert (attention.rotary.theta, config.norm_eps) == (1e4, 1e-6)
    assert (attention.window, config.stop_tokens) == (None, ())  # null switches these off


@pytest.mark.parametrize("file", PUBLISHED)
def test_the_published_configuration_is_the_named_shape(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text(PUBLISHED[file])
    assert find_shape(tmp_path) == replace(SHAPES[file.removesuffix(".json")], name=tmp_path.name)


@pytest.mark.parametrize("whole", [True, False])
def test_a_shape_keeps_norms_in_float32_that_its_files_have(tmp_path: Path, whole: bool) -> None:
    model = write_random_model(TINY, tmp_path / "m")
    [file] = model.glob("*.safetensors")
    tensors = {name: tensor.float() if "norm" in name else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    if not whole:
        file.unlink()
    kept = find_shape(model).pattern[0].formats
    assert kept == ((("attention_norm", "float32"), ("ffn_norm", "float32")) if whole else ())


def test_stop_tokens_of_generation_go_before_those_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert config_of(tmp_path, eos_token_id=2).stop_tokens == (7, 8)


@pytest.mark.parametrize("text", ["", "{", "[]", "not json", '"\\ud800"', '{"hidden_size": "large"}'])
def test_a_config_that_is_no_json_object_of_settings_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "config.json: " in refusal(tmp_path)


def test_a_config_in_no_known_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff\xfe"}')
    assert "config.json: " in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    table("broken_files.md", "Configurations"),
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


def test_a_copy_of_the_header_may_stand_for_the_only_file(tmp_path: Path) -> None:
    write(tmp_path, published("BF16"), tie_word_embeddings=True)
    whole, file = open_checkpoint(tmp_path), tmp_path / "model.safetensors"
    data = file.read_bytes()
    header_copy(file).write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    file.unlink()
    opened = open_checkpoint(tmp_path, partial=True)
    assert (opened.config, opened.tensors) == (whole.config, whole.tensors)
    assert opened.absent == {file: len(data)}
    with pytest.raises(BadInput, match=r"model\.safetensors: No such file"):
        open_checkpoint(tmp_path)


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


def test_a_model_in_a_folder_whose_name_is_no_text_has_a_name_that_reports_can_hold(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    assert config_of(folder).name == r"\udcff"
