"""Facts about a machine, from the system and libraries; probes judge them. Sizes are in bytes."""

from __future__ import annotations

from typing import Literal

import msgspec

from moesched.system.cuda import CudaFacts

Caching = Literal["bypassed", "dropped", "kept"]
"""Effect of a device's reads of a file on the page cache; "bypassed" means direct reads."""
PortState = Literal["free", "taken", "silent", "forbidden"]
"""State of a port, in this order: nothing listens; something listens; no answer, as behind a firewall; not allowed."""


NO_ANSWER = "no answer"
"""Start of the message for an ssh that did not answer in time."""


class ProcessorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The processor.

    Attributes:
        architecture: name of the architecture, such as "x86_64".
        flags: names of its features, as Linux lists them; empty where the system lists none.
    """

    name: str
    architecture: str
    flags: list[str]


class KernelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The library of CPU kernels.

    Attributes:
        sets: instruction sets that the library can use here, best first.
        problem: the reason why the library cannot be used; empty if it can.
    """

    sets: list[str]
    problem: str = ""


class CoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Cores that this process may run on, and the number of cores whose time its control groups allow; None for all."""

    cores: int
    quota: int | None


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The memory.

    Attributes:
        physical: memory of the machine.
        limit: the most that processes here can have: `physical`, or less in a control group.
        available: memory within the limit that is free or can be freed.
        locked: the most that a process may lock by itself (CUDA's locks do not count); None without a limit.
        address_space: the most that a process may map; None without a limit.
    """

    physical: int
    limit: int
    available: int
    locked: int | None
    address_space: int | None


class FolderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The folder of the cache or of a model.

    Attributes:
        role: "cache" or "model".
        problem: the reason why the folder cannot be used; empty if it can.
        free: bytes that this user can write there.
        caching: effect of the device's reads of a file there on the page cache; None if no file could be read.
    """

    role: Literal["cache", "model"]
    path: str
    problem: str = ""
    free: int = 0
    caching: Caching | None = None


class ClockFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The clock of all measurements.

    Attributes:
        monotonic: whether the clock never goes back.
        step: the smallest observed step, in nanoseconds.
    """

    monotonic: bool
    step: int


class MetalFacts(msgspec.Struct, frozen=True, kw_only=True):
    """MLX, and Metal below it.

    Attributes:
        mlx: MLX's version; empty if it is not installed.
        metal: whether MLX uses a GPU.
        macos: the system's version; empty elsewhere.
        gpu: the GPU's name.
        recommended: the most bytes that the system recommends to wire; None if it says nothing.
        problem: the reason why MLX cannot be loaded; empty if it can.
        peak: the most bytes that MLX had allocated in this process.
    """

    mlx: str
    metal: bool
    macos: str
    gpu: str = ""
    recommended: int | None = None
    problem: str = ""
    peak: int = 0


class PortFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A port of a cluster file, its state, and the name of the launcher or node that listens there during a run."""

    who: str
    address: str
    port: int
    state: PortState


class SshFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as ssh without a password reaches it.

    Attributes:
        who: the node's name.
        destination: the destination in the syntax of ssh.
        problem: ssh's reason why it does not reach the node; empty if it does.
        command: the command that starts moesched there.
        version: the version that the command prints; empty if the command is not found.
        failure: the command's error message; empty if it works.
    """

    who: str
    destination: str
    command: str
    problem: str = ""
    version: str = ""
    failure: str = ""


class ClusterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machines of a cluster file.

    Attributes:
        ssh: whether this machine has an ssh program.
        version: moesched's version on this machine.
    """

    ssh: bool
    version: str
    ports: list[PortFacts]
    nodes: list[SshFacts]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts about a machine.

    Attributes:
        device: the device that is examined: "cpu", "cuda" or "mlx"; empty for none in particular.
        model_bytes: size of the model's files; 0 without a model.
        metal: None if MLX is not examined.
        cluster: None without a cluster file.
    """

    device: str
    processor: ProcessorFacts
    kernels: KernelFacts
    cores: CoreFacts
    memory: MemoryFacts
    folders: list[FolderFacts]
    clock: ClockFacts
    cuda: CudaFacts
    model_bytes: int = 0
    metal: MetalFacts | None = None
    cluster: ClusterFacts | None = None
