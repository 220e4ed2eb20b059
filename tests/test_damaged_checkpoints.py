"""Checkpoints that are damaged, mixed or hostile: opening one gives a line that names the file, and takes no time."""

from __future__ import annotations

import json
import os
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesched.models.checkpoint import open_checkpoint
from moesched.models.headers import LARGEST_JSON
from stored_checkpoints import (
    Stored,
    assert_complete,
    dense,
    published,
    refusal,
    write,
    write_config,
    write_sharded,
)

INDEX = "model.safetensors.index.json"
ROTARY = "model.layers.0.self_attn.rotary_emb.inv_freq"
Entries = dict[str, Any]


def with_header(directory: Path, change: Callable[[Entries], object], stored: Stored | None = None) -> Path:
    """A checkpoint of one file, whose header is changed while its data stays."""
    file = write(directory, stored or published()) / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8:end])
    text = change(entries)
    header = text.encode() if isinstance(text, str) else json.dumps(entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + whole[end:])
    return directory


def with_index(directory: Path, change: Callable[[dict[str, str]], object]) -> Path:
    """A checkpoint of three files, whose index is changed."""
    index = write_sharded(directory, published()) / INDEX
    weight_map = json.loads(index.read_text())["weight_map"]
    text = change(weight_map)
    index.write_text(text if isinstance(text, str) else json.dumps({"weight_map": weight_map}))
    return directory


# ---------------------------------------------------------------- headers


def overlapping(entries: Entries) -> None:
    entries["lm_head.weight"]["data_offsets"] = entries["model.embed_tokens.weight"]["data_offsets"]


def swapped(entries: Entries) -> None:
    first, second = (entries[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "kv")
    first["data_offsets"], second["data_offsets"] = second["data_offsets"], first["data_offsets"]


def without_one(entries: Entries) -> None:
    del entries["model.norm.weight"]


def without_the_last(entries: Entries) -> None:
    entries.popitem()


def shifted(entries: Entries) -> None:
    for entry in list(entries.values())[1:]:
        entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]


def twice(entries: Entries) -> str:
    return json.dumps(entries)[:-1] + ', "lm_head.weight": ' + json.dumps(entries["lm_head.weight"]) + "}"


def twice_inside(entries: Entries) -> str:
    return json.dumps(entries).replace('"dtype": "F32"', '"dtype": "F16", "dtype": "F32"', 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (overlapping, "lm_head.weight overlaps model.embed_tokens.weight"),
        (without_one, "24 bytes before lm_head.weight belong to no tensor"),
        (without_the_last, r"bytes after .*experts.2.w2.weight belong to no tensor"),
        (shifted, "8 bytes before model.embed_tokens.weight belong to no tensor"),
        (twice, "it has 'lm_head.weight' twice"),
        (twice_inside, "it has 'dtype' twice"),
        (lambda entries: "[" * 100_000, "it is nested too deep"),
        (lambda entries: '{"a": ' * 100_000, "it is nested too deep"),
        (lambda entries: f'{{"a": {"9" * 5000}}}', "no valid safetensors header"),
        (
            lambda entries: json.dumps(dict.fromkeys(range(200_000))),
            "it has 200,000 tensors, no model has more",
        ),
        (lambda entries: entries.update({"a\nb": entries["lm_head.weight"]}), r"a tensor 'a\\nb'"),
        (lambda entries: entries.update({"\x1b[2J": entries["lm_head.weight"]}), r"a tensor '\\x1b\[2J'"),
        (lambda entries: entries.update({"\ud800": entries["lm_head.weight"]}), r"a tensor '\\ud800'"),
        (lambda entries: entries["lm_head.weight"].update(shape=[-11, -6]), "no valid safetensors header"),
        (lambda entries: entries["lm_head.weight"].update(shape=[2**40, 2**40]), "of shape"),
        (
            lambda entries: entries["lm_head.weight"].update(shape=["\ud800", 6]),
            "no valid safetensors header",
        ),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(
    tmp_path: Path, change: Callable[[Entries], object], said: str
) -> None:
    message = refusal(with_header(tmp_path, change))
    assert message.startswith(str(tmp_path / "model.safetensors"))
    assert re.search(said, message), message


def test_tensors_may_be_in_any_order(tmp_path: Path) -> None:
    assert_complete(open_checkpoint(with_header(tmp_path, swapped)))


def test_a_header_beyond_every_real_one_is_not_read(tmp_path: Path) -> None:
    file = write(tmp_path, published()) / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write((LARGEST_JSON + 1).to_bytes(8, "little"))
        opened.truncate(10 * LARGEST_JSON)
    assert "its header would have 16,777,217 bytes" in refusal(tmp_path)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("model.norm.weight", "norm.weight"),
        ("model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
    ],
)
def test_a_tensor_of_the_model_that_is_stored_twice_is_refused(
    tmp_path: Path, name: str, beside: str
) -> None:
    stored = published()
    stored.add(beside, *stored.tensors[name][1])
    message = refusal(write(tmp_path, stored))
    assert f"{beside} and {name} in model.safetensors are both" in message


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.block_sparse_moe.experts.3.w1.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "score.weight",
    ],
)
def test_a_tensor_that_the_model_does_not_have_is_refused(tmp_path: Path, name: str) -> None:
    stored = published()
    stored.add(name, 6)
    message = refusal(write(tmp_path, stored))
    assert f"{name} is no tensor of a model of 2 layers with 3 experts" in message


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 1}, {"num_local_experts": 2}])
def test_a_config_with_fewer_layers_or_experts_than_the_files_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    refusal(write(tmp_path, published(), **changes))


