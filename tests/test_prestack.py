"""Prestacked checkpoints: few large arrays, the same weights and tokens, and nodes with the files of their experts."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import moesched
from benchmarks.shared.forked_nodes import ForkServer
from benchmarks.shared.random_models import dbrx, mixtral
from cluster_fixtures import NEW_TOKENS, PROMPTS, run_seated
from commands import refused
from moesched.cluster.cluster_file import Cluster, cluster_toml
from moesched.cluster.handshake import fingerprint
from moesched.dispatch.node_placement import mirrored
from moesched.errors import BadInput
from moesched.models.checkpoint import open_checkpoint
from moesched.models.prestack import COPIED_BYTES, prestack_model
from moesched.models.random_model import write_random_model
from reference import read_weights
from small_models import SMALL, SMALL_DBRX, small_model

BY = ("expert", "layer")
DBRX = SMALL_DBRX.varied(layers=3)
MODELS = {"mixtral": SMALL, "dbrx": DBRX}


def arrays_of(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all stored tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no dict
    return shapes


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model in several files, with one that holds no weights."""
    directory = write_random_model(
        MODELS[request.param], tmp_path / "model", dtype="float32", shard_bytes=40_000
    )
    (directory / "chat_template.jinja").write_text("{}")
    return directory


@pytest.mark.parametrize("by", BY)
def test_every_weight_is_where_it_was_but_in_few_arrays(model: Path, by: Any) -> None:
    made = prestack_model(model, model.parent / "stacked", by=by)
    config = open_checkpoint(model).config
    arrays = {name: shape for name, shape in arrays_of(made.directory).items() if "prestacked" in name}
    assert len(arrays) == made.arrays == (config.routed.experts if by == "expert" else 3 * config.layers)
    if by == "expert":
        assert set(arrays.values()) == {(config.layers, 3, config.hidden * config.routed.intermediate)}
    else:
        assert {shape[0] for shape in arrays.values()} == {config.routed.experts}
    before, after = (read_weights(open_checkpoint(each), torch.float32) for each in (model, made.directory))
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert (made.directory / "chat_template.jinja").read_text() == "{}"


@pytest.mark.parametrize(
    ("by", "device", "policy"),
    [
        ("expert", "torch", "expert_streaming"),
        ("layer", "torch", "resident"),
        ("layer", "mlx", "expert_streaming"),
        ("expert", "mlx", "resident"),
    ],
)
def test_it_runs_to_the_same_tokens(model: Path, by: Any, device: str, policy: str) -> None:
    if device == "mlx":
        pytest.importorskip("mlx.core", reason="there is no MLX for this platform")
    made = prestack_model(model, model.parent / "stacked", by=by)
    before, after = (
        moesched.run_model(each, [[1, 2, 3], [4, 5]], device=device, policy=policy, max_new_tokens=4).tokens
        for each in (model, made.directory)
    )
    assert before == after


@pytest.mark.parametrize("make", [mixtral, dbrx], ids=["mixtral", "dbrx"])
def test_models_that_hugging_face_saved_are_stacked_too(tmp_path: Path, make: Any) -> None:
    make().save_pretrained(tmp_path / "model")
    made = prestack_model(tmp_path / "model", tmp_path / "stacked")
    before, after = (
        read_weights(open_checkpoint(each), torch.float32) for each in (tmp_path / "model", made.directory)
    )
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_a_stacked_checkpoint_is_stacked_the_other_way_and_back(model: Path) -> None:
    by_expert = prestack_model(model, model.parent / "by expert").directory
    by_layer = prestack_model(by_expert, model.parent / "by layer", by="layer").directory
    again = prestack_model(by_layer, model.parent / "again").directory
    names = {path.name for path in by_expert.iterdir()}
    assert names == {path.name for path in again.iterdir()}
    assert all((by_expert / name).read_bytes() == (again / name).read_bytes() for name in names)


@pytest.mark.parametrize("by", BY)
def test_memory_is_bounded_however_large_an_array_is(tmp_path: Path, by: Any) -> None:
    wide = SMALL.varied(layers=4, hidden=256, intermediate=3072, heads=8, experts=4)
    model = small_model(tmp_path / "model", config=wide)
    tracemalloc.start()
    made = prestack_model(model, tmp_path / "stacked", by=by)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < COPIED_BYTES + 2_000_000 < made.largest


