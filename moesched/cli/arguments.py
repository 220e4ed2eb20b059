"""Option structs that several commands share; a command's own struct inherits them."""

# A module whose struct inherits one of these imports `options`: cyclopts looks the annotations up there.

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesched.cli import options

if TYPE_CHECKING:
    from moesched.machines import Machine


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The shape of a model, and the machine that runs it."""

    model: options.Model
    machine: options.Machine
    machine_set: options.MachineChanges = ()

    def changed_machine(self) -> Machine | str:
        """The machine with its changes."""
        if not self.machine_set:
            return self.machine
        from moesched.inputs.lookup import find_machine
        from moesched.machines.changes import changed

        return changed(find_machine(self.machine), self.machine_set)


@dataclass(frozen=True, kw_only=True)
class FormatArguments:
    """The storage format of the weights."""

    format: options.Format = None


@dataclass(frozen=True, kw_only=True)
class PolicyArguments:
    """The policy, its settings, and the dtype that it computes in."""

    policy: options.Policy
    settings: options.Settings = ()
    dtype: options.DType = None

    def policy_and_dtype(self) -> dict[str, Any]:
        """The same as keywords of a job."""
        from moesched.settings import parse_settings

        return {"policy": self.policy, "settings": parse_settings(self.settings), "dtype": self.dtype}


@dataclass(frozen=True, kw_only=True)
class SizeArguments:
    """Sizes of batches, and budgets."""

    batch_size: options.BatchSize = None
    micro_batch_size: options.MicroBatchSize = None
    budget: options.Budgets = ()

    def sizes_and_budgets(self) -> dict[str, Any]:
        """The same as keywords of a job."""
        return {
            "batch_size": self.batch_size,
            "micro_batch_size": self.micro_batch_size,
            "budgets": options.parse_budgets(self.budget),
        }


@dataclass(frozen=True, kw_only=True)
class BatchArguments(SizeArguments):
    """Sizes of batches and of prefill's chunks, and budgets."""

    prefill_chunk: options.PrefillChunk = None

    def sizes_and_budgets(self) -> dict[str, Any]:
        """The same as keywords of a job."""
        return {**super().sizes_and_budgets(), "prefill_chunk": self.prefill_chunk}


@dataclass(frozen=True, kw_only=True)
class OutputArguments:
    """Outputs of a command that makes a report."""

    trace: options.Trace = None
    report: options.ReportFile = None
    json: options.Json = False

    def files(self) -> dict[str, Any]:
        """The files that a job writes itself, as its keywords."""
        return {"trace": self.trace, "html": self.html}

    @property
    def html(self) -> Path | None:
        """The file of the report, if it is one to look at."""
        from moesched.system.outputs import is_html

        return self.report if is_html(self.report) else None

    @property
    def json_report(self) -> Path | None:
        """The file of the report, if it is in JSON."""
        return None if self.html else self.report


@dataclass(frozen=True, kw_only=True)
class ClusterArguments:
    """Number of accelerators and machines that share a model."""

    tensor_parallel: options.TensorParallel = None
    nodes: options.Nodes = None
    network: options.Network = None
