"""Options of jobs: the keywords of `run_model`, `simulate_model` and `run_cluster`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from moesched.inputs.defaults import MACHINE, NEW_TOKENS, POLICY, PREVIEW_ACCURACY
from moesched.inputs.options import (
    DETAILS,
    NODES,
    ROUTING,
    BandOptions,
    BudgetOptions,
    ChoiceOptions,
    CutOptions,
    CutPromptsOptions,
    DeviceOptions,
    DTypeOptions,
    FormatOptions,
    MachineChanges,
    MachineOptions,
    ModelOptions,
    NodesOptions,
    PolicyOptions,
    SizeOptions,
    WeightsOptions,
    WorkloadOptions,
)
from moesched.options import Option, Options
from moesched.requests.sampling import Beams, Sampling

if TYPE_CHECKING:
    from moesched.inputs.chosen_policy import PolicyGiven
    from moesched.inputs.prompts import Prompt
    from moesched.routing.sources import RoutingGiven
    from moesched.runs.listeners import Listener
    from moesched.seams import Policy, Transport

CLUSTER = "Cluster"
OUTPUT = "Output"
"""Headings of options in `--help`."""
LAST_HEADINGS = (OUTPUT, ROUTING, NODES, DETAILS)
"""The headings at the end of the help of every command, in this order; the others follow the options."""


class TraceOptions(Options):
    """Option `trace`: the file to write a trace to."""

    trace: Annotated[
        Path | str | None,
        Option(
            "Write a trace for ui.perfetto.dev; gzipped when the name ends in .gz.",
            "OUT",
            group=OUTPUT,
            writes="trace",
            numbered=True,
        ),
    ] = None


class OutputOptions(TraceOptions):
    """Options for a job's trace, its HTML report, and the listener that follows its progress."""

    html: Annotated[
        Path | str | None,
        Option("File to write a report to look at; those of later batches get a number, too.", flag=""),
    ] = None
    listener: Annotated[Listener | None, Option("Notified of the job's progress.", flag="")] = None


class PromptsOptions(Options):
    """Option `prompts`: the texts or token ids to run."""

    prompts: Annotated[Sequence[Prompt], Option("Texts, or token ids.", flag="")] = field(kw_only=False)


class LimitOptions(Options):
    """Option `max_new_tokens`: the largest number of tokens to generate for each prompt."""

    max_new_tokens: Annotated[int, Option("Tokens to generate for each prompt, at most.", "N", ge=1)] = (
        NEW_TOKENS
    )


class GenerationOptions(LimitOptions):
    """Options for the generated tokens: their number, and how they are chosen."""

    sampling: Annotated[
        Sampling | None,
        Option("Settings for choosing the next token; None for the likeliest one."),
    ] = None


class HelpsOptions(Options):
    """Option `explained`: whether to find the bottleneck of a job, and the changes that would make it faster."""

    explained: Annotated[
        bool,
        Option(
            "Omit the bottleneck and what would help, which take several replays.",
            flag="--no-helps",
            python="Find the bottleneck of the first batch, and what would help: `bottleneck` and `helps` of the "
            "report.",
            group=DETAILS,
        ),
    ] = False


class PlannedOptions(PolicyOptions, SizeOptions, BudgetOptions, DTypeOptions, CutOptions, MachineOptions):
    """Options that determine a plan, whether a run or a prediction carries it out: policy, sizes, budgets, machine."""


class BestPolicyOptions(ChoiceOptions):
    """Option for the policy, which the planner chooses if none is named."""

    policy: Annotated[
        PolicyGiven,
        Option(
            "A name of `moesched list policies`, file.py:Class, or package.module:Class (also in the current folder). "
            "By default the planner's choice.",
            "P",
            python="A name of `moesched list policies`, module:Class, file.py:Class, a class, or an object, which is "
            "copied for each batch; by default auto, the planner's choice.",
        ),
    ] = POLICY


class CostOptions(Options):
    """Option `foreign_machine`: whether to accept a machine file whose costs were measured on another processor."""

    foreign_machine: Annotated[
        bool, Option("Accept a machine file whose costs were measured on another processor.", group=DETAILS)
    ] = False


class AloneOptions(HelpsOptions, BandOptions, CostOptions, CutOptions):
    """Options of a run that shares its experts with no other process."""


class GeneratedOptions(
    OutputOptions,
    DeviceOptions,
    SizeOptions,
    BudgetOptions,
    GenerationOptions,
    DTypeOptions,
    PolicyOptions,
    WeightsOptions,
):
    """Options of every job that generates text, in one process or in several."""


class SessionOptions(CostOptions, DeviceOptions, PlannedOptions, WeightsOptions):
    """The options of `Session`, which hold for all its calls."""

    policy: Annotated[
        PolicyGiven,
        Option(
            "A name of `moesched list policies`, module:Class, file.py:Class, or a class; auto for the planner's "
            "choice, which the first call makes and later ones keep.",
            "P",
        ),
    ] = "resident"


class CallOptions(HelpsOptions, BandOptions, OutputOptions, GenerationOptions, PromptsOptions):
    """The options of one call of `Session.run`, which generates text for a list of prompts."""

    expect: Annotated[
        bool,
        Option(
            "Predict each batch after it ran, if the machine is calibrated: `expected` of the report.",
            flag="",
        ),
    ] = False


class RunOptions(CallOptions, SessionOptions):
    """The options of `run_model`."""


class TransportOptions(Options):
    """Option `transport`: the transport of exchanges between nodes."""

    transport: Annotated[
        str | type[Transport],
        Option("Transport of the nodes' exchanges: a name of `moesched list transports`.", "T", group=NODES),
    ] = "zeromq"


