"""Printed figures of MoE-Lightning, read from the TOML file beside this module."""

from __future__ import annotations

import msgspec

from moesched.machines import Machine, load_machine
from moesched.machines.staging import staged
from moesched.reproduce.printed import PrintedPaper, read_paper


class PaperSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A setting of the paper: a model on a machine, both by the names of our profiles.

    Attributes:
        pinned: size of the host's page-locked memory, such as "16GB".
        wide_vectors: whether the host's CPU has AVX-512.
    """

    model: str
    machine: str
    pinned: str
    wide_vectors: bool

    def described(self) -> Machine:
        """Return the setting's machine, changed so that data are copied as in the paper's systems.

        Weights pass through page-locked memory, and all other copies use pageable memory.
        """
        return staged(load_machine(self.machine), self.pinned, ring=False)


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A printed throughput of one system, with the sizes of its batch.

    Attributes:
        variant: text that distinguishes rows of the same system; empty if the system has only one row.
        micro_batch_size: number of requests in a micro-batch.
        fit: field of `RateFactors` that is fitted to this throughput; None if the throughput is predicted.
    """

    system: str
    tokens_per_second: float
    micro_batch_size: int
    micro_batches: int
    variant: str = ""
    fit: str | None = None

    @property
    def name(self) -> str:
        """The name of the system, followed by the variant if there is one."""
        return f"{self.system}, {self.variant}" if self.variant else self.system


class Column(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cells of one table that have the same workload and setting, one row for each system."""

    table: str
    workload: str
    new_tokens: int
    setting: str
    rows: list[Row]


class ArtifactRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run that the authors' artifact lists.

    Attributes:
        seconds: duration of the whole run, its prefill included.
        micro_batch_size: number of requests in a micro-batch.
        fit: whether a rate in our profiles was fitted to this run.
    """

    new_tokens: int
    seconds: float
    micro_batch_size: int
    micro_batches: int
    fit: bool = False

    @property
    def requests(self) -> int:
        """The number of requests in all micro-batches."""
        return self.micro_batches * self.micro_batch_size


class ArtifactRuns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs of one system in the paper's artifact, one for each number of generated tokens."""

    system: str
    setting: str
    workload: str
    runs: list[ArtifactRun]


class PrintedRatios(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speedups that the paper's text states, of one system over others in the same column of a table.

    Attributes:
        where: section of the paper.
        over: the faster system, which has the speedups.
        ratios: its printed speedup over each slower system, by that system's name.
    """

    where: str
    table: str
    workload: str
    setting: str
    over: str
    ratios: dict[str, float]


class Paper(PrintedPaper, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paper's printed figures that we reproduce.

    Attributes:
        settings: pairs of model and machine, by the paper's name, such as "S1".
        cells: the columns of Tables 4 and 5.
    """

    settings: dict[str, PaperSetting]
    cells: list[Column]
    artifact: list[ArtifactRuns]
    printed_ratios: list[PrintedRatios]


def moe_lightning() -> Paper:
    """Read MoE-Lightning's Tables 2, 4 and 5, the claims of its sections 5 and 6, and runs of its artifact."""
    return read_paper(Paper, __package__)
