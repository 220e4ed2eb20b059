"""Runs of small models on the lagging device, in every way in which a batch can run, and on the CPU for the bits.

The module needs the folder of tests on its path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace

from benchmarks.shared.small_runs import PAGE_LOCKED, THREE_TIERS, TWO_MEMORIES, fast_memory, same_bits
from moesched.devices.lagging.device import LaggingDevice, LaggingGpu
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.models.checkpoint import Checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import WeightLayout
from moesched.models.tensor_parallel import cut_checkpoint, cut_config
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.requests.sampling import Sampling
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.seams import Observer
from moesched.steps.plan import Plan
from moesched.trace import Recorder
from moesched.transports.inproc import InprocTransport
from odd_models import MIXTRAL, PROMPTS, layout_of, stored
from policies_for_two_memories import POLICIES, STREAM_MOST

Settings = Mapping[str, int]

EVEN = MIXTRAL.varied(intermediate=88, heads=4, kv_heads=2, vocabulary=98)
"""A model that two ranks can share; each of them streams its half."""

BY_LAYERS = {"cgopipe", "cpu_ffn", "flexgen"}
"""Policies that divide a KV cache by layers."""

LOCKED = {"cgopipe", "fastdecode", "layer_split", "twiddler"}
"""Policies that copy from page-locked memory only, so that no thread waits for a copy."""

OVER_NODES: list[tuple[str, dict[str, int]]] = [
    (policy, {"decentralised": decentralised})
    for policy in ("ep_naive", "ep_busy_full", "ep_router_aided", "ep_balanced")
    for decentralised in (True, False)
]
"""Policies that share experts among nodes."""


HOST_TOO_SMALL = {"cpu_ffn", "layer_split", "twiddler", "twiddler_makespan", "lru_offload"}
"""Policies that keep more weights in the host's memory than the machine with a disk has room for."""

BY_TIME = {"hybrimoe", "frequency_cache"}
"""Policies that decide by times, which differ between ranks."""


class Way(NamedTuple):
    """A way in which a batch runs.

    Attributes:
        chunk: tokens of a chunk of prefill; None for whole prompts.
        prompts: by default several, in micro-batches of two.
        kv_on_gpu: share of a KV cache's layers that is on the GPU; None for what a policy chooses.
        map_files: whether the GPU may copy weights from the page cache.
    """

    machine: Machine = TWO_MEMORIES
    beams: int = 1
    chunk: int | None = None
    ranks: int = 1
    nodes: int = 1
    prompts: Sequence[Sequence[int]] = PROMPTS
    kv_on_gpu: float | None = None
    map_files: bool = True


WAYS = {
    "whole prompts": Way(),
    "prompts in chunks": Way(chunk=4),
    "beams": Way(beams=3),
    "beams after chunks": Way(beams=2, chunk=4),
    "weights on the disk": Way(machine=THREE_TIERS),
    "weights in mapped files": Way(machine=PAGE_LOCKED),
    "weights in registered memory": Way(machine=PAGE_LOCKED, map_files=False),
    "a KV cache by layers": Way(prompts=[list(range(1, 40))], kv_on_gpu=1 / 3),
    "two ranks": Way(ranks=2),
    "two nodes": Way(nodes=2),
    "three nodes": Way(nodes=3),
}


