"""`moesched doctor` names planted troubles, each in one line with its remedy, and raises no false alarm."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec.structs import replace

from clusters import cluster, host
from moesched.devices.lagging.device import GPU_DEVICE, LaggingGpu
from moesched.devices.torch.cuda_device import refusal
from moesched.devices.torch.inspection import library_bytes, lockable_bytes, mapping_refusal
from moesched.doctor.cluster_facts import cluster_facts, port_state
from moesched.doctor.endings import begins, judge_peak, settable_limit
from moesched.doctor.examination import examine
from moesched.doctor.facts import (
    ClockFacts,
    ClusterFacts,
    CoreFacts,
    Facts,
    FolderFacts,
    KernelFacts,
    MemoryFacts,
    MetalFacts,
    PortFacts,
    PortState,
    ProcessorFacts,
    SshFacts,
)
from moesched.doctor.findings import Finding
from moesched.doctor.host_facts import cache_facts, clock_facts, mapping_of, model_facts
from moesched.doctor.policy_runs import Logits, largest_difference
from moesched.doctor.probes import probe_cluster
from moesched.system.cuda import CudaFacts, GpuFacts, has_kernels
from patience import wait_until
from test_mapped_pages import linux

GB = 10**9
MODEL = Path(__file__).parents[1] / "examples" / "tiny-mixtral"
AVX512 = ["avx2", "fma", "avx512f", "avx512vl", "avx512bw", "avx512_bf16"]

GPU = GpuFacts(name="A100", capability=(8, 0), total=80 * GB, free=79 * GB)
CUDA = CudaFacts(
    torch="2.11", built_for="12.8", driver="12.9", kernels_for=["sm_80", "sm_90"], gpus=[GPU], lockable=2**30
)
METAL = MetalFacts(mlx="0.32", metal=True, macos="15.3", gpu="M2 Ultra", recommended=48 * GB)
NODE = SshFacts(who="node 0 (a)", destination="me@a", command="moesched", version="1.0")
PORT = PortFacts(who="node 0 (a)", address="a", port=7001, state="free")
CLUSTER = ClusterFacts(ssh=True, version="1.0", ports=[PORT], nodes=[NODE])
CACHE = FolderFacts(role="cache", path="/cache", free=50 * GB, caching="bypassed")
WELL = Facts(
    device="cuda",
    processor=ProcessorFacts(name="Xeon", architecture="x86_64", flags=AVX512),
    kernels=KernelFacts(sets=["avx512_bf16", "avx512", "avx2", "portable"]),
    cores=CoreFacts(cores=8, quota=None),
    memory=MemoryFacts(physical=64 * GB, limit=64 * GB, available=60 * GB, locked=None, address_space=None),
    folders=[CACHE, replace(CACHE, role="model", path="/model")],
    clock=ClockFacts(monotonic=True, step=40),
    cuda=CUDA,
    metal=METAL,
    cluster=CLUSTER,
)


def cache(**changes: Any) -> Facts:
    return replace(WELL, folders=[replace(CACHE, **changes)])


def cuda(**changes: Any) -> Facts:
    return replace(WELL, cuda=replace(CUDA, **changes))


def gpu(**changes: Any) -> Facts:
    return cuda(gpus=[replace(GPU, **changes)])


def memory(**changes: Any) -> Facts:
    return replace(WELL, memory=replace(WELL.memory, **changes))


def metal(**changes: Any) -> Facts:
    return replace(WELL, metal=replace(METAL, **changes))


def node(**changes: Any) -> Facts:
    return replace(WELL, cluster=replace(CLUSTER, nodes=[replace(NODE, **changes)]))


def port(state: PortState) -> Facts:
    return replace(WELL, cluster=replace(CLUSTER, ports=[replace(PORT, state=state)]))


PLANTED: dict[str, tuple[Facts, str, str]] = {
    "no direct reads": (cache(caching="dropped"), "no direct reads", "O_DIRECT"),
    "a full disk": (cache(free=1_000_000), "1 MB of free disk space", "MOESCHED_CACHE"),
    "an unwritable cache": (cache(problem="Permission denied"), "/cache cannot be used", "MOESCHED_CACHE"),
    "an unreadable model": (
        cache(role="model", path="/model", problem="a.safetensors: Permission denied"),
        "a.safetensors: Permission denied",
        "chmod -R u+rX /model",
    ),
    "files that CUDA does not register": (
        cuda(
            mapping="CUDA registers no 4.1 KB of m/a.safetensors (error 801): put the model on a local disk"
        ),
        "weights are loaded into memory before they go to the GPU: CUDA registers no 4.1 KB of m/a.safetensors",
        "put the model on a local disk",
    ),
    "low locked memory": (cuda(lockable=2**26), "CUDA locks 67.1 MB of the host's memory", ".wslconfig"),
    "a small address space": (memory(address_space=4 * GB), "may map 4 GB", "ulimit -v unlimited"),
    "a memory limit": (memory(limit=GB, available=GB // 2), "allows 1 GB of 64 GB", "docker --memory"),
    "full memory": (memory(available=GB), "1 GB of 64 GB are free", "end other programs"),
    "a CPU quota": (replace(WELL, cores=CoreFacts(cores=8, quota=2)), "the time of 2", "docker --cpus 8"),
    "kernels of another version": (
        replace(WELL, kernels=KernelFacts(sets=[], problem="_kernels.so has version 3 instead of 4")),
        "version 3 instead of 4",
        "moesched again",
    ),
    "kernels without an instruction set": (
        replace(WELL, kernels=KernelFacts(sets=["avx2", "portable"])),
        "use avx2, and the processor has avx512_bf16",
        "GCC 11",
    ),
    "an old processor": (
        replace(WELL, processor=replace(WELL.processor, flags=["sse2"])),
        "has no AVX2",
        "2015 or later",
    ),
    "a coarse clock": (replace(WELL, clock=ClockFacts(monotonic=True, step=15_000_000)), "15000 µs", "tsc"),
    "no driver": (cuda(driver="", gpus=[]), "no NVIDIA driver", "install the driver"),
    "an old driver": (cuda(driver="11.4", gpus=[]), "driver supports CUDA 11.4", "update the NVIDIA driver"),
    "torch without CUDA": (cuda(built_for="", gpus=[]), "built without CUDA", "pip install torch"),
    "a hidden GPU": (cuda(gpus=[], problem="no device"), "sees no GPU: no device", "CUDA_VISIBLE_DEVICES"),
    "a filled GPU": (gpu(free=10 * GB), "others fill 70 GB", "nvidia-smi"),
    "a GPU without kernels": (gpu(capability=(6, 1)), "compute capability 6.1", "sm_61"),
    "a low wired limit": (metal(recommended=20 * GB), "may wire 20 GB", "iogpu.wired_limit_mb="),
    "an old macOS": (metal(macos="14.6"), "no residency sets", "update to macOS 15"),
    "Rosetta": (metal(metal=False), "sees no GPU", "arm64"),
    "no MLX": (metal(problem="No module named 'mlx'"), "No module named 'mlx'", "pip install"),
    "no ssh": (replace(WELL, cluster=replace(CLUSTER, ssh=False)), "no `ssh`", "install OpenSSH"),
    "ssh with a password": (node(problem="Permission denied"), "without a password", "ssh-copy-id me@a"),
    "a short PATH": (node(version=""), "does not find `moesched`", "whole path"),
    "another version": (node(version="0.9"), "has moesched 0.9", "same version"),
    "a closed port": (port("silent"), "port 7001 of node 0 (a) does not answer", "open it"),
    "a port in use": (port("taken"), "is in use", "choose another port"),
}


UNASKED = replace(CUDA, driver="", gpus=[])


@pytest.mark.parametrize(
    "facts",
    [
        WELL,
        memory(locked=8 << 20),
        replace(memory(locked=65_536), device="cpu", cuda=UNASKED, metal=None, cluster=None),
    ],
    ids=["a machine without trouble", "a low limit, which CUDA does not heed", "what nobody asked for"],
)
def test_no_alarm_is_raised_for(facts: Facts) -> None:
    assert examine(facts).troubles == []
    assert not judge_peak("memory", 10 * GB, 11 * GB).is_trouble
    assert judge_peak("memory", 10 * GB, 12 * GB).is_trouble


def test_a_trial_with_little_memory_keeps_below_the_system_s_own_limit() -> None:
    assert settable_limit(6 * GB, 5 * GB) == 5 * GB
    assert settable_limit(6 * GB, resource.RLIM_INFINITY) == settable_limit(6 * GB, 7 * GB) == 6 * GB


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_trouble_is_named_alone_in_one_line_with_its_remedy(name: str) -> None:
    facts, says, remedy = PLANTED[name]
    (trouble,) = examine(facts).troubles
    assert says in trouble.says
    assert remedy in trouble.remedy
    assert "\n" not in trouble.says + trouble.remedy


def test_a_gpu_without_bfloat16_is_said_to_compute_in_float16() -> None:
    old = cuda(gpus=[replace(GPU, name="T4", capability=(7, 5))], kernels_for=["sm_75"])
    (said,) = [found.says for found in examine(old).findings if found.about == "GPU"]
    assert "compute capability 7.5, no bfloat16: such models are computed in float16" in said


@pytest.mark.parametrize(
    "name", ["no driver", "an old driver", "torch without CUDA", "a hidden GPU", "a GPU without kernels"]
)
def test_a_run_on_cuda_is_refused_with_the_same_line(name: str) -> None:
    facts, says, remedy = PLANTED[name]
    reason = refusal(facts.cuda)
    assert reason is not None and says in reason and remedy in reason and "\n" not in reason
    assert refusal(CUDA) is None
    assert refusal(gpu(free=10 * GB).cuda) is None, "plans take what is free"


def test_what_cuda_locks_is_found_by_halves() -> None:
    with LaggingGpu() as imitated:
        assert lockable_bytes(8 << 20, str(GPU_DEVICE)) == 8 << 20
        imitated.pinned.most_registered = 3 << 20
        assert lockable_bytes(8 << 20, str(GPU_DEVICE)) == 2 << 20
        imitated.pinned.most_registered = 0
        assert lockable_bytes(8 << 20, str(GPU_DEVICE)) == 0
        assert not imitated.pinned.registered


def test_what_libraries_take_of_a_gpu_is_measured_and_given_back() -> None:
    with LaggingGpu() as imitated:
        assert library_bytes(str(GPU_DEVICE)) > 1 << 20
        assert imitated.memory.in_use() == 0


@linux
def test_a_file_that_cuda_does_not_register_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    refusal_of = partial(mapping_refusal, device=str(GPU_DEVICE))
    with LaggingGpu() as imitated:
        assert mapping_of(tmp_path, refusal_of) == ""
        imitated.pinned.refuses_files = 801
        refusal = mapping_of(tmp_path, refusal_of)
        assert refusal is not None
        assert f"of {tmp_path / 'model.safetensors'} (error 801): put the model on a local disk" in refusal
        (tmp_path / "model.safetensors").unlink()
        assert "doctor-" in str(mapping_of(tmp_path, refusal_of))
        assert [*tmp_path.iterdir()] == []
        assert not imitated.pinned.registered
        assert imitated.pinned.faults == []


@pytest.mark.parametrize(
    ("capability", "kernels_for", "runs"),
    [
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["compute_80"], True),
        ((9, 0), ["sm_90a"], True),
        ((12, 0), ["sm_100", "sm_120"], True),
        ((7, 5), [], False),
    ],
)
def test_kernels_run_where_cuda_says(capability: tuple[int, int], kernels_for: list[str], runs: bool) -> None:
    assert has_kernels(capability, kernels_for) is runs


def direct(file: Path) -> Any:
    file.read_bytes()
    return "bypassed"


def test_the_cache_folder_is_made_and_nothing_stays_in_it(tmp_path: Path) -> None:
    facts = cache_facts(tmp_path / "new", direct)
    assert (facts.problem, facts.caching) == ("", "bypassed")
    assert [*(tmp_path / "new").iterdir()] == []
    (tmp_path / "file").write_text("")
    assert cache_facts(tmp_path / "file" / "below", direct).problem == "Not a directory"
    assert cache_facts(tmp_path / os.fsdecode(b"\xff"), direct).path == rf"{tmp_path}/\udcff"


def test_a_model_whose_files_are_missing_is_told(tmp_path: Path) -> None:
    assert model_facts(MODEL, direct).problem == ""
    assert model_facts(tmp_path, direct).problem == "config.json: No such file or directory"
    (tmp_path / "config.json").write_text("{}")
    assert model_facts(tmp_path, direct).problem == "it has no safetensors files"


def ticking(step: int, every: int) -> Callable[[], int]:
    readings = iter(range(10**6))
    return lambda: next(readings) // every * step


def test_the_steps_of_a_clock_are_found() -> None:
    assert clock_facts(ticking(1_000_000, every=10)).step == 1_000_000
    assert clock_facts(ticking(-1, every=1)).monotonic is False
    assert clock_facts().step < 10_000


def test_a_port_is_taken_while_something_listens_and_free_afterwards() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        assert port_state("127.0.0.1", number) == "taken"
    assert port_state("127.0.0.1", number) == "free"


def test_a_port_of_a_name_that_cannot_be_is_silent() -> None:
    assert port_state("mac..lan", 7001) == "silent"


def test_a_run_that_says_nothing_is_ended() -> None:
    with subprocess.Popen(["sleep", "60"], stderr=subprocess.PIPE) as run:
        assert not begins(run, patience=0.01)


def test_logits_that_differ_in_one_bit_are_found() -> None:
    some: Logits = {(0, 1): [np.ones((2, 4), np.float32)]}
    others: Logits = {(0, 1): [np.nextafter(some[0, 1][0], np.float32(2))]}
    assert largest_difference(some, some) == 0
    assert 0 < largest_difference(some, others) < 1e-6
    assert largest_difference(some, {}) == float("inf")


def test_doctor_prints_and_writes_what_it_found(command: Any, tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    said = command("doctor", "--model", MODEL, "--out", out, "--json")
    assert said.json == json.loads(out.read_text())
    assert {"version", "system", "facts", "findings", "trial"} <= said.json.keys()
    troubles = [each for each in said.json["findings"] if each["remedy"]]
    assert said.code == (1 if troubles else 0)
    assert "model folder" in command("doctor", "--model", MODEL).out


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run")
def test_a_trial_of_the_processor_finds_no_trouble(command: Any) -> None:
    said = command("doctor", "--device", "cpu", "--json")
    found = {each["about"]: each for each in said.json["trial"]}
    assert [each for each in found.values() if each["remedy"]] == []
    assert found.keys() == {"bits", "policies", "trace", "memory of a run", "lack of memory", "Ctrl-C"}
    assert "equal to the bit" in found["bits"]["says"]
    assert "of them streamed" in found["policies"]["says"]


# -- other hosts -------------------------------------------------------------------------------------------------------


Ssh = Callable[[str], Path]
HOST = host(0, ssh="me@mac-0", port=0, command="/opt/moesched")
VERSION = version("moesched")

KEY_CHANGED = """
echo '@@@@@@@@@@@@@@@@@@@@@@@@@@@' >&2
echo 'WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!' >&2
echo 'Host key verification failed.' >&2
exit 255
"""
REFUSALS = {
    "a password": (
        "echo 'me@mac-0: Permission denied (publickey).' >&2; exit 255",
        "password",
        "ssh-copy-id me@mac-0",
    ),
    "another key": (KEY_CHANGED, "Host key verification failed", "ssh-keygen -R"),
    "an unknown name": (
        "echo 'ssh: Could not resolve hostname mac-0: Name or service not known' >&2; exit 255",
        "Could not resolve hostname",
        "cluster file",
    ),
    "no ssh server": (
        "echo 'ssh: connect to host mac-0 port 22: Connection refused' >&2; exit 255",
        "runs no ssh server",
        "Remote Login",
    ),
    "a machine that is off": (
        "echo 'ssh: connect to host mac-0 port 22: Connection timed out' >&2; exit 255",
        "does not answer ssh",
        "keep it awake",
    ),
    "a reason of its own": (
        "echo 'kex_exchange_identification: Connection closed' >&2; exit 255",
        "is not reached by ssh: kex_exchange_identification",
        "ssh -o BatchMode=yes me@mac-0 true",
    ),
    "no reason": ("exit 255", "it says nothing", "ssh -o BatchMode=yes me@mac-0 true"),
    "a short PATH": (
        "echo 'sh: /opt/moesched: not found' >&2; exit 127",
        "does not find `/opt/moesched`",
        "whole path",
    ),
    "a broken installation": (
        "echo 'Traceback' >&2; echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1",
        "cannot start moesched: ModuleNotFoundError",
        "/opt/moesched --version",
    ),
    "another version": ("echo 0.0.1", f"has moesched 0.0.1, and this machine {VERSION}", "same version"),
}
"""Scripts in place of ssh, what the finding says, and its remedy."""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ssh:
    """Makes a program `ssh`, the first one on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def made(script: str) -> Path:
        program = tmp_path / "ssh"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return program

    return made


