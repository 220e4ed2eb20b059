"""Checkpoints: tensors found in a Hugging Face directory; a damaged, mixed or hostile one is refused by its file."""

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
    content,
    dense,
    fused,
    published,
    refusal,
    write,
    write_config,
    write_sharded,
)

FILE, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00002-of-00003.safetensors"
ROTARY = "model.layers.0.self_attn.rotary_emb.inv_freq"
Json = dict[str, Any]
Writer = Callable[[Path], object]

# ---------------------------------------------------------------- what is found


@pytest.mark.parametrize("write_it", [write, write_sharded])
def test_a_published_mixtral_has_every_tensor_in_its_place(
    tmp_path: Path, write_it: Callable[[Path, Stored], Path]
) -> None:
    stored = published()
    checkpoint = open_checkpoint(write_it(tmp_path, stored))
    assert_complete(checkpoint)
    pairs = {
        "embedding": "model.embed_tokens.weight",
        "layers.1.attention_norm": "model.layers.1.input_layernorm.weight",
        "layers.1.ffn_norm": "model.layers.1.post_attention_layernorm.weight",
        "layers.0.o": "model.layers.0.self_attn.o_proj.weight",
        "layers.1.router": "model.layers.1.block_sparse_moe.gate.weight",
        "layers.1.experts.2.gate": "model.layers.1.block_sparse_moe.experts.2.w1.weight",
        "layers.1.experts.2.down": "model.layers.1.block_sparse_moe.experts.2.w2.weight",
        "layers.1.experts.2.up": "model.layers.1.block_sparse_moe.experts.2.w3.weight",
    }
    for canonical, name in pairs.items():
        assert content(checkpoint.tensors[canonical]) == stored.tensors[name][2]


def test_an_expert_of_a_fused_tensor_is_its_range_of_bytes(tmp_path: Path) -> None:
    stored = fused()
    gate_up, down = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
    part = 5 * 6 * 4
    marks = [bytes([i + 1]) * part for i in range(6)]  # gate and up of expert 0, of expert 1, of expert 2
    stored.tensors[gate_up] = ("F32", [3, 10, 6], b"".join(marks))
    stored.tensors[down] = ("F32", [3, 6, 5], b"".join(marks[:3]))
    checkpoint = open_checkpoint(write(tmp_path, stored))
    assert_complete(checkpoint)
    for expert in range(3):
        parts = [f"layers.1.experts.{expert}.{part}" for part in ("gate", "up", "down")]
        found = [content(checkpoint.tensors[name]) for name in parts]
        assert found == [marks[2 * expert], marks[2 * expert + 1], marks[expert]]


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_dense_model_has_one_expert_and_no_router(tmp_path: Path, model_type: str) -> None:
    checkpoint = open_checkpoint(write(tmp_path, dense(), model_type=model_type))
    assert_complete(checkpoint)
    assert (checkpoint.config.routed.experts, checkpoint.config.routed.top_k) == (1, 1)
    assert "layers.0.experts.0.gate" in checkpoint.tensors
    assert "layers.0.router" not in checkpoint.tensors


@pytest.mark.parametrize("stored", [True, False])
def test_the_lm_head_of_a_file_is_used_and_may_be_missing_where_embeddings_are_tied(
    tmp_path: Path, stored: bool
) -> None:
    model = published()
    if not stored:
        del model.tensors["lm_head.weight"]
    checkpoint = open_checkpoint(write(tmp_path, model, tie_word_embeddings=True))
    assert_complete(checkpoint)
    assert ("lm_head" in checkpoint.tensors) is stored


