"""Facts about a machine, as the system and the libraries tell them; probes judge them. Sizes are in bytes."""

from __future__ import annotations

from typing import Literal

import msgspec

from moesched.system.cuda import CudaFacts

Caching = Literal["bypassed", "dropped", "kept"]
"""The effect of a device's reads on the page cache; "bypassed" are direct reads."""
PortState = Literal["free", "taken", "silent", "forbidden"]
"""Nothing listens there; something does; no answer, as behind a firewall; this user may not listen there."""


NO_ANSWER = "no answer"
"""The beginning of the message for an ssh that was given up."""


class ProcessorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The processor.

    Attributes:
        architecture: such as "x86_64".
        flags: names of its features, as Linux lists them; empty where the system lists none.
    """

    name: str
    architecture: str
    flags: list[str]


class KernelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The library of CPU kernels.

    Attributes:
        sets: instruction sets that it can use here, best first.
        problem: the reason why it cannot be used; empty if it can.
    """

    sets: list[str]
    problem: str = ""


class CoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The cores that this process may run on, and the number whose time its control groups allow, if they limit it."""

    cores: int
    quota: int | None


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The memory.

    Attributes:
        physical: of the machine.
        limit: the most that processes here can have: `physical`, or less in a control group.
        available: free, or can be freed, within the limit.
        locked: the most that a process may lock by itself, which what CUDA locks does not count against; None where
            there is no limit.
        address_space: the most that a process may map; None where there is no limit.
    """

    physical: int
    limit: int
    available: int
    locked: int | None
    address_space: int | None


class FolderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A folder.

    Attributes:
        role: "cache" or "model".
        problem: the reason why it cannot be used; empty if it can.
        free: bytes that this user can write there.
        caching: effect of the device's reads of a file there; None where no file could be read.
    """

    role: Literal["cache", "model"]
    path: str
    problem: str = ""
    free: int = 0
    caching: Caching | None = None


class ClockFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The clock of all measurements.

    Attributes:
        monotonic: whether it never goes back.
        step: its smallest observed step, in nanoseconds.
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
        recommended: bytes that the system recommends to wire at most; None where it says nothing.
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
    """A port of a cluster file, with the name of the launcher or node that listens there during a run."""

    who: str
    address: str
    port: int
    state: PortState


class SshFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as ssh without a password reaches it.

    Attributes:
        who: the node's name.
        destination: as ssh takes it.
        problem: ssh's reason for not reaching it; empty if it does.
        command: the command that starts moesched there.
        version: what the command prints as its version; empty if it is not found.
        failure: what it says instead, where it fails; empty if it does not.
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
        ssh: whether there is an ssh program here.
        version: moesched's version here.
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
        metal: None where MLX is not examined.
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
