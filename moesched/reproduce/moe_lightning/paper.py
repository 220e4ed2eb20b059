"""Printed figures of MoE-Lightning, read from the TOML file beside this module."""

from __future__ import annotations

import msgspec

from moesched.machines import Machine, load_machine
from moesched.machines.staging import staged
from moesched.reproduce.printed import PrintedPaper, read_paper


class PaperSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model on a machine, by our names, with the bytes of its pinned memory.

    Attributes:
        wide_vectors: whether the host's CPU has AVX-512.
    """

    model: str
    machine: str
    pinned: str
    wide_vectors: bool

    def described(self) -> Machine:
        """Return the machine as the paper's systems use it: weights are staged, and other copies are pageable."""
        return staged(load_machine(self.machine), self.pinned, ring=False)


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurement of one system.

    Attributes:
        variant: distinguishes rows of the same system.
        micro_batches: number of micro-batches of `micro_batch_size` requests.
        fit: the rate that is fitted to this figure; None if the figure is predicted.
    """

    system: str
    tokens_per_second: float
    micro_batch_size: int
    micro_batches: int
    variant: str = ""
    fit: str | None = None

    @property
    def name(self) -> str:
        """The system and its variant."""
        return f"{self.system}, {self.variant}" if self.variant else self.system


class Column(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cells of one table that belong to one workload and setting."""

    table: str
    workload: str
    new_tokens: int
    setting: str
    rows: list[Row]


class ArtifactRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run that the authors' artifact lists.

    Attributes:
        seconds: of the whole run, its prefill included.
        fit: whether it sets a rate of the machine.
    """

    new_tokens: int
    seconds: float
    micro_batch_size: int
    micro_batches: int
    fit: bool = False

    @property
    def requests(self) -> int:
        """The number of requests."""
        return self.micro_batches * self.micro_batch_size


class ArtifactRuns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs of one system in the paper's artifact, one for each number of generated tokens."""

    system: str
    setting: str
    workload: str
    runs: list[ArtifactRun]


class PrintedRatios(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speedups of a system over others of its column, as the text states them."""

    where: str
    table: str
    workload: str
    setting: str
    over: str
    ratios: dict[str, float]


class Paper(PrintedPaper, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reproduced figures of the paper."""

    settings: dict[str, PaperSetting]
    cells: list[Column]
    artifact: list[ArtifactRuns]
    printed_ratios: list[PrintedRatios]


def moe_lightning() -> Paper:
    """Read MoE-Lightning's Tables 2, 4 and 5, the claims of its sections 5 and 6, and runs of its artifact."""
    return read_paper(Paper, __package__)
