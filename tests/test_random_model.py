"""A random model is an ordinary checkpoint, the same for the same seed, and appears whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from against_hugging_face import assert_same_tokens, generated
from benchmarks.gpu._peers import hugging_face
from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.networks import Router
from moesched.models.random_model import write_random_model
from moesched.models.reading import read_config
from moesched.models.rotary import Rotary
from odd_models import GPT_OSS, GRANITE
from small_models import SMALL_DBRX, TINY

DENSE = TINY.varied(experts=1, top_k=1, window=16, tied_embeddings=True, form="llama")
QWEN = TINY.varied(form="qwen3_moe", qk_norm="head", tied_embeddings=True, router=Router(normalised=False))
OLMOE = TINY.varied(form="olmoe", head_dim=16, qk_norm="projection", router=Router(normalised=False))
SOME_WINDOWS = msgspec.structs.replace(DENSE, pattern=(DENSE.layer(0), DENSE.layer(1).varied(window=None)))


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for shard in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (
        write_random_model(TINY, tmp_path / n, seed) for n, seed in [("a", 1), ("b", 1), ("c", 2)]
    )
    names = {path.name for path in first.iterdir()}
    assert names == {path.name for path in again.iterdir()}
    assert all((first / name).read_bytes() == (again / name).read_bytes() for name in names)
    a, c = tensors_of(first), tensors_of(other)
    assert all(not torch.equal(a[name], c[name]) for name in a if "norm" not in name)


def test_a_tensor_depends_on_seed_and_name_only(tmp_path: Path) -> None:
    small = tensors_of(write_random_model(TINY, tmp_path / "small", 7, layers=1))
    large = tensors_of(write_random_model(TINY, tmp_path / "large", 7, layers=3, shard_bytes=20_000))
    assert small.keys() < large.keys()
    assert all(torch.equal(small[name], large[name]) for name in small)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_are_normal_of_full_rank_and_norms_are_one(tmp_path: Path, dtype: str) -> None:
    tensors = tensors_of(write_random_model(TINY, tmp_path / "m", 3, dtype=dtype))
    seen = []
    for name, tensor in tensors.items():
        assert tensor.dtype == getattr(torch, dtype)
        values = tensor.float()
        if "norm" in name:
            assert torch.equal(values, torch.ones_like(values))
            continue
        assert abs(values.mean()) < 0.1 * 0.02 + 4 * 0.02 / values.numel() ** 0.5
        assert values.std() == pytest.approx(0.02, rel=0.15)
        assert torch.linalg.matrix_rank(values) == min(values.shape)
        seen.append(values.flatten()[:64])
    correlations = torch.corrcoef(torch.stack(seen)) - torch.eye(len(seen))
    assert correlations.abs().max() < 0.7


def test_large_tensors_do_not_repeat_themselves(tmp_path: Path) -> None:
    config = TINY.varied(layers=1, vocabulary=40_000)  # more than one chunk of values
    rows = tensors_of(write_random_model(config, tmp_path / "m"))["model.embed_tokens.weight"]
    assert len(torch.unique(rows, dim=0)) == 40_000


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (TINY, "MixtralForCausalLM"),
        (DENSE, "MistralForCausalLM"),
        (QWEN, "Qwen3MoeForCausalLM"),
        (OLMOE, "OlmoeForCausalLM"),
        (SMALL_DBRX, "DbrxForCausalLM"),
    ],
)
def test_hugging_face_loads_it_with_every_tensor_in_its_place(
    tmp_path: Path, config: ModelConfig, family: str
) -> None:
    directory = write_random_model(config, tmp_path / "m", 5, shard_bytes=50_000)
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert type(model).__name__ == family
    assert not any(report.values()), report
    assert model.dtype == torch.bfloat16
    assert_same_tokens(model.float(), generated(directory, "float32"))


@pytest.mark.parametrize(
    "config", [TINY, DENSE, SOME_WINDOWS, QWEN, OLMOE, SMALL_DBRX, GPT_OSS, GPT_OSS.varied(rotary=Rotary())]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_its_config_reads_back_as_the_shape_that_was_asked_for(
    tmp_path: Path, config: ModelConfig, dtype: str
) -> None:
    directory = write_random_model(config, tmp_path / "m", dtype=dtype, layers=4)
    assert read_config(directory) == config.varied(name="m", layers=4, dtype=dtype)


@pytest.mark.parametrize(
    "config",
    [
        msgspec.structs.replace(TINY, pattern=(TINY.layer(0).varied(window=4), TINY.layer(1))),
        TINY.varied(qk_norm="head"),
        TINY.varied(clip=3.0),
    ],
    ids=["layers that differ", "norms of queries and keys", "clipped projections"],
)
def test_layers_that_no_config_json_describes_are_refused(config: ModelConfig, tmp_path: Path) -> None:
    said = r"^no config\.json of the family mixtral has layers as those of mixtral[^\n]*: use [^\n]*$"
    with pytest.raises(BadInput, match=said):
        write_random_model(config, tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("name", ["m", "m.gguf"])
def test_factors_outside_the_layers_are_written_or_refused(name: str, tmp_path: Path) -> None:
    factors: dict[str, Any] = {"embedding_factor": 3.3, "logits_factor": 1 / 7.3}
    granite = read_config(write_random_model(GRANITE.varied(**factors), tmp_path / name))
    assert {each: getattr(granite, each) for each in factors} == pytest.approx(factors, rel=1e-6)
    with pytest.raises(BadInput, match=r"of the family mixtral has embedding_factor and logits_factor"):
        write_random_model(TINY.varied(**factors), tmp_path / f"other-{name}")
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_shards_hold_at_most_what_was_asked_and_the_index_names_them_all(tmp_path: Path) -> None:
    directory = write_random_model(TINY, tmp_path / "m", shard_bytes=40_000)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shards = {path.name: load_file(path) for path in directory.glob("*.safetensors")}
    assert len(shards) > 5
    assert all(sum(t.nbytes for t in shard.values()) <= 40_000 for shard in shards.values())
    assert index["weight_map"] == {name: shard for shard, held in shards.items() for name in held}
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for shard in shards.values() for t in shard.values()
    )


def test_progress_rises_to_the_bytes_of_the_files(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    directory = write_random_model(
        TINY, tmp_path / "m", shard_bytes=40_000, progress=lambda done, total: told.append((done, total))
    )
    total = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert told == sorted(told)
    assert told[-1] == (total, total)


@pytest.mark.parametrize("parts_before", [1, 5, 30])
def test_a_failure_midway_leaves_nothing_behind(tmp_path: Path, parts_before: int) -> None:
    left = iter(range(parts_before))

    def interrupt(done: int, total: int) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_random_model(TINY, tmp_path / "m", shard_bytes=40_000, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"m needs [\d,]+ bytes and its disk has [\d,]+ free; make room"):
        write_random_model("mixtral-8x22b", tmp_path / "new" / "m", layers=10**4)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_is_filled_and_a_used_one_left_alone(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    write_random_model(TINY, empty)
    before = {path: path.stat().st_mtime_ns for path in empty.iterdir()}
    with pytest.raises(BadInput, match="empty exists already; remove it or choose another name"):
        write_random_model(TINY, empty)
    assert {path: path.stat().st_mtime_ns for path in empty.iterdir()} == before


def test_a_file_does_not_replace_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").mkdir()
    with pytest.raises(BadInput, match=r"model\.gguf exists already"):
        write_random_model(TINY, tmp_path / "model.gguf", progress=lambda *_: pytest.fail("it wrote"))


def test_through_a_link_an_empty_directory_is_filled_but_never_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(BadInput, match=r"\. is a mount or the current folder, .* name one in it"):
        write_random_model(TINY, Path())
    monkeypatch.chdir(tmp_path)
    write_random_model(TINY, tmp_path / "link")
    assert (tmp_path / "empty" / "config.json").is_file()


def test_a_file_in_the_place_of_a_folder_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BadInput, match="file exists already"):
        write_random_model(TINY, file)
    with pytest.raises(BadInput, match="file is not a directory"):
        write_random_model(TINY, file / "m")


def test_wrong_wishes_are_told_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"unknown model shape 'gpt': choose one of .*mixtral-0.8b"):
        write_random_model("gpt", tmp_path / "m")
    nearest = r"'mixtral-9x9b': did you mean mixtral-8x7b\? Otherwise choose one of .*mixtral-0.8b"
    with pytest.raises(BadInput, match=nearest):
        write_random_model("mixtral-9x9b", tmp_path / "m")
    with pytest.raises(BadInput, match=r"dtype 'int4' cannot be written; choose one of bfloat16, float32"):
        write_random_model(TINY, tmp_path / "m", dtype="int4")
    with pytest.raises(BadInput, match=r"a model of 0 layers cannot be written; ask for 1 to 10,000"):
        write_random_model(TINY, tmp_path / "m", layers=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", [TINY, SMALL_DBRX])  # the second has all experts of a layer in one tensor
def test_memory_stays_far_below_the_size_of_the_model(tmp_path: Path, config: ModelConfig) -> None:
    large = config.varied(layers=1, hidden=512, heads=4, head_dim=128, intermediate=15_000)  # over 110 MB
    tracemalloc.start()
    try:
        directory = write_random_model(large, tmp_path / "m")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    written = sum(path.stat().st_size for path in directory.iterdir())
    assert written > 100e6
    assert peak < 0.4 * written


def test_writing_a_model_does_not_import_torch() -> None:
    code = "import sys, moesched.models.random_model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_hugging_face_decodes_a_random_model_at_some_rate_in_each_batch(tmp_path: Path) -> None:
    found = hugging_face(write_random_model(TINY, tmp_path / "m"), "cpu", (1, 2), prompt=4, new_tokens=3)
    assert found["batches"].keys() == {"1", "2"}
    assert all(rate > 0 for rates in found["batches"].values() for rate in rates.values())
