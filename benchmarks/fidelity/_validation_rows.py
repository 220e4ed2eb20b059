"""Published rows as runs of the simulator: machine, model, policy, and the reason for each choice.

A row's measured figures are not among the inputs of its mapping: `mapped` sees the texts of a row only.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moesched.machines.build import Parts

HERE = Path(__file__).parent
ROWS = HERE / "measured_rows.csv"
FLASH_NEXT = str(HERE / "shapes" / "qwen3.8-flash-next")


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file; rates are as printed, and empty where none is.

    Attributes:
        use: "fit" may set rates, "predict" may not, "shown" may not and counts in no figure, since its error was
            estimated before it was added, "skip" cannot be expressed.
        tier: how sure it is that the figure was read right; A is the surest.
    """

    use: str
    tier: str
    model: str
    quant: str
    machine: str
    setting: str
    prefill_tok_s: str
    decode_tok_s: str
    source: str
    note: str

    def measured(self, figure: str) -> float | None:
        """The tokens per second of "prefill" or "decode"; None where none were measured."""
        text = self.prefill_tok_s if figure == "prefill" else self.decode_tok_s
        return float(text.split()[0]) if text else None


class Run(NamedTuple):
    """A simulated run.

    Attributes:
        options: keywords of `simulate_model`.
        popular: whether the policy knows how popular experts are; it then gets a profile of them.
        why: the reasons for what the row leaves open.
    """

    parts: Parts
    model: str
    policy: str
    prompt: int
    new_tokens: int
    why: str
    options: Mapping[str, Any]
    capacity: Mapping[str, str] = {}
    popular: bool = False


class Skipped(NamedTuple):
    """A row that cannot be expressed."""

    why: str


def published_rows() -> list[PublishedRow]:
    """All rows, in the order of the file."""
    with ROWS.open(newline="") as file:
        return [PublishedRow(**row) for row in csv.DictReader(file)]


def mapped(row: PublishedRow) -> Run | Skipped:
    """The run of a row, or the reason why there is none."""
    if row.use == "skip":
        return Skipped("the model's name is not published")
    for source, mapping in BY_SOURCE.items():
        if source in row.source:
            return mapping(row)
    raise ValueError(f"no mapping for the source {row.source!r}: add one to BY_SOURCE")


# -- sources ---------------------------------------------------------------------------------------------------------

SCHEDULED = {
    "random": ("random", None),
    "uniform": ("balanced", None),
    "frequency": ("popular", "popularity"),
}
FORMATS = {"Q4_K_M": "q4_k_m", "Q5_K_XL": "q5_k"}
LAPTOP_MEMORY = {"memory.host.capacity": "15.4GB", "memory.host.reserved": "2GB"}
UBATCH, LEAST_TOKENS, IK_LEAST_TOKENS = 512, 32, 32 * 256 // 8
"""Tokens of llama.cpp's physical batch, and those from which on it and ik_llama.cpp copy the host's experts."""


def _scheduled_experts(row: PublishedRow) -> Run:
    """A share of the experts stays on four GPUs, the host computes the others."""
    share = int(_found(r"(\d+) % of experts", row.setting))
    strategy = _found(r"placement (\w+)", row.setting)
    placement, routing = SCHEDULED[strategy]
    return Run(
        Parts(gpu="4x RTX 4090", cpu="Xeon Gold 6454S", ram="8xDDR5-4800 512GB"),
        "qwen3-next-80b-a3b",
        "twiddler",
        128,
        32,
        "Static placement, and the others on the CPU, is `twiddler`. The count of sockets and the RAM's speed are not "
        "given: one, and the CPU's fastest. The number of requests is not given: one. ShareGPT's popularity counts "
        "for `frequency` only, since other placements do not look at it.",
        {
            "format": "fp8",
            "settings": {"placement": placement, "experts": round(48 * 512 * share / 100)},
            "routing": routing,
        },
        popular=strategy == "frequency",
    )


def _large_on_cpu(_: PublishedRow) -> Skipped:
    return Skipped("sets the rate at which server CPUs read weights: a prediction would be circular")


def _layers_on_cpu(row: PublishedRow) -> Run | Skipped:
    """Experts of N layers on the CPU of a desktop."""
    quant = row.quant.split()[0]
    if quant not in FORMATS:
        return Skipped(f"no format {quant}")
    least = IK_LEAST_TOKENS if row.setting.startswith("ik") else LEAST_TOKENS
    return Run(
        Parts(gpu="RTX 5060 Ti 16GB", cpu="Ryzen 7 7700", ram="2x32GB DDR5-5200"),
        "qwen3.5-35b-a3b",
        "layer_split",
        512,
        32,
        "`-ncmoe N` is `layer_split` with the other layers on the GPU. llama.cpp copies the experts of the host's "
        "layers to the GPU for batches of 32 tokens and more; ik_llama.cpp does so from 32 tokens for each expert on, "
        "1,024 here (pull request 520), and computes smaller ones on the CPU. The host is not given: a desktop of its "
        "time. The prompt is not given: 512 tokens, one physical batch.",
        {
            "format": FORMATS[quant],
            "settings": {"gpu_layers": 40 - int(_found(r"ncmoe (\d+)", row.setting)), "copy_from": least},
            "prefill_chunk": UBATCH,
        },
    )


