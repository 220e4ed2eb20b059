"""Macs, as far as they can be had elsewhere: what macOS lacks or does otherwise, behind the seams of Linux."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from clusters import cluster, host
from moesched.cluster.build import differences, library_refusal
from moesched.cluster.cluster_file import require_known_hosts
from moesched.cluster.launch_env import rank_given
from moesched.cluster.members import keep_to, node_arguments
from moesched.devices.shared.arena import ALIGNMENT, Arena
from moesched.devices.shared.direct_file import DirectFile, Ways
from moesched.errors import BadInput, memory_refusal
from moesched.machines.local import processor_name
from moesched.system.memory import available_memory
from moesched.transports.mesh import is_ipv6

GB = 10**9
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                              1000000.
Pages active:                            4000000.
Pages inactive:                          2000000.
Pages speculative:                         50000.
Pages wired down:                         900000.
"""


def no_preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Reads nothing, and refuses what macOS refuses."""
    if buffers[0].nbytes > 2**31 - 1:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return buffers[0].nbytes


# ---------------------------------------------------------------- files


def test_a_read_of_more_than_two_gigabytes_is_made_in_parts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = DirectFile(tmp_path / "file", direct=False, ways=Ways(preadv=no_preadv))
    untouched = np.empty(5 << 30, np.uint8)
    assert file.read(untouched.data, 0, untouched.nbytes) == untouched.nbytes
    file.close()


@pytest.mark.parametrize("has_no_cache", [True, False])
def test_without_direct_reads_the_page_cache_is_bypassed_as_macos_does_it(
    tmp_path: Path, has_no_cache: bool
) -> None:
    (tmp_path / "file").write_bytes(b"weights")
    told: list[int] = []
    file = DirectFile(
        tmp_path / "file", ways=Ways(direct=None, no_cache=told.append if has_no_cache else None, drop=None)
    )
    memory = Arena(1, ALIGNMENT).slot(0)
    assert file.read(memory.numpy().data, 0, 7) == 7
    assert bytes(memory[:7].tolist()) == b"weights"
    assert (file.caching, len(told)) == (("bypassed", 1) if has_no_cache else ("kept", 0))
    file.close()


# ---------------------------------------------------------------- the machine


def test_memory_that_is_free_is_what_vm_stat_says(tmp_path: Path) -> None:
    assert available_memory(tmp_path, lambda _: VM_STAT) == 3_050_000 * 16384


def test_a_mac_is_named_by_its_chip(tmp_path: Path) -> None:
    assert processor_name(tmp_path / "none", lambda _: "Apple M2 Ultra\n") == "Apple M2 Ultra"


def test_an_arm_processor_under_linux_is_named_by_its_maker_and_design(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n")
    assert processor_name(tmp_path / "cpuinfo") == "Arm processor 0x41 0xd0c"


def test_a_processor_has_a_name_also_where_its_bytes_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_bytes(b"model name\t: Virtual\xff CPU\n")
    assert processor_name(tmp_path / "cpuinfo") == "Virtual\ufffd CPU"


def test_cores_that_cannot_be_kept_to_are_told_of() -> None:
    with capture_logs() as logs:
        keep_to([0, 1], None)
        keep_to([], None)
    assert [(log["event"].split(":")[0], log["cores"]) for log in logs] == [("cores are ignored", [0, 1])]


@pytest.mark.parametrize(
    "text",
    [
        "[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum allowed buffer size",
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallback)",
        "[malloc] Unable to allocate 99 bytes.",
        "[metal::malloc] Resource limit (499000) exceeded.",
    ],
)
def test_metal_s_lack_of_memory_is_known_as_such(text: str) -> None:
    assert memory_refusal(RuntimeError(text)) is not None


# ---------------------------------------------------------------- the cluster


@pytest.mark.parametrize(
    ("address", "literal"),
    [
        ("tcp://mac-0.local:7001", False),
        ("tcp://192.168.2.1:7001", False),
        ("tcp://*:7001", False),
        ("ipc://a:b:1", False),
        ("tcp://[fe80::1%en5]:7001", True),
        ("tcp://::1:7001", True),
    ],
)
def test_only_literal_addresses_are_those_of_ipv6(address: str, literal: bool) -> None:
    assert is_ipv6(address) == literal


def test_a_name_with_an_ipv6_address_alone_is_refused_before_anything_is_loaded() -> None:
    def look_up(name: str, port: None, family: int) -> None:
        if name == "mac-0.local" and family != socket.AF_INET6:
            raise socket.gaierror(socket.EAI_NONAME, "no address of this family")

    described = cluster(host(0, address="mac-0.local"))
    with pytest.raises(
        BadInput, match=r"hosts\[0\].address: 'mac-0.local' is an unknown host, or has no IPv4"
    ):
        require_known_hosts(described, "mine", look_up)


def test_ssh_is_given_whole_paths_since_it_starts_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = node_arguments(Path("cluster.toml"), host(0), Path("/models/m"))
    assert arguments[3] == str(tmp_path / "cluster.toml")


@pytest.mark.parametrize("variable", ["MLX_HOSTFILE", "MLX_IBV_DEVICES"])
def test_the_rank_is_taken_from_what_mlx_launch_sets_for_each_backend(tmp_path: Path, variable: str) -> None:
    file = tmp_path / "list.json"
    file.write_text('[[null, "rdma_en5"], ["rdma_en5", null]]')
    assert rank_given({"MLX_RANK": "1", variable: str(file)}, 2) == 1
    file.write_text("{}")
    with pytest.raises(BadInput, match=f"{variable} names .*, which is not a list of"):
        rank_given({"MLX_RANK": "1", variable: str(file)}, 2)


def test_nodes_whose_libraries_round_otherwise_are_refused_and_other_chips_are_told_of() -> None:
    studio = {"processor": "Apple M2 Ultra", "system": "Darwin 24.1.0", "mlx": "0.32.4", "torch": "2.6"}
    older = studio | {"processor": "Apple M1 Max", "mlx": "0.32.2"}
    refused = library_refusal("mlx", older, studio, "node 0 (a)")
    assert refused == "it has mlx 0.32.2, and node 0 (a) has 0.32.4: install the same version everywhere"
    assert library_refusal("torch", older, studio, "node 0 (a)") is None
    assert differences(older, studio)[0] == "processor Apple M1 Max and Apple M2 Ultra"
    assert not differences(studio, {})


# ---------------------------------------------------------------- Metal


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="there is no MLX for this platform")
def test_a_stack_of_more_items_than_a_dimension_can_have_is_touched_by_one_of_them() -> None:
    mx = pytest.importorskip("mlx.core", reason="there is no MLX for this platform")
    from moesched.devices.mlx.weights import one_item

    lazy = mx.zeros((40, 198_180_864), mx.uint16)
    assert lazy.size > 2**31
    assert one_item(lazy).shape == ()
    assert one_item(mx.array([[3.0, 4.0]])).item() == 3.0


class Limits:
    """The limits that were set, the first of which another program had set."""

    def __init__(self) -> None:
        self.set: list[int] = [5]

    def __call__(self, nbytes: int) -> int:
        self.set.append(nbytes)
        return self.set[-2]


def wired(recommended: int | None) -> tuple[Any, Limits]:
    pytest.importorskip("mlx.core", reason="there is no MLX for this platform")
    from moesched.devices.mlx.machine import WiredLimit

    limits = Limits()
    return WiredLimit(limits, recommended), limits


def test_the_wired_limit_leaves_room_beside_the_plan_and_is_never_lowered_between_batches() -> None:
    limit, limits = wired(144 * GB)
    for used in (100 * GB, 60 * GB, 142 * GB, 10 * GB):
        limit.hold(used)
    limit.give_back()
    assert limits.set == [5, 105 * GB, 144 * GB, 5]
    small, of_small = wired(None)
    small.hold(1 * GB)
    assert of_small.set == [5, 5 * GB]


def test_a_plan_that_takes_more_than_a_mac_keeps_wired_is_refused_in_one_line_with_the_command() -> None:
    limit, limits = wired(144 * GB)
    with pytest.raises(BadInput) as refused:
        limit.hold(150 * GB)
    assert "the plan takes 150 GB, and this Mac keeps 144 GB wired for its GPU" in str(refused.value)
    assert "sudo sysctl iogpu.wired_limit_mb=150204" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert limits.set == [5]