def found(seconds: float = 30) -> Finding:
    """The doctor's finding of the only node."""
    facts = replace(WELL, cluster=cluster_facts(cluster(HOST, port=0), seconds))
    (finding,) = (each for each in probe_cluster(facts) if each.about.startswith("ssh"))
    return finding


@pytest.mark.parametrize("name", REFUSALS)
def test_each_way_in_which_ssh_fails_is_named_with_its_remedy(ssh: Ssh, name: str) -> None:
    script, says, remedy = REFUSALS[name]
    ssh(script)
    trouble = found()
    assert trouble.is_trouble
    assert trouble.says.startswith("node 0 (mac-0) ")
    assert says in trouble.says
    assert remedy in trouble.remedy
    assert "\n" not in trouble.says + trouble.remedy


def has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_an_ssh_that_hangs_is_given_up_with_all_that_it_started(ssh: Ssh, tmp_path: Path) -> None:
    """Its own child, as of a ProxyCommand, keeps the output open."""
    ssh(f"sleep 60 & echo $! > {tmp_path}/child; wait")
    child = tmp_path / "child"
    for seconds in (1, 10, 50):  # until it had the time to start its own
        trouble = found(seconds)
        assert f"no answer within {seconds} s" in trouble.says
        assert "keep it awake" in trouble.remedy
        if child.exists() and child.read_text():
            break
    pid = int(child.read_text())
    wait_until(lambda: has_ended(pid), "the end of what ssh started")


def test_ssh_is_asked_for_the_version_without_a_password_and_what_a_login_prints_is_no_trouble(
    ssh: Ssh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh(f'echo "$@" > {tmp_path}/asked; echo "Welcome to mac-0"; echo {VERSION}')
    assert not found().is_trouble
    assert (tmp_path / "asked").read_text() == "-o BatchMode=yes -- me@mac-0 /opt/moesched --version\n"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert found().remedy == "install OpenSSH, or start `moesched node` yourself on each machine"