class ProcessesOptions(TransportOptions):
    """Option for the number of processes on this machine among which a model's experts are divided."""

    nodes: Annotated[
        int | None,
        Option(
            "Share the experts among N processes on this machine, each with its own cores; needs a policy for several "
            "nodes, such as ep_router_aided.",
            "N",
            flag="--local",
            ge=1,
            le=64,
            group=NODES,
        ),
    ] = None


class HostsOptions(TransportOptions):
    """Options for the machines of a cluster file that share a model."""

    cluster_file: Annotated[
        Path,
        Option(
            "Cluster file with nodes, addresses and keys: see docs/cluster.md.",
            "FILE",
            flag="--hosts",
            group=CLUSTER,
        ),
    ]
    key: Annotated[
        Path | None,
        Option("Secret key file. By default ~/.moesched/moesched.secret.", "FILE", group=CLUSTER),
    ] = None


class ClusterOptions(TransportOptions, PromptsOptions, GeneratedOptions):
    """Options that `run_cluster` and `run_local` share. Machine, budgets and device apply to each of the nodes."""

    policy: Annotated[
        str | type[Policy],
        Option(
            "A policy for several nodes: a name of `moesched list policies`, module:Class, file.py:Class, or a class."
        ),
    ]
    machine: str = MACHINE


class ProbeOptions(DeviceOptions, SizeOptions, BudgetOptions, DTypeOptions, PolicyOptions):
    """Options of a run whose routing or activations are observed; its default policy needs little memory."""

    policy: Annotated[
        PolicyGiven,
        Option(
            "Policy to run under; the choices are the same under every policy. See `moesched run`.",
            "P",
            python="As `run_model` takes it; the choices are the same under every policy.",
        ),
    ] = "expert_streaming"


class ProfiledRun(LimitOptions, ProbeOptions):
    """Options of a run whose choices of experts are recorded."""

    progress: Annotated[
        Callable[[int, int], object] | None,
        Option(
            "Called with the number of choices so far (tokens times layers) and the largest possible number.",
            flag="",
        ),
    ] = None


class ProfilingOptions(PromptsOptions, ProfiledRun, WeightsOptions):
    """The options of `profile_routing`."""


class SparsityRun(ProbeOptions):
    """Options of a run whose activations near zero are counted."""

    seed: Annotated[int, Option("Seed of the random token ids.")] = 0
    progress: Annotated[
        Callable[[int, int], object] | None,
        Option("Called with the number of values counted and the total.", flag=""),
    ] = None


class SparsityOptions(SparsityRun, WeightsOptions):
    """The options of `sparsity_of`."""

    prompts: Annotated[
        Sequence[Prompt] | None,
        Option(
            "Texts, or token ids; by default random ids. A trained model may behave differently on text.",
            flag="",
        ),
    ] = field(default=None, kw_only=False)


class RoutingOptions(Options):
    """Options for the experts that tokens choose."""

    routing: Annotated[
        RoutingGiven | None,
        Option(
            "Source of each token's experts: uniform, popularity (as uneven as Mixtral 8x7B), zipf, or a file: counts "
            "(.csv) or a trace (.npz) from `moesched profile-routing`, vLLM's routed experts (.npy, .npz), Megatron's "
            "router trace (.jsonl), or a CSV of layer,token,experts. By default uniform.",
            "NAME|FILE",
            python="A routing profile or trace (docs/routing.md), or a file with one, or uniform, popularity or zipf; "
            "None for uniform.",
            group=ROUTING,
        ),
    ] = None
    routing_settings: Annotated[
        Mapping[str, Any] | None,
        Option(
            "Setting of the routing, such as exponent=1.2 of zipf, or locality=0.5, the probability that a token "
            "repeats the experts of the token before it; repeatable.",
            "KEY=VALUE",
            flag="--routing-set",
            group=ROUTING,
        ),
    ] = None


class RequestsOptions(Options):
    """Options for the number and the order of requests."""

    requests: Annotated[
        int | None,
        Option(
            "Number of requests; prompts repeat if needed. By default one full batch, or each listed prompt once.",
            "N",
            ge=1,
            le=1_000_000,
        ),
    ] = None
    padded: Annotated[bool, Option("Pad every prompt to the length of the longest one.", group=DETAILS)] = (
        False
    )
    seed: Annotated[int, Option("Seed of the order of the prompts and of the routing.", group=DETAILS)] = 0
    beams: Beams = 1


class PreviewOptions(Options):
    """Option `preview_accuracy`: the probability that a router preview names the right expert."""

    preview_accuracy: Annotated[
        float,
        Option(
            "Probability that a preview of the router one layer ahead names the right expert, from 0 to 1; N layers "
            "ahead it is P to the power of N. prefetch_gate uses previews.",
            "P",
            ge=0,
            le=1,
            group=ROUTING,
        ),
    ] = PREVIEW_ACCURACY


class ScenarioOptions(
    PlannedOptions,
    PolicyOptions,
    SizeOptions,
    BudgetOptions,
    DTypeOptions,
    PreviewOptions,
    RoutingOptions,
    RequestsOptions,
    WorkloadOptions,
    CutOptions,
    NodesOptions,
    MachineChanges,
    MachineOptions,
    FormatOptions,
    ModelOptions,
):
    """The options that determine a simulation, which are also the axes of sweeps."""


class SimulationOptions(
    BestPolicyOptions, CutPromptsOptions, OutputOptions, HelpsOptions, BandOptions, ScenarioOptions
):
    """The options of `simulate_model`."""
