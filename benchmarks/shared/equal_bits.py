"""Runs that have to give the logits of `resident` to the bit: models of odd sizes, ways to run them, and policies.

Tests take one model for each policy in each way, in turn; `exactness.py` takes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec

from benchmarks.shared.small_runs import ONE_MEMORY, THREE_TIERS, TWO_MEMORIES, Generated, generate, same_bits
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.models.config import ModelConfig
from moesched.plugins import make_policy
from odd_models import (
    CODED,
    CODED_IN_FIVE_BITS,
    DBRX,
    GLM,
    GPT_OSS,
    GRANITE,
    MINIMAX,
    MIXTRAL,
    OLMOE,
    PROMPTS,
    Reference,
    Streamed,
    name_of,
)

MORE_WEIGHTS = 1.5
"""The share of the weights that fast memory has room for, slots for two layers included, where less is too little."""

Model = tuple[ModelConfig, str]
"""A config and the dtype of the run."""
Settings = Mapping[str, Any]

SLOW_CPU = msgspec.structs.replace(
    TWO_MEMORIES,
    processors=TWO_MEMORIES.processors
    | {
        "cpu": msgspec.structs.replace(
            TWO_MEMORIES.processors["cpu"], flops={"float32": 1e9, "bfloat16": 1e9}
        )
    },
)
ROOMY_TIERS = msgspec.structs.replace(
    THREE_TIERS,
    memories=THREE_TIERS.memories
    | {"host": msgspec.structs.replace(THREE_TIERS.memories["host"], capacity="10MB")},
)


class Way(NamedTuple):
    """A device on a machine.

    kind: makes the device from a checkpoint and a layout.
    weights: the share of the weights that fast memory has room for.
    """

    name: str
    kind: Callable[..., Any]
    machine: Machine
    weights: float = 0.8


class EqualRun(NamedTuple):
    """A policy on a model, in some way."""

    model: Model
    way: Way
    policy: str
    settings: Settings

    @property
    def name(self) -> str:
        """In words."""
        return "-".join([name_of(self.model), self.way.name, self.policy, *map(str, self.settings.values())])

    def differs(self, reference: Reference) -> bool:
        """Test whether its tokens or logits differ from those of its model with all weights in memory."""
        device = self.way.kind(reference.checkpoint, reference.layout, keep_logits=True)
        try:
            found = self._generated(device, 1.0 if self.policy == "resident" else self.way.weights)
        except BadInput:  # two layers of a model with few of them, which are not alike, need more
            found = self._generated(device, MORE_WEIGHTS)
        if isinstance(device, Streamed):
            device.fake.close()
        wanted = reference.expected
        return found.tokens != wanted.tokens or not same_bits(found.logits_RSV, wanted.logits_RSV)

    def _generated(self, device: TorchDevice, weights: float) -> Generated:
        return generate(
            device,
            make_policy(self.policy, dict(self.settings)),
            self.way.machine,
            PROMPTS,
            new_tokens=4,
            micro_batch_size=2,
            weights=weights,
        )


class Grid(NamedTuple):
    """Models, ways and policies."""

    models: Sequence[Model]
    ways: Sequence[Way]
    policies: Sequence[tuple[str, Settings]]

    def whole(self) -> Iterator[EqualRun]:
        """Every policy in every way on every model."""
        for model, way, (policy, settings) in product(self.models, self.ways, self.policies):
            yield EqualRun(model, way, policy, settings)

    def in_turn(self) -> Iterator[EqualRun]:
        """Every policy in every way, on one of the models and with one of its settings: it meets all in turn."""
        for number, way in enumerate(self.ways):
            for place, policy in enumerate(dict.fromkeys(name for name, _ in self.policies)):
                its_settings = [settings for name, settings in self.policies if name == policy]
                model = self.models[(number + place) % len(self.models)]
                yield EqualRun(model, way, policy, its_settings[number % len(its_settings)])


SCHEDULES = Grid(
    # Every family, both dtypes of matrices that lie as they are used and of those that lie transposed (DBRX), and coded
    # ones.
    models=[
        (MIXTRAL, "float32"),
        (DBRX, "float32"),
        (CODED, "bfloat16"),
        (DBRX, "bfloat16"),
        (OLMOE, "bfloat16"),
        (MINIMAX, "bfloat16"),
        (GLM, "bfloat16"),
        (GPT_OSS, "bfloat16"),
        (GRANITE, "bfloat16"),
    ],
    ways=[
        Way("one memory", TorchDevice, ONE_MEMORY),
        Way("two memories", TorchDevice, TWO_MEMORIES),
        Way("two memories, streams", Streamed, TWO_MEMORIES),
        Way("three tiers", TorchDevice, THREE_TIERS),
    ],
    policies=[
        ("resident", {}),
        ("layer_streaming", {}),
        ("cgopipe", {}),
        ("expert_streaming", {}),
        ("fastdecode", {}),
        ("flexgen", {}),
        ("flexgen_cpu", {}),
        ("flexgen_synchronous", {}),
        ("three_tiers", {}),
        *[("adversarial", {"seed": seed}) for seed in range(2)],
    ],
)
EXPERTS = Grid(
    models=[
        (MIXTRAL, "float32"),
        (DBRX, "bfloat16"),
        (CODED_IN_FIVE_BITS, "bfloat16"),
    ],
    ways=[
        Way("one memory", TorchDevice, ONE_MEMORY, 1.4),
        Way("two memories", TorchDevice, TWO_MEMORIES),
        Way("two memories, a slow CPU", TorchDevice, SLOW_CPU),
        Way("two memories, streams", Streamed, SLOW_CPU),
        Way("three tiers", TorchDevice, ROOMY_TIERS),
    ],
    policies=[
        ("cpu_ffn", {}),
        ("cpu_ffn", {"kv_on_gpu": 0.5}),
        ("layer_split", {}),
        ("expert_cache", {}),
        ("expert_cache", {"experts": 3, "buffers": 1}),
        ("fate", {"offload_per_layer": 4, "buffers": 2}),
        ("frequency_cache", {"experts": 3}),
        ("hybrimoe", {"experts": 3}),
        ("least_stale", {"experts": 3}),
        ("lru_offload", {}),
        ("lru_offload", {"offload_per_layer": 4, "buffers": 1}),
        ("moe_gen", {}),
        ("prefetch_gate", {}),
        ("prefetch_gate", {"offload_per_layer": 4, "buffers": 2}),
        ("twiddler", {}),
        ("twiddler_makespan", {}),
        ("twiddler_makespan", {"experts": 4}),
    ],
)
"""Policies that decide where experts run."""


def all_runs() -> Iterator[EqualRun]:
    """Both grids, whole."""
    yield from SCHEDULES.whole()
    yield from EXPERTS.whole()
