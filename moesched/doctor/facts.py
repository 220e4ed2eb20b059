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
    """Facts about this machine's processor.

    Attributes:
        architecture: name of the architecture, such as "x86_64".
        flags: names of the processor's features, as Linux lists them; empty where the system lists none.
    """

    name: str
    architecture: str
    flags: list[str]


class KernelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """State of the compiled library of CPU kernels.

    Attributes:
        sets: instruction sets that the library can use on this processor, best first.
        problem: the reason why the library cannot be used; empty if it can.
    """

    sets: list[str]
    problem: str = ""


class CoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The cores that this process may use.

    Attributes:
        cores: number of cores in the process's affinity.
        quota: number of cores whose time the process's control groups allow; None without a limit.
    """

    cores: int
    quota: int | None


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of the machine and the limits of this process, in bytes.

    Attributes:
        physical: memory of the machine.
        limit: the most that processes in this control group can have; `physical` without a control group's limit.
        available: memory within the limit that is free or can be freed.
        locked: the most that a process may lock with mlock, which does not count CUDA's locks; None without a limit.
        address_space: the most that a process may map; None without a limit.
    """

    physical: int
    limit: int
    available: int
    locked: int | None
    address_space: int | None


class FolderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The folder of the cache or of a model, and the result of trying it.

    Attributes:
        role: "cache" or "model".
        problem: the reason why the folder cannot be used; empty if it can.
        free: bytes that this user can still write to the folder's disk.
        caching: "bypassed" if the device reads the folder's files past the page cache, "dropped" if it drops the bytes
            of each read from the page cache, "kept" if they stay there; None if the folder cannot be used.
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
    """Facts about MLX and the GPU that it uses through Metal.

    Attributes:
        mlx: MLX's version; empty if it is not installed.
        metal: whether MLX uses a GPU.
        macos: version of macOS; empty on other systems.
        gpu: the GPU's name.
        recommended: the most bytes of memory that macOS recommends to wire for the GPU; None if it says nothing.
        problem: the reason why MLX cannot be loaded; empty if it can.
        peak: the largest number of bytes that MLX had allocated at once in this process.
    """

    mlx: str
    metal: bool
    macos: str
    gpu: str = ""
    recommended: int | None = None
    problem: str = ""
    peak: int = 0


class PortFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP port that a cluster file names, and its state.

    Attributes:
        who: the launcher or the node that listens on the port during a run, by name.
    """

    who: str
    address: str
    port: int
    state: PortState


class SshFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The result of running `moesched --version` on a node by ssh, without a password.

    Attributes:
        who: the node's name.
        destination: the node's address as ssh takes it, such as user@host.
        problem: ssh's reason why it does not reach the node; empty if it does.
        command: the command that starts moesched on the node.
        version: the version that the command prints; empty if it prints none.
        failure: the command's error message; empty if the command works or is not found.
    """

    who: str
    destination: str
    command: str
    problem: str = ""
    version: str = ""
    failure: str = ""


class ClusterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a cluster file's nodes and ports, as this machine reaches them.

    Attributes:
        ssh: whether this machine has an ssh program.
        version: moesched's version on this machine.
        nodes: the result of ssh to each node; empty without an ssh program.
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