def test_progress_is_told_up_to_the_end(model: Path) -> None:
    told: list[tuple[float, float]] = []
    prestack_model(model, model.parent / "stacked", progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > 0


# ---------------------------------------------------------------- what is refused


def test_what_is_interrupted_leaves_nothing(model: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prestack_model(model, model.parent / "stacked", progress=stop)
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_a_truncated_file_leaves_nothing(model: Path) -> None:
    last = max(model.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(BadInput, match="truncated"):
        prestack_model(model, model.parent / "stacked")
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_a_dense_model_is_refused(command: Any, tmp_path: Path) -> None:
    dense = small_model(tmp_path / "dense", experts=1, top_k=1, form="llama")
    refused(command("prestack", dense, tmp_path / "out"), "has no experts to stack")


def test_experts_of_several_dtypes_are_refused(command: Any, tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if ".experts.0." in name)
    save_file(tensors | {name: tensors[name].bfloat16()}, path)
    said = command("prestack", tmp_path / "model", tmp_path / "out")
    refused(said, "has experts in bfloat16 and float32, but an array has a single dtype")


def test_a_stack_of_another_shape_is_refused(model: Path) -> None:
    stacked = prestack_model(model, model.parent / "stacked").directory
    path = stacked / "experts-00001.safetensors"
    save_file({name: tensor[:-1].clone() for name, tensor in load_file(path).items()}, path)
    with pytest.raises(BadInput, match=r"prestacked\.experts\.1 has shape"):
        open_checkpoint(stacked)


@pytest.mark.parametrize("by", BY)
def test_the_command_says_what_it_made(command: Any, model: Path, by: str) -> None:
    said = command("prestack", model, model.parent / "one", "--by", by)
    assert said.code == 0
    holds = {"expert": "an expert's matrices of all layers", "layer": "one matrix of all experts of a layer"}[
        by
    ]
    assert f"each {holds}" in said.out
    figures = command("prestack", model, model.parent / "two", "--by", by, "--json").json
    assert figures["by"] == by
    written = sum(path.stat().st_size for path in (model.parent / "two").glob("*.safetensors"))
    arrays = figures["arrays"] * figures["largest_array_bytes"] + figures["other_bytes"]
    assert arrays <= written < arrays + 100_000


# -- nodes that have files of their own experts ----------------------------------------------------

EXPERTS = 4


@pytest.fixture
def parts(models: Path, tmp_path: Path) -> list[Path]:
    """The folders of two nodes, each with the files of its experts."""
    whole = prestack_model(models / "mixtral", tmp_path / "whole").directory
    folders = []
    for node, held in enumerate(mirrored(EXPERTS, 2)):
        folder = shutil.copytree(whole, tmp_path / f"part-{node}")
        for expert in set(range(EXPERTS)) - held:
            (folder / f"experts-{expert:05d}.safetensors").unlink()
        folders.append(folder)
    return folders


def seated_with(seated: tuple[Path, Cluster], folders: list[Path]) -> Path:
    """The cluster file, with a folder of the model for each node."""
    file, described = seated
    hosts = [
        msgspec.structs.replace(each, model=str(folder))
        for each, folder in zip(described.hosts, folders, strict=True)
    ]
    file.write_text(cluster_toml(msgspec.structs.replace(described, hosts=hosts)))
    return file


def test_nodes_with_their_own_experts_files_give_the_tokens_of_the_whole_model(
    seated: tuple[Path, Cluster], forks: ForkServer, parts: list[Path], expected: dict[str, list[list[int]]]
) -> None:
    report = run_seated(seated_with(seated, parts), forks, parts[0], policy="ep_naive")
    assert report.tokens == expected["mixtral"]
    assert len(report.tokens) == len(PROMPTS)
    assert len(report.tokens[0]) == NEW_TOKENS


def test_a_file_that_a_node_needs_is_named_before_anything_is_loaded(
    seated: tuple[Path, Cluster], forks: ForkServer, parts: list[Path]
) -> None:
    with pytest.raises(
        BadInput, match=r"experts-0000\d.safetensors is not here, and layers.0.* is in it: copy"
    ):
        run_seated(seated_with(seated, parts[::-1]), forks, parts[0], policy="ep_naive")


def test_parts_of_a_checkpoint_have_its_fingerprint_and_only_nodes_open_them(parts: list[Path]) -> None:
    whole = fingerprint(open_checkpoint(parts[0].parent / "whole"))
    assert [fingerprint(open_checkpoint(part, partial=True)) for part in parts] == [whole, whole]
    with pytest.raises(BadInput, match="No such file"):
        open_checkpoint(parts[0])


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_a_damaged_header_is_refused(parts: list[Path], damage: Any) -> None:
    gone = next(path for path in parts[0].glob("experts-*.header") if not path.with_suffix("").exists())
    gone.write_bytes(damage(gone.read_bytes()))
    with pytest.raises(BadInput, match="copy the file again"):
        open_checkpoint(parts[0], partial=True)
