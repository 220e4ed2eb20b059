"""Examines this machine: gathers facts, and lets every probe judge them."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from moesched import plugins
from moesched.cluster.cluster_file import load_cluster
from moesched.doctor.cluster_facts import cluster_facts
from moesched.doctor.facts import Facts, KernelFacts, MetalFacts
from moesched.doctor.findings import Finding
from moesched.doctor.host_facts import (
    bytes_of_model,
    cache_facts,
    clock_facts,
    core_facts,
    mapping_of,
    memory_facts,
    model_facts,
    processor_facts,
)
from moesched.doctor.probes import LOCKED_WANTED, PROBES
from moesched.errors import BadInput
from moesched.models.gguf.parts import is_gguf
from moesched.system.cache import cache_folder
from moesched.system.cuda import CudaFacts
from moesched.system.input_file import is_folder
from moesched.system.memory import require_address_space

TORCH = "moesched.devices.torch.inspection"
MLX = "moesched.devices.mlx.inspection"


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `moesched doctor` found, as it is written to the file of `--out`.

    Attributes:
        version: moesched's version.
        python: Python's version.
        system: the operating system, with its version.
        trial: findings from runs on a device; empty if none was tried.
        seconds: time that the examination took.
    """

    version: str
    python: str
    system: str
    facts: Facts
    findings: list[Finding]
    trial: list[Finding] = []
    seconds: float = 0.0

    @property
    def troubles(self) -> list[Finding]:
        """All findings, of the machine and of the trial, that have a remedy."""
        return [each for each in (*self.findings, *self.trial) if each.is_trouble]


def examine(facts: Facts) -> Examination:
    """Call every probe with the facts about this machine, and return the facts with all findings."""
    return Examination(
        version=version("moesched"),
        python=platform.python_version(),
        system=platform.platform(),
        facts=facts,
        findings=[finding for probe in PROBES for finding in probe(facts)],
    )


def gather_facts(device: str = "", model: Path | None = None, hosts: Path | None = None) -> Facts:
    """Gather the facts about this machine.

    Args:
        device: "cpu", "cuda", "mlx", or empty for none in particular.
        model: a model to look at: a folder, or a GGUF file.
        hosts: cluster file; its nodes are asked for moesched's version by ssh, and all its ports are tried.

    Raises:
        BadInput: the model is no folder or GGUF file, or the cluster file is broken.
        OutOfMemory: a limit of the address space is so low that torch would crash.
    """
    if model is not None and not (is_folder(model) or is_gguf(model)):
        raise BadInput(
            f"{model} is not a folder: give a model's folder, with its config.json, or a GGUF file"
        )
    cluster = None if hosts is None else load_cluster(hosts)
    require_address_space()
    caching_of = _loaded("caching_of")
    folders = [cache_facts(cache_folder(), caching_of)]
    if model is not None:
        folders.append(model_facts(model, caching_of))
    kernels: KernelFacts = _loaded("kernel_facts")()
    cuda = cuda_facts()
    if cuda.gpus:
        refusal = mapping_of(model or cache_folder(), _loaded("mapping_refusal"))
        cuda = replace(cuda, lockable=_loaded("lockable_bytes")(LOCKED_WANTED), mapping=refusal)
    return Facts(
        device=device,
        processor=processor_facts(),
        kernels=kernels,
        cores=core_facts(),
        memory=memory_facts(),
        folders=folders,
        clock=clock_facts(),
        cuda=cuda,
        model_bytes=0 if model is None else bytes_of_model(model),
        metal=metal_facts() if device == "mlx" or sys.platform == "darwin" else None,
        cluster=None if cluster is None else cluster_facts(cluster),
    )


def cuda_facts() -> CudaFacts:
    """Return the facts about CUDA that torch reports now."""
    facts: CudaFacts = _loaded("cuda_facts")()
    return facts


def library_bytes() -> int:
    """Return the bytes that CUDA's libraries allocate on the first GPU for one stream; no plan counts these bytes."""
    nbytes: int = _loaded("library_bytes")()
    return nbytes


def metal_facts() -> MetalFacts:
    """Return facts about MLX and this machine's GPU; if MLX cannot be loaded, only the reason."""
    try:
        facts: MetalFacts = plugins.load(f"{MLX}:metal_facts", "MLX")()
    except BadInput as error:
        return MetalFacts(mlx="", metal=False, macos=platform.mac_ver()[0], problem=str(error))
    return facts


def _loaded(name: str) -> Any:
    """Import torch, and return the function `name` of the module `moesched.devices.torch.inspection`."""
    return plugins.load(f"{TORCH}:{name}", "the inspection")