def _flash_next(row: PublishedRow) -> Run:
    """Experts of N of 48 layers on the CPU of a rented host."""
    on_cpu = re.search(r"-ncmoe (\d+)", row.setting)
    gpus = int(_found(r"(\d)x3090", row.setting))
    return Run(
        Parts(gpu="RTX 3090", cpu="EPYC 7542", ram="8xDDR4-3200 256GB"),
        FLASH_NEXT,
        "layer_split",
        512,
        32,
        "The shape is that of public configurations, as far as the formulas have it: the table of n-grams, which is "
        "looked up, and the streams of residuals are left out. The host is not given: an EPYC of the 3090's time with "
        "all channels. `-ncmoe N` is `layer_split`, which copies experts to the GPU for 32 tokens and more. Two GPUs "
        "take turns in llama.cpp: they count as one with both memories. The prompt is not given: 512 tokens, one "
        "physical batch of llama.cpp.",
        {
            "format": "q4_k_m",
            "settings": {"gpu_layers": 48 - int(on_cpu[1]) if on_cpu else 0},
            "prefill_chunk": UBATCH,
        },
        capacity={"memory.gpu.capacity": f"{24 * gpus}GB"},
    )


def _large_ubatch(row: PublishedRow) -> Run:
    """All experts on a desktop's host, a long prompt in large physical batches."""
    return Run(
        Parts(gpu="Radeon AI PRO R9700", cpu="Ryzen 9 9900X", ram="2x64GB DDR5-5600"),
        FLASH_NEXT,
        "layer_split",
        int(_found(r"prompt (\d+)", row.setting)),
        2,
        "The shape as for the RTX 3090. All is given but the RAM's speed: the CPU's fastest.",
        {
            "format": "q4_k_m",
            "settings": {"gpu_layers": 0},
            "prefill_chunk": int(_found(r"-ub (\d+)", row.setting)),
        },
    )


def _laptop(row: PublishedRow) -> Run:
    """Weights from a disk, into a cache of experts or the page cache."""
    mapped_file = "mmap" in row.setting
    limited = "8 GB" in row.setting
    return Run(
        Parts(cpu="Ryzen 5 7430U", ram="2x8GB DDR4-3200", disk="0.9GB/s" if mapped_file else "3GB/s"),
        "gemma-4-26b-a4b" if row.model.startswith("Gemma") else "qwen3.6-35b-a3b",
        "expert_cache" if mapped_file else "lru_offload",
        32,
        16,
        "A cache of experts is `lru_offload`, one for each layer. The page cache is one for all layers: `expert_cache`."
        " The disk is not given: 3 GB/s, as of PCIe 3.0; faults read 128 KB at a time, 100 us to begin, which is "
        "0.9 GB/s. Without a limit the system keeps 2 of 15.4 GB. The prompt is not given: 32 tokens.",
        {
            "format": "q4_k_m",
            "budgets": {"host": "8GB"} if limited else {},
            "routing": "popularity",
        },
        capacity=LAPTOP_MEMORY,
    )


def _unified(row: PublishedRow) -> Run:
    """A batch on a chip whose memory holds the model."""
    batch = int(_found(r"B=(\d+)", row.setting))
    return Run(
        Parts(chip="M2 Ultra", ram="192GB"),
        "gpt-oss-20b",
        "resident",
        512,
        32,
        "The model fits: `resident`, with all requests in one kernel.",
        {"format": "mxfp4", "batch_size": batch, "micro_batch_size": batch},
    )


def _service(_: PublishedRow) -> Skipped:
    return Skipped("a service on many GPUs: how its experts are spread, and its batches, are not published")


BY_SOURCE: dict[str, Callable[[PublishedRow], Run | Skipped]] = {
    "experts-sched-Tutorial": _scheduled_experts,
    "DeepseekR1_V3_tutorial": _large_on_cpu,
    "ik_llama.cpp#1593": _layers_on_cpu,
    "llama.cpp#27742": _flash_next,
    "llama.cpp#28414": _large_ubatch,
    "moe-stream": _laptop,
    "mac-m2-ultra": _unified,
    "InferSim": _service,
}
"""By a part of the source's name."""


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{text!r} has no {pattern!r}")
    return match[1]
