"""Options that several jobs and commands share, as small classes from which a job's options are composed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from moesched.inputs.defaults import DEVICE, MACHINE, WORKLOAD
from moesched.options import Option, Options, part_of

if TYPE_CHECKING:
    from moesched.inputs.chosen_policy import PolicyGiven
    from moesched.inputs.prompts import Prompt
    from moesched.machines import Machine
    from moesched.machines.networks import Network
    from moesched.requests.workloads import Workload
    from moesched.seams import Device

SIZES = "Sizes and budgets"
ROUTING = "Choice of experts"
NODES = "Several accelerators or machines"
DETAILS = "Details"
"""Headings of options in the help; the options that most users need have none."""

MOST_NODES = 64

DType = Literal["float32", "bfloat16", "float16"]
Objective = Literal["throughput", "latency", "interactive"]
"""The figure that a plan optimises."""


class ModelOptions(Options):
    """Option `model`: a model by its name or files; its weights are not read."""

    model: Annotated[
        Path | str,
        Option(
            "A name of `moesched list models`, a folder with a config.json, or a GGUF file.",
            "NAME|PATH",
            flag="--model",
        ),
    ] = field(kw_only=False)


class WeightsOptions(Options):
    """Option `model`: the folder or GGUF file of a model with its weights."""

    model: Annotated[
        Path | str,
        Option(
            "Hugging Face folder with config.json, safetensors files and, for text, tokenizer.json; or a GGUF file.",
            flag="MODEL",
        ),
    ] = field(kw_only=False)


class FormatOptions(Options):
    """Option `format`: the storage format of the weights."""

    format: Annotated[
        str | None,
        Option(
            "Storage format of the weights: bf16, fp8, q8_0, q6_k, q5_k, q4_k_m, q4_0, mxfp4, int8 or int4, as far as "
            "the model's family has it. By default the one that the model is published in.",
            "FORMAT",
            group=DETAILS,
        ),
    ] = None


class MachineOptions(Options):
    """Option `machine`: the machine to plan for."""

    machine: Annotated[
        Machine | str,
        Option(
            "A name of `moesched list machines`, a TOML file, or auto for this one.",
            "NAME|FILE",
            python='A name of `moesched list machines`, a TOML file, "auto" for this one, or a Machine.',
        ),
    ]


class MachineChanges(Options):
    """Option `machine_set`: changes of the machine."""

    machine_set: Annotated[
        Mapping[str, str] | None,
        Option(
            "Change the machine: link.host->gpu=24GB/s, memory.gpu.capacity=24GB, processor.gpu.flops=x2 and the "
            "like; repeatable.",
            "WHAT=VALUE",
            python='Changes of the machine, such as {"link.host->gpu": "24GB/s", "processor.gpu.flops": "x2"}.',
            group=DETAILS,
        ),
    ] = None


class NodesOptions(Options):
    """Options for several equal machines that share a model's experts: their number and network."""

    nodes: Annotated[
        int | None,
        Option(
            "Number of these machines that share the model's experts.", "N", ge=1, le=MOST_NODES, group=NODES
        ),
    ] = None
    network: Annotated[
        Network | str | None,
        Option(
            "Network between the nodes: a name of `moesched list networks`, or a TOML file. By default the machine's "
            "own.",
            "NAME|FILE",
            group=NODES,
        ),
    ] = None


class CutOptions(Options):
    """Option `tensor_parallel`: the number of accelerators over which the model is split."""

    tensor_parallel: Annotated[
        int | None,
        Option(
            "Split the model over N of the machine's equal accelerators. By default over all of them.",
            "N",
            ge=1,
            group=NODES,
        ),
    ] = None


class DTypeOptions(Options):
    """Option `dtype`: the number format to compute in."""

    dtype: Annotated[
        DType | None,
        Option(
            "Number format to compute in. By default the model's own, and float16 on GPUs without bfloat16.",
            group=DETAILS,
        ),
    ] = None


class BudgetOptions(Options):
    """Option `budgets`: limits on the bytes in each memory."""

    budgets: Annotated[
        Mapping[str, int | str] | None,
        Option(
            "Limit on the bytes of weights, KV cache and buffers in a memory, such as host=600MB; repeatable. By "
            "default its whole size. Python and libraries need about 360 MB more; process=1GB limits the resident "
            "memory of the whole process, and pinned=8GB the page-locked memory of a machine with a GPU, through "
            "which weights are then copied.",
            "MEM=BYTES",
            flag="--budget",
            group=SIZES,
            python='Bytes of weights, KV cache and buffers by memory, as numbers or text such as "600MB"; by default '
            'the machine\'s capacity. A budget of a memory that accelerators share is for all of them. "process" '
            "instead of the host's memory limits the process's resident bytes, with Python and libraries. \"pinned\" "
            "limits the page-locked memory of a machine with a GPU: pages then pass through it.",
        ),
    ] = None


PREFILL_CHUNK = Option(
    "Most prompt tokens in one pass through a layer. Fewer need less memory; more use each transfer of weights for "
    "more tokens. By default all, or as many as fit.",
    "N",
    group=SIZES,
    ge=1,
    le=10**8,
)


