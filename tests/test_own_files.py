"""A node of a prestacked checkpoint needs the files of its own experts only, and the headers of the others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.shared.forked_nodes import ForkServer
from cluster_fixtures import NEW_TOKENS, PROMPTS, run_seated
from moesched.cluster.cluster_file import Cluster, cluster_toml
from moesched.cluster.fingerprint import fingerprint
from moesched.dispatch.node_placement import mirrored
from moesched.errors import BadInput
from moesched.models.checkpoint import open_checkpoint
from moesched.models.prestack import prestack_model

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
    seated: tuple[Path, Cluster],
    server: ForkServer,
    parts: list[Path],
    expected: dict[str, list[list[int]]],
) -> None:
    report = run_seated(seated_with(seated, parts), server, parts[0], policy="ep_naive")
    assert report.tokens == expected["mixtral"]
    assert len(report.tokens) == len(PROMPTS)
    assert len(report.tokens[0]) == NEW_TOKENS


def test_a_file_that_a_node_needs_is_named_before_anything_is_loaded(
    seated: tuple[Path, Cluster], server: ForkServer, parts: list[Path]
) -> None:
    with pytest.raises(
        BadInput, match=r"experts-0000\d.safetensors is not here, and layers.0.* is in it: copy"
    ):
        run_seated(seated_with(seated, parts[::-1]), server, parts[0], policy="ep_naive")


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
