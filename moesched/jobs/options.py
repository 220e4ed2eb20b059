"""Options of jobs: the keywords of `run_model`, `simulate_model` and `run_cluster`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from moesched.inputs.defaults import NEW_TOKENS, PREVIEW_ACCURACY, TRANSPORT
from moesched.inputs.options import (
    CutKeywords,
    CutOptions,
    DeviceKeywords,
    DeviceOptions,
    FormatKeywords,
    FormatOptions,
    MachineKeywords,
    MachineOptions,
    PolicyOptions,
    SettingKeywords,
    SizeKeywords,
    SizeOptions,
)
from moesched.machines.networks import Network
from moesched.requests.sampling import Sampling
from moesched.routing.sources import RoutingGiven
from moesched.runs.listeners import Listener
from moesched.seams import Transport


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Outputs of a job beside its report.

    Attributes:
        trace: file to write a trace to; those of later batches get a number in their names.
        html: file to write a report to look at, likewise.
        listener: notified of the job's progress.
    """

    trace: Path | str | None = None
    html: Path | str | None = None
    listener: Listener | None = None


class OutputKeywords(TypedDict, total=False):
    """Keywords of OutputOptions."""

    trace: Path | str | None
    html: Path | str | None
    listener: Listener | None


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The tokens that are generated.

    Attributes:
        max_new_tokens: tokens to generate for each prompt, at most.
        sampling: settings for choosing the next token; None for the likeliest one.
    """

    max_new_tokens: int = NEW_TOKENS
    sampling: Sampling | None = None


class GenerationKeywords(TypedDict, total=False):
    """Keywords of GenerationOptions."""

    max_new_tokens: int
    sampling: Sampling | None


@dataclass(frozen=True, kw_only=True)
class PlannedOptions(PolicyOptions, SizeOptions, MachineOptions, CutOptions):
    """Options that determine the plans of batches, measured or predicted."""


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions(PolicyOptions, SizeOptions, MachineOptions, DeviceOptions):
    """The options of `profile_routing` and `sparsity_of`: those of a run that is observed."""


class ProfilingKeywords(SettingKeywords, SizeKeywords, MachineKeywords, DeviceKeywords, total=False):
    """Keywords of ProfilingOptions that have a default."""


@dataclass(frozen=True, kw_only=True)
class SessionOptions(PlannedOptions, DeviceOptions):
    """The options of `Session`, which hold for all its calls.

    Attributes:
        foreign_machine: use the machine's measured costs even if they come from another processor than this one.
    """

    foreign_machine: bool = False


class SessionKeywords(ProfilingKeywords, CutKeywords, total=False):
    """Keywords of SessionOptions that have a default."""

    foreign_machine: bool


@dataclass(frozen=True, kw_only=True)
class CallOptions(GenerationOptions, OutputOptions):
    """The options of one call of a session.

    Attributes:
        expect: predict each batch after it ran, if the machine is calibrated: `expected` of the report.
        band: with `expect`, predict the first batch some twenty times more, for the band of the predicted figures.
        explained: find the bottleneck of the first batch, and what would help: `bottleneck` and `helps` of the report.
    """

    expect: bool = False
    band: bool = True
    explained: bool = False


class CallKeywords(GenerationKeywords, OutputKeywords, total=False):
    """Keywords of CallOptions."""

    expect: bool
    band: bool
    explained: bool


@dataclass(frozen=True, kw_only=True)
class RunOptions(SessionOptions, CallOptions):
    """The options of `run_model`."""


class RunKeywords(SessionKeywords, CallKeywords, total=False):
    """Keywords of RunOptions that have a default."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(
    PolicyOptions, SizeOptions, MachineOptions, DeviceOptions, GenerationOptions, OutputOptions
):
    """The options of `run_cluster` and `run_local`; machine, budgets and device hold for each node.

    Attributes:
        transport: a name of `moesched list transports`, module:Class, file.py:Class, or a class; it carries the nodes'
            exchanges.
    """

    machine: str
    transport: str | type[Transport] = TRANSPORT


class ClusterKeywords(
    SettingKeywords,
    SizeKeywords,
    MachineKeywords,
    DeviceKeywords,
    GenerationKeywords,
    OutputKeywords,
    total=False,
):
    """Keywords of ClusterOptions that have a default."""

    transport: str | type[Transport]


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """The requests of a simulation, and the experts that they choose.

    Attributes:
        gen: tokens to generate for each prompt; None for the workload's own number.
        requests: number of requests; if more than fit in a batch, they run as successive batches. None for one full
            batch or, if the workload lists its requests, for each of them once.
        padded: pad every prompt to the longest one of the workload.
        seed: seed of the order of prompts and of the routing.
        beams: width of a beam search, which always runs to the last token; 1 for none.
        routing: a routing profile or trace (docs/routing.md), or a file with one, or uniform, popularity or zipf; None
            for uniform.
        routing_settings: settings of the routing, such as its locality.
        preview_accuracy: probability that `Step.preview_route` forecasts an expert that the routing chooses, one layer
            ahead; n layers ahead it is this to the power of n.
    """

    gen: int | None = None
    requests: int | None = None
    padded: bool = False
    seed: int = 0
    beams: int = 1
    routing: RoutingGiven | None = None
    routing_settings: Mapping[str, Any] | None = None
    preview_accuracy: float = PREVIEW_ACCURACY


class WorkloadKeywords(TypedDict, total=False):
    """Keywords of WorkloadOptions."""

    gen: int | None
    requests: int | None
    padded: bool
    seed: int
    beams: int
    routing: RoutingGiven | None
    routing_settings: Mapping[str, Any] | None
    preview_accuracy: float


@dataclass(frozen=True, kw_only=True)
class SimulationOptions(PlannedOptions, FormatOptions, WorkloadOptions, OutputOptions):
    """The options of `simulate_model`.

    Attributes:
        nodes: number of equal machines that share the model's experts; None for one.
        network: the network between them: a name of `moesched list networks`, a TOML file, or a Network; None for
            the machine's own.
        band: simulate the first batch some twenty times more, for the band of the figures.
        explained: find the bottleneck of the first batch, and what would help, a faster policy included: `bottleneck`
            and `helps` of the report.
    """

    nodes: int | None = None
    network: Network | str | None = None
    band: bool = True
    explained: bool = False


class SimulationKeywords(
    SettingKeywords,
    SizeKeywords,
    MachineKeywords,
    CutKeywords,
    FormatKeywords,
    WorkloadKeywords,
    OutputKeywords,
    total=False,
):
    """Keywords of SimulationOptions that have a default."""

    nodes: int | None
    network: Network | str | None
    band: bool
    explained: bool