class SizeOptions(Options):
    """Options for sizes of batches; the planner chooses those that are None."""

    batch_size: Annotated[
        int | None,
        Option("Requests that run together. By default as many as fit.", "N", group=SIZES, ge=1, le=65_536),
    ] = None
    micro_batch_size: Annotated[
        int | None,
        Option(
            "Requests that share a kernel. By default chosen by the planner.",
            "N",
            group=SIZES,
            ge=1,
            le=65_536,
        ),
    ] = None
    prefill_chunk: Annotated[int | None, PREFILL_CHUNK] = None

    @property
    def sizes(self) -> SizeOptions:
        """Copy of these sizes alone, without the further options of a subclass."""
        return SizeOptions(**part_of(self, SizeOptions))


class CutPromptsOptions(SizeOptions):
    """Sizes for requests that may join and leave; their prompts may be cut into parts, one part per step."""

    prefill_chunk: Annotated[
        int | None,
        replace(
            PREFILL_CHUNK,
            help=f"{PREFILL_CHUNK.help} Where requests join and leave, longer prompts are cut over steps: by default "
            "at 1,024 tokens if all weights stay in memory.",
        ),
    ] = None


class ChoiceOptions(Options):
    """Option `policy`: the policy, as a name, a class or an object."""

    policy: Annotated[
        PolicyGiven,
        Option(
            "A name of `moesched list policies`, file.py:Class, or package.module:Class (also in the current folder).",
            "P",
            python="A name of `moesched list policies`, module:Class, file.py:Class, a class, or an object, which is "
            "copied for each batch.",
        ),
    ]


class SettingOptions(Options):
    """Option `settings`: values of the policy's settings."""

    settings: Annotated[
        Mapping[str, Any] | None,
        Option(
            "Setting of the policy, such as ahead=3; repeatable.", "KEY=VALUE", flag="--set", group=DETAILS
        ),
    ] = None


class PolicyOptions(SettingOptions, ChoiceOptions):
    """Options for the policy and its settings."""


class DeviceOptions(MachineOptions):
    """Options for the device that computes, and the machine that the policy plans for."""

    device: Annotated[
        str | type[Device], Option("A name of `moesched list devices`, or file.py:Class.", "D")
    ] = DEVICE
    device_settings: Annotated[
        Mapping[str, Any] | None,
        Option(
            "Setting of the device, such as dilation=64 of the emulated one; repeatable.",
            "KEY=VALUE",
            flag="--device-set",
            group=DETAILS,
        ),
    ] = None
    machine: Annotated[
        Machine | str,
        Option(
            "Machine that the policy plans for: a name of `moesched list machines`, a TOML file, or auto for this one, "
            "as `moesched calibrate` measured it. With device emulated, any machine that has an accelerator.",
            "NAME|FILE",
        ),
    ] = MACHINE


class BandOptions(Options):
    """Option `band`: whether to predict the uncertainty of predicted figures."""

    band: Annotated[
        bool,
        Option(
            "Omit the bands of predicted figures, which take some twenty short runs.",
            flag="--no-band",
            python="Predict some twenty times more, for the band of the predicted figures.",
            group=DETAILS,
        ),
    ] = True


class WorkloadOptions(Options):
    """Options for the requests of a prediction: the workload, and the tokens to generate."""

    workload: Annotated[
        Workload | str | Sequence[Prompt] | None,
        Option(
            "A name of `moesched list workloads`, a TOML file, or a .jsonl prompts file as for `run`.",
            "NAME|FILE",
            python="A name of `moesched list workloads`, a TOML file, a Workload, or prompts as `run_model` takes "
            "them, as a list or in a .jsonl file.",
        ),
    ] = None
    gen: Annotated[
        int | None,
        Option(
            "Tokens to generate for each prompt. By default the workload's own number.", "N", ge=1, le=10**9
        ),
    ] = None


class PlanOptions(
    BandOptions,
    BudgetOptions,
    DTypeOptions,
    SettingOptions,
    WorkloadOptions,
    CutOptions,
    MachineChanges,
    MachineOptions,
    FormatOptions,
    ModelOptions,
):
    """The options of `plan_model`."""

    workload: Annotated[
        Workload | str,
        Option(
            "A name of `moesched list workloads`, or a TOML file.",
            "NAME|FILE",
            python="A name of `moesched list workloads`, a TOML file, or a Workload.",
        ),
    ] = WORKLOAD
    policy: Annotated[
        PolicyGiven | None,
        Option(
            "Plan for this policy alone: a name, or file.py:Class.",
            "P",
            python="As `simulate_model` takes it; None for the best of all that one machine can run.",
        ),
    ] = None
    objective: Annotated[
        Objective,
        Option(
            "The figure to be best in: tokens per second of a batch, the decode step of one request, or the time of "
            "one request's answer.",
            flag="--for",
        ),
    ] = "throughput"
    seed: Annotated[int, Option("Seed of the order of the prompts.")] = 0
    on_progress: Annotated[
        Callable[[str], object] | None,
        Option("Called with the name of each stage of the search.", flag=""),
    ] = None


class ClusterPlanOptions(
    BudgetOptions, DTypeOptions, NodesOptions, MachineChanges, MachineOptions, ModelOptions
):
    """The options of `plan_cluster`."""

    nodes: int = field()
    policy: Annotated[
        str | None,
        Option(
            'Placement to bound: "ep_router_aided" for the authors\', as in their Table 6, or "ep_balanced" for the '
            "optimiser's, with as many replicas as memory allows. By default the authors'.",
            "P",
        ),
    ] = None