class Case(NamedTuple):
    """A policy, and the way in which its batch runs."""

    policy: str
    settings: Settings
    way: str

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Its name, without settings that all cases of the policy have."""
        central = ", centralised" if self.settings.get("decentralised") is False else ""
        return f"{self.policy.rpartition(':')[2]}{central}, {self.way}"


CASES = [
    Case(policy, settings, way)
    for way, how in WAYS.items()
    for policy, settings in (POLICIES if how.nodes == 1 else OVER_NODES)
    if not (how.machine is THREE_TIERS and policy in HOST_TOO_SMALL)
    and not (how.kv_on_gpu is not None and policy not in BY_LAYERS)
    and not (how.ranks > 1 and policy in BY_TIME)
]


class Ended(NamedTuple):
    """A batch that ended.

    Attributes:
        logits: of each sequence in all its steps (steps, V), float32.
        plans: one for each rank or node.
    """

    tokens: list[list[int]] | None
    logits: dict[int, torch.Tensor]
    plans: list[Plan]

    @property
    def streamed_pages(self) -> int:
        """Pages of the weights that were not kept in fast memory, of all ranks or nodes."""
        return sum(
            len(plan.nodes.pages(plan.layout)) - sum(len(kept.slots) for kept in plan.weights.resident)
            for plan in self.plans
        )

    def has_bits_of(self, other: Ended) -> bool:
        """Compare tokens and logits to the bit."""
        return (
            self.tokens == other.tokens
            and self.logits.keys() == other.logits.keys()
            and all(same_bits(rows, other.logits[sequence]) for sequence, rows in self.logits.items())
        )


class Size(NamedTuple):
    """The size of a batch; its prompts are by default those of the way."""

    prompts: Sequence[Sequence[int]] | None = None
    new_tokens: int = 4
    micro_batch_size: int = 2


SMALL = Size()


class Models(NamedTuple):
    """The models that runs use."""

    odd: Checkpoint
    even: Checkpoint

    @classmethod
    def stored(cls, folder: Path, **changes: int) -> Models:
        """Models of random weights, written below a folder."""
        return cls(
            stored(MIXTRAL.varied(**changes), folder / "odd"),
            stored(EVEN.varied(**changes), folder / "even"),
        )


class Team:
    """The devices that run batches in one way, one after the other.

    Args:
        make: makes a device.
    """

    def __init__(
        self, models: Models, way: Way, make: Callable[[Checkpoint, WeightLayout], TorchDevice]
    ) -> None:
        self._way = way
        count = way.ranks * way.nodes
        transport = InprocTransport(count) if count > 1 else None
        self.devices: list[TorchDevice] = []
        for number in range(count):
            checkpoint, layout = _share(models, way, number)
            self.devices.append(make(checkpoint, layout))
            if transport is not None:
                self.devices[-1].join(number, transport, self.devices[0])

    def run(
        self,
        policy: str,
        settings: Settings,
        size: Size = SMALL,
        observers: Sequence[Observer] = (),
        recorder: Recorder | None = None,
    ) -> Ended:
        """Run a batch; the devices stay open."""
        ranks = [self._rank(number, policy, settings, size) for number in range(len(self.devices))]
        for device in self.devices:
            device.logits.clear()
        first, *peers = ranks
        report = run(
            first.plan,
            first.policy,
            first.device,
            size.prompts or self._way.prompts,
            sampling=Sampling(beams=self._way.beams, temperature=0),
            observers=observers,
            recorder=recorder,
            peers=peers,
            keep_open=True,
        )
        if report.failure:
            raise RuntimeError(report.failure)
        return Ended(report.tokens, _by_sequence(self.devices[0]), [each.plan for each in ranks])

    def planned(self, policy: str, settings: Settings, size: Size = SMALL) -> list[Plan]:
        """The plan of each rank or node for a batch."""
        return [self._rank(number, policy, settings, size).plan for number in range(len(self.devices))]

    def close(self) -> None:
        """Close the devices."""
        for device in self.devices:
            device.close()

    def _rank(self, number: int, policy: str, settings: Settings, size: Size) -> Rank:
        device, way = self.devices[number], self._way
        shared = {} if way.kv_on_gpu is None or policy == "resident" else {"kv_on_gpu": way.kv_on_gpu}
        prompts = size.prompts or way.prompts
        batch = replace(
            split_batch([len(prompt) for prompt in prompts], size.new_tokens, size.micro_batch_size),
            beams=way.beams,
            prefill_chunk=way.chunk,
        )

        def planned(budgets: Mapping[str, int]) -> Rank:
            made, place = make_policy(policy, {**settings, **shared}), (way.nodes, number % way.nodes)
            plan = plan_run(way.machine, device.layout, batch, made, budgets, device.slot_bytes, *place)
            return Rank(plan, made, device)

        budgets = {} if way.nodes > 1 else fast_memory(device, way.machine, batch, 2.0)
        return _smallest(planned, budgets) if policy in STREAM_MOST else planned(budgets)


def on_gpu(models: Models, way: Way, gpu: LaggingGpu) -> Team:
    """The devices on imitated GPUs."""
    return Team(
        models,
        way,
        lambda checkpoint, layout: LaggingDevice(
            checkpoint, layout, keep_logits=True, map_files=way.map_files, gpu=gpu
        ),
    )


def on_cpu(models: Models, way: Way) -> Team:
    """The devices on the CPU."""
    return Team(
        models,
        way,
        lambda checkpoint, layout: TorchDevice(checkpoint, layout, keep_logits=True, kernel="torch"),
    )


def expected(models: Models, case: Case, size: Size = SMALL) -> Ended:
    """A case's batch on the CPU: with all weights in memory, or over nodes, which sums depend on, by its policy."""
    way = WAYS[case.way]
    team = on_cpu(models, way)
    policy, settings = ("resident", {}) if way.nodes == 1 else (case.policy, case.settings)
    ended = team.run(policy, settings, size)
    team.close()
    return ended


def over_budget(ended: Ended, gpu: LaggingGpu, nodes: int = 1) -> Iterator[str]:
    """GPUs whose tensors had more bytes than the plans say."""
    for number, memory in enumerate(gpu.memories):
        plans = ended.plans if nodes > 1 else [ended.plans[number]]
        planned = sum(plan.memory("accelerator").used for plan in plans)
        if memory.most_wanted > planned:
            yield f"GPU {number}: {memory.most_wanted} bytes, planned {planned}"


def _smallest(planned: Callable[[Mapping[str, int]], Rank], budgets: Mapping[str, int]) -> Rank:
    """The plan in the smallest memory that a policy takes, to a thousandth: it streams as much as it can."""
    ((memory, most),) = budgets.items()
    rank, least = planned(budgets), 0
    while most - least > budgets[memory] // 1000:
        middle = (least + most) // 2
        try:
            rank, most = planned({memory: middle}), middle
        except BadInput:
            least = middle
    return rank


def _share(models: Models, way: Way, number: int) -> tuple[Checkpoint, WeightLayout]:
    if way.ranks == 1:
        return models.odd, _layout(models.odd.config)
    config = cut_config(models.even.config, way.ranks)
    return cut_checkpoint(models.even, number, way.ranks), _layout(config)


def _layout(config: ModelConfig) -> WeightLayout:
    return layout_of(config, "float32")


def _by_sequence(device: TorchDevice) -> dict[int, torch.Tensor]:
    rows: dict[int, list[torch.Tensor]] = {}
    for sequences, logits_SV in device.logits:
        for sequence, row in zip(sequences, logits_SV, strict=True):
            rows.setdefault(sequence, []).append(torch.as_tensor(row))
    return {sequence: torch.stack(each) for sequence, each in rows.items()}