@pytest.mark.parametrize(("dtype", "name"), [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32")])
def test_each_tensor_says_its_dtype(tmp_path: Path, dtype: str, name: str) -> None:
    checkpoint = open_checkpoint(write(tmp_path, published(dtype)))
    assert {tensor.format.name for tensor in checkpoint.tensors.values()} == {name}


def test_tensors_that_the_architecture_declares_as_extra_are_skipped_and_listed(tmp_path: Path) -> None:
    stored = published()
    stored.tensors[ROTARY] = ("F8_E4M3", [2], b"..")
    checkpoint = open_checkpoint(write(tmp_path, stored))
    assert_complete(checkpoint)
    assert checkpoint.skipped == (ROTARY,)


def test_links_inside_the_folder_may_point_anywhere(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    write_sharded(tmp_path / "snapshot", published())
    for number, file in enumerate((tmp_path / "snapshot").iterdir()):
        blob = file.rename(tmp_path / f"blob-{number}")
        file.symlink_to(blob)
    assert_complete(open_checkpoint(tmp_path / "snapshot"))


# ---------------------------------------------------------------- what is refused


def stored(change: Callable[[Stored], object], of: Callable[[], Stored] = published, **config: Any) -> Writer:
    """A checkpoint of one file, whose tensors or configuration are others."""

    def write_it(folder: Path) -> None:
        tensors = of()
        change(tensors)
        write(folder, tensors, **config)

    return write_it


def added(name: str, *shape: int) -> Writer:
    return stored(lambda tensors: tensors.add(name, *shape))


def configured(**config: Any) -> Writer:
    return stored(lambda tensors: None, **config)


def header(change: Callable[[Json], object]) -> Writer:
    """A checkpoint of one file, whose header is changed while its data stays."""

    def write_it(folder: Path) -> None:
        file = write(folder, published()) / FILE
        whole = file.read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        entries = json.loads(whole[8:end])
        text = change(entries)
        new = text.encode() if isinstance(text, str) else json.dumps(entries).encode()
        file.write_bytes(len(new).to_bytes(8, "little") + new + whole[end:])

    return write_it


def head(**changes: Any) -> Writer:
    return header(lambda entries: entries["lm_head.weight"].update(changes))


def renamed(name: str) -> Writer:
    return header(lambda entries: entries.update({name: entries["lm_head.weight"]}))


def index(change: Callable[[dict[str, str]], object]) -> Writer:
    """A checkpoint of three files, whose index is changed."""

    def write_it(folder: Path) -> None:
        file = write_sharded(folder, published()) / INDEX
        weight_map = json.loads(file.read_text())["weight_map"]
        text = change(weight_map)
        file.write_text(text if isinstance(text, str) else json.dumps({"weight_map": weight_map}))

    return write_it


def data(content: bytes) -> Writer:
    return lambda folder: (write(folder, published()) / FILE).write_bytes(content)


def sized(size: int, rest: bytes) -> Writer:
    return data(size.to_bytes(8, "little") + rest)


def overlapping(entries: Json) -> None:
    entries["lm_head.weight"]["data_offsets"] = entries["model.embed_tokens.weight"]["data_offsets"]


def swapped(entries: Json) -> None:
    first, second = (entries[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "kv")
    first["data_offsets"], second["data_offsets"] = second["data_offsets"], first["data_offsets"]


def shifted(entries: Json) -> None:
    for entry in list(entries.values())[1:]:
        entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]


def twice(entries: Json) -> str:
    return json.dumps(entries)[:-1] + ', "lm_head.weight": ' + json.dumps(entries["lm_head.weight"]) + "}"


def twice_inside(entries: Json) -> str:
    return json.dumps(entries).replace('"dtype": "F32"', '"dtype": "F16", "dtype": "F32"', 1)


def without_down_projections(tensors: Stored) -> None:
    for expert in range(3):
        del tensors.tensors[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"]


def in_eight_bits(tensors: Stored) -> None:
    tensors.tensors["lm_head.weight"] = ("F8_E4M3", [11, 6], bytes(66))


def lone(offsets: list[int]) -> Writer:
    entry = {"model.norm.weight": {"dtype": "F32", "shape": [6], "data_offsets": offsets}}
    return sized(len(json.dumps(entry)), json.dumps(entry).encode() + bytes(100))


def tiny(folder: Path) -> None:
    """Tensors of few weights, of which a table of any size may be made."""
    stored = Stored("BF16")
    stored.add("model.embed_tokens.weight", 10**6)
    sizes = {"hidden_size": 1, "intermediate_size": 1, "num_attention_heads": 1, "head_dim": 2}
    write(folder, stored, **sizes, num_local_experts=45_000)


def beyond_every_real_header(folder: Path) -> None:
    with (write(folder, published()) / FILE).open("r+b") as opened:
        opened.write((LARGEST_JSON + 1).to_bytes(8, "little"))
        opened.truncate(10 * LARGEST_JSON)


def without_a_shard(folder: Path) -> None:
    (write_sharded(folder, published()) / SHARD).unlink()


def as_a_pipe(folder: Path) -> None:
    write_config(folder)
    os.mkfifo(folder / FILE)


LM_HEAD, K = "lm_head.weight", "model.layers.1.self_attn.k_proj.weight"
GATE_UP, Q_BIAS = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.self_attn.q_proj.bias"
MANY = dict.fromkeys(range(200_000), "a")
NO_TENSOR = "is no tensor of a model of 2 layers with 3 experts"

REFUSED: dict[str, tuple[Writer, str]] = {
    "no weights": (write_config, "^cannot read weights {folder}/model.safetensors: No such file"),
    "a missing shard": (without_a_shard, f"^cannot read weights {{folder}}/{SHARD}: No such file"),
    "a pipe as the only file": (as_a_pipe, "model.safetensors: it is a pipe"),
    # headers
    "bytes that are no header": (data(b"\xff" * 64), "{file} is not a safetensors file"),
    "a page of the web": (data(b"<html>not found</html>"), "{file} is not a safetensors file"),
    "a header of zeros": (sized(20, b"\0" * 40), "{file} has no valid safetensors header"),
    "a list as the header": (sized(2, b"[]"), "{file} has no valid safetensors header"),
    "a tensor without a place": (sized(9, b'{"a": {}}'), "{file} has no valid safetensors header"),
    "a header that is no text": (sized(12, b'{"\xff\xfe": {}}  '), "{file} has no valid safetensors header"),
    "a header beyond every real one": (beyond_every_real_header, "its header would have 16,777,217 bytes"),
    "a tensor over another": (header(overlapping), "{file}: lm_head.weight overlaps model.embed_tokens.weight"),
    "a tensor that is left out": (
        header(lambda entries: entries.pop("model.norm.weight")),
        "24 bytes before lm_head.weight belong to no tensor",
    ),
    "the last tensor left out": (
        header(lambda entries: entries.popitem() and None), r"bytes after .*experts.2.w2.weight belong to no tensor"
    ),
    "tensors 8 bytes later": (header(shifted), "8 bytes before model.embed_tokens.weight belong to no tensor"),
    "a tensor twice": (header(twice), "it has 'lm_head.weight' twice"),
    "a dtype twice": (header(twice_inside), "it has 'dtype' twice"),
    "lists in lists": (header(lambda entries: "[" * 100_000), "it is nested too deep"),
    "objects in objects": (header(lambda entries: '{"a": ' * 100_000), "it is nested too deep"),
    "a number of 5,000 digits": (
        header(lambda entries: f'{{"a": {"9" * 5000}}}'), "no valid safetensors header"
    ),
    "too many tensors": (header(lambda entries: json.dumps(MANY)), "it has 200,000 tensors, no model has more"),
    "a name of two lines": (renamed("a\nb"), r"a tensor 'a\\nb'"),
    "a name that acts on the terminal": (renamed("\x1b[2J"), r"a tensor '\\x1b\[2J'"),
    "a name that is no Unicode": (renamed("\ud800"), r"a tensor '\\ud800'"),
    "a negative shape": (head(shape=[-11, -6]), "no valid safetensors header"),
    "a vast shape": (head(shape=[2**40, 2**40]), "of shape"),
    "a shape of text": (head(shape=["\ud800", 6]), "no valid safetensors header"),
    **{
        f"offsets {offsets}": (lone(offsets), r"model.norm.weight of shape \[6\] takes 24 bytes")
        for offsets in ([-4, 20], [40, 16], [0, 8], [0, 1 << 60])
    },
    # tensors
    "other keys": (added(K, 5, 6), rf"{{folder}}/{{file}}: {K} has shape \[5, 6\], config.json says \[4, 6\]"),
    "another head": (added(LM_HEAD, 12, 6), rf"{LM_HEAD} has shape \[12, 6\], config.json says \[11, 6\]"),
    "another fused tensor": (
        stored(lambda tensors: tensors.add(GATE_UP, 3, 6, 10), fused),
        r"gate_up_proj has shape \[3, 6, 10\], config.json says \[3, 10, 6\]",
    ),
    "missing tensors, counted": (
        stored(without_down_projections), "{folder} lacks 3 of the model's tensors, layers.1.experts.0.down the first"
    ),
    "a missing lm_head": (
        stored(lambda tensors: tensors.tensors.pop(LM_HEAD)), "lacks 1 of the model's tensors, lm_head"
    ),
    "a dtype without a kernel": (stored(in_eight_bits), "lm_head.weight has dtype 'F8_E4M3'"),
    "a bias, which no kernel adds": (added(Q_BIAS, 12), f"{Q_BIAS} is a bias"),
    "a norm under two names": (added("norm.weight", 6), f"norm.weight and model.norm.weight in {FILE} are both"),
    "a router under two names": (
        added("model.layers.0.mlp.gate.weight", 3, 6),
        "model.layers.0.mlp.gate.weight and model.layers.0.block_sparse_moe.gate.weight in .* are both",
    ),
    **{
        name: (added(name, 6), f"{name} {NO_TENSOR}")
        for name in (
            "model.layers.2.input_layernorm.weight",
            "model.layers.0.block_sparse_moe.experts.3.w1.weight",
            "model.layers.0.self_attn.q_norm.weight",
            "score.weight",
        )
    },
    "a router of a dense model": (
        stored(
            lambda tensors: tensors.add("model.layers.0.block_sparse_moe.gate.weight", 1, 6),
            dense,
            model_type="mistral",
        ),
        "block_sparse_moe.gate.weight is no tensor",
    ),
    "fewer layers than the files have": (configured(num_hidden_layers=1), ""),
    "fewer experts than the files have": (configured(num_local_experts=2), ""),
    "more experts than the files have": (
        configured(num_local_experts=4_000),
        "config.json describes 2 layers with 4,000 experts, 768,546 weights in 24,017 tensors, "
        "and the files hold 1,122",
    ),
    "tiny tensors, a vast table": (tiny, "in 270,017 tensors"),
    # the index
    **{
        f"{text} as the index": (index(lambda files, text=text: text), "^{folder}/{index}: ")  # type: ignore[misc]
        for text in ("{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": null}')
    },
    "a tensor in another shard": (
        index(lambda files: files.update({LM_HEAD: "model-00001-of-00003.safetensors"})),
        "model-00001-of-00003.safetensors lacks lm_head.weight",
    ),
    "a tensor in no shard": (
        index(lambda files: files.pop(LM_HEAD) and None), "has lm_head.weight, which .* does not put there"
    ),
    "a tensor in two shards": (
        index(lambda files: json.dumps({"weight_map": files})[:-2] + ', "lm_head.weight": "b"}}'),
        "'lm_head.weight' twice",
    ),
    "an index of lists in lists": (index(lambda files: '{"weight_map": ' + "[" * 100_000), "it is nested too deep"),
    "an index of too many tensors": (
        index(lambda files: json.dumps({"weight_map": MANY})), "it has 200,000 tensors"
    ),
    "an index of spaces": (index(lambda files: " " * (LARGEST_JSON + 1)), "more than 16,777,216"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_checkpoint_is_refused_with_its_file(tmp_path: Path, what: str) -> None:
    write_it, said = REFUSED[what]
    write_it(tmp_path)
    for name, value in {"{folder}": tmp_path, "{file}": FILE, "{index}": INDEX}.items():
        said = said.replace(name, str(value))
    message = refusal(tmp_path)
    assert re.search(said, message), message


def test_tensors_may_be_in_any_order(tmp_path: Path) -> None:
    header(swapped)(tmp_path)
    assert_complete(open_checkpoint(tmp_path))


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, published()) / FILE
    whole = file.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 5, 8, 9, header_end - 1, header_end, header_end + 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        message = refusal(tmp_path)
        assert f"{file} is truncated" in message
        assert f"it has {size:,} bytes" in message


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


@pytest.mark.parametrize(
    "name",
    ["../other/w.safetensors", "{folder}/w.safetensors", "a/../../w.safetensors", "", ".", "a\0b", "a\nb", "\ud800"],
)  # fmt: skip
def test_an_index_that_names_a_file_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    name = name.replace("{folder}", str(tmp_path))
    index(lambda files: files.update({LM_HEAD: name}))(tmp_path)
    said = f"{tmp_path / INDEX} names {name!r}, which is no file of its folder"
    assert refusal(tmp_path).startswith(said)


@pytest.mark.parametrize("name", [SHARD, INDEX])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    file = write_sharded(tmp_path, published()) / name
    file.unlink()
    make(file)
    refusal(tmp_path)