def test_tensors_that_the_architecture_declares_as_extra_are_skipped_and_listed(tmp_path: Path) -> None:
    stored = published()
    stored.tensors[ROTARY] = ("F8_E4M3", [2], b"..")
    checkpoint = open_checkpoint(write(tmp_path, stored))
    assert_complete(checkpoint)
    assert checkpoint.skipped == (ROTARY,)


def test_the_lm_head_of_a_file_is_used_whatever_config_json_says_of_tied_embeddings(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, published(), tie_word_embeddings=True))
    assert_complete(checkpoint)
    assert "lm_head" in checkpoint.tensors


# ---------------------------------------------------------------- counts


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 9_000},
        {"num_hidden_layers": 10**15},
        {"num_local_experts": 40_000},
        {"num_local_experts": 10**7},
        {"vocab_size": 10**12},
        {"num_attention_heads": 10**9},
    ],
)
def test_counts_beyond_the_files_are_refused_before_anything_is_built_by_them(
    tmp_path: Path, changes: dict[str, int]
) -> None:
    write(tmp_path, published(), **changes)
    tracemalloc.start()
    began = time.process_time()
    message = refusal(tmp_path)
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "config.json" in message
    assert seconds < 0.5
    assert peak < 10_000_000


def test_counts_are_compared_with_what_the_files_hold(tmp_path: Path) -> None:
    said = "config.json describes 2 layers with 4,000 experts, 768,546 weights in 24,017 tensors"
    assert f"{said}, and the files hold 1,122" in refusal(
        write(tmp_path, published(), num_local_experts=4_000)
    )


def test_tiny_tensors_do_not_allow_a_table_of_any_size(tmp_path: Path) -> None:
    stored = Stored("BF16")
    stored.add("model.embed_tokens.weight", 10**6)
    tiny = {"hidden_size": 1, "intermediate_size": 1, "num_attention_heads": 1, "head_dim": 2}
    write(tmp_path, stored, **tiny, num_local_experts=45_000)
    assert "in 270,017 tensors" in refusal(tmp_path)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    "name",
    [
        "../other/w.safetensors",
        "{folder}/w.safetensors",
        "a/../../w.safetensors",
        "",
        ".",
        "a\0b",
        "a\nb",
        "\ud800",
    ],
)
def test_an_index_that_names_a_file_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    name = name.replace("{folder}", str(tmp_path))
    message = refusal(with_index(tmp_path, lambda files: files.update({"lm_head.weight": name})))
    assert message.startswith(f"{tmp_path / INDEX} names {name!r}, which is no file of its folder")


def test_links_inside_the_folder_may_point_anywhere(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    write_sharded(tmp_path / "snapshot", published())
    for number, file in enumerate((tmp_path / "snapshot").iterdir()):
        blob = file.rename(tmp_path / f"blob-{number}")
        file.symlink_to(blob)
    assert_complete(open_checkpoint(tmp_path / "snapshot"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda files: files.__delitem__("lm_head.weight"),
            "has lm_head.weight, which .* does not put there",
        ),
        (
            lambda files: json.dumps({"weight_map": files})[:-2] + ', "lm_head.weight": "b"}}',
            "'lm_head.weight' twice",
        ),
        (lambda files: '{"weight_map": ' + "[" * 100_000, "it is nested too deep"),
        (
            lambda files: json.dumps({"weight_map": dict.fromkeys(range(200_000), "a")}),
            "it has 200,000 tensors",
        ),
        (lambda files: " " * (LARGEST_JSON + 1), "more than 16,777,216"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, change: Callable[[dict[str, str]], object], said: str
) -> None:
    assert re.search(said, refusal(with_index(tmp_path, change)))


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", INDEX])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    file = write_sharded(tmp_path, published()) / name
    file.unlink()
    make(file)
    refusal(tmp_path)


def test_a_pipe_as_the_only_file_is_refused_at_once(tmp_path: Path) -> None:
    write_config(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")
    assert "model.safetensors: it is a pipe" in refusal(tmp_path)


def test_a_dense_model_may_have_no_router(tmp_path: Path) -> None:
    stored = dense()
    stored.add("model.layers.0.block_sparse_moe.gate.weight", 1, 6)
    assert "block_sparse_moe.gate.weight is no tensor" in refusal(
        write(tmp_path, stored, model_type="mistral")
    )
