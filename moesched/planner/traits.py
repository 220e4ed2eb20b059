"""What a policy's plans are like, learned by having it plan: where its cache lies, what it keeps, what batches cost.

Nothing here knows a policy by name, so that a user's own is planned for like those that ship.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

import msgspec
from msgspec.structs import replace

from moesched.batching import Sizes, batch_of
from moesched.engine import Engine
from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.models.layout import Page, WeightLayout
from moesched.plan import Batch, Plan
from moesched.runs import make_lanes, plan_run
from moesched.schedule import Schedule
from moesched.seams import CostModel, Policy
from moesched.tasks import Work

UNLIMITED = 1 << 60
MANY = 5
"""So many micro-batches share the rooms of those that are within a layer: from then on each costs the same bytes."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is planned for.

    Attributes:
        make: makes the policy, anew for each plan.
        lengths: prompt lengths in tokens, of as many requests as a batch may have.
        budgets: bytes by memory; the machine's capacities where nothing is said.
        slot_bytes: what a page takes in a slot of the device at hand.
        beams: sequences that each request has in decode.
    """

    make: Callable[[], Policy]
    machine: Machine
    layout: WeightLayout
    lengths: tuple[int, ...]
    new_tokens: int
    cost: CostModel
    budgets: dict[str, int]
    slot_bytes: Callable[[Page], int] | None = None
    beams: int = 1

    def batch(self, micro_batches: int, size: int) -> Batch:
        """So many full micro-batches of the first requests; the last one takes what there is."""
        lengths = self.lengths[: micro_batches * size]
        return batch_of(lengths, self.new_tokens, Sizes(len(lengths), size, beams=self.beams))

    def plan(self, batch: Batch, budgets: dict[str, int] | None = None) -> tuple[Plan, Policy]:
        """The policy's plan of a batch.

        Raises:
            BadInput: it does not fit; the message says by how many bytes, of what.
        """
        policy = self.make()
        budgets = self.budgets if budgets is None else budgets
        return plan_run(self.machine, self.layout, batch, policy, budgets, self.slot_bytes), policy

    def capacity(self, memory: str) -> int:
        """The bytes that may be used of a memory."""
        return self.budgets.get(memory, self.machine.memories[memory].nbytes)


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """How a policy uses memories, whatever the batch.

    Attributes:
        attention_on_gpu: A_g of MoE-Lightning, for decode.
        kv_on_gpu: whether the KV cache lies in the accelerator's memory.
        keeps: the most of the weights' bytes that it keeps there, from 0 to 1.
        streams: whether it can do with less than that.
        buffer: bytes of an accelerator's buffer for each byte of a layer that streams.
        fetch: seconds that the slowest link on the way takes for all weights of a layer.
        stages: how many accelerators it makes a pipeline of.
    """

    attention_on_gpu: bool
    kv_on_gpu: bool
    keeps: float
    streams: bool
    buffer: float
    fetch: float
    stages: int = 1


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One size of micro-batches: what each costs, in seconds of a layer and in bytes.

    Attributes:
        size: requests of a micro-batch, µ.
        most: how many micro-batches of them there may be.
        link, host, accelerator: seconds of each lane for one layer of a decode step in the middle of the generation,
            without the weights. The stages of a pipeline work at once, on a layer each.
        prefill: seconds of the accelerator for one layer of the prefill, likewise.
        fixed, each: bytes by memory of the first micro-batch, with what several share, and of every other one.
    """

    size: int
    most: int
    link: float
    host: float
    accelerator: float
    prefill: float
    fixed: dict[str, int]
    each: dict[str, int]


def learn(setting: Setting) -> Traits:
    """The traits of the setting's policy.

    Raises:
        BadInput: it plans nothing at all.
    """
    batch = setting.batch(1, 1)
    unlimited = dict.fromkeys(setting.machine.memories, UNLIMITED)
    roomy, _ = setting.plan(batch, unlimited)
    weights = _weight_bytes(roomy)
    kept = kept_bytes(roomy)
    fast = roomy.memory("accelerator")
    stages = len(roomy.stages)
    here = kept // stages
    half = unlimited | {fast.name: fast.used - here + here // 2}
    try:
        tight, _ = setting.plan(batch, half)
    except BadInput:
        tight = None
    streamed = 0 if tight is None else (_weight_bytes(tight) - kept_bytes(tight)) / len(tight.layers)
    pools = 0 if tight is None else _pool_bytes(tight)
    return Traits(
        attention_on_gpu=roomy.kv_role == "accelerator" or roomy.kv_slots > 0,
        kv_on_gpu=roomy.kv_role == "accelerator",
        keeps=kept / weights,
        streams=kept == 0 or tight is not None,
        buffer=pools / streamed if streamed else 0.0,
        fetch=max(_hop_seconds(roomy if tight is None else tight, setting.cost)),
        stages=stages,
    )


class Probe:
    """Plans of a few micro-batches of `size` average requests, with no limit to memory."""

    def __init__(self, setting: Setting, size: int) -> None:
        self.size = size
        self.most = -(-len(setting.lengths) // size)
        setting = replace(setting, lengths=(round(fmean(setting.lengths)),) * len(setting.lengths))
        unlimited = dict.fromkeys(setting.machine.memories, UNLIMITED)
        self._one, _ = setting.plan(setting.batch(1, size), unlimited)
        self._fixed = self._each = _used(self._one)
        if self.most > 1:
            count = min(self.most, MANY)
            fewer, more = (
                _used(setting.plan(setting.batch(n, size), unlimited)[0]) for n in (count - 1, count)
            )
            self._each = {memory: more[memory] - fewer[memory] for memory in more}
            self._fixed = {memory: more[memory] - (count - 1) * self._each[memory] for memory in more}

    def shape(self, cost: CostModel) -> Shape:
        """What micro-batches of this size cost."""
        link, host, accelerator, prefill = _layer_seconds(self._one, cost)
        stages = len(self._one.stages)
        return Shape(
            size=self.size,
            most=self.most,
            link=link / stages,
            host=host,
            accelerator=accelerator / stages,
            prefill=prefill / stages,
            fixed=self._fixed,
            each=self._each,
        )


def kept_bytes(plan: Plan) -> int:
    """Bytes of the weights that stay in the accelerators' memories."""
    fast = plan.accelerators
    return sum(slot.nbytes for kept in plan.kept if kept.memory in fast for slot in kept.slots)


def _weight_bytes(plan: Plan) -> int:
    return sum(map(plan.slot_bytes, plan.layout.pages))


def _pool_bytes(plan: Plan) -> int:
    fast = plan.memory("accelerator")
    return sum(slot.nbytes for pool in plan.pools if pool.memory is fast for slot in pool.slots)


def _used(plan: Plan) -> dict[str, int]:
    """Bytes by memory of all but the weights that stay and the slots that the others pass through.

    Of several accelerators that count for one, whose name is the first one's, it is the one that needs the most.
    """
    used = {name: memory.used for name, memory in plan.memories.items()}
    for pool in (*plan.kept, *plan.pools):
        used[pool.memory.name] -= sum(slot.nbytes for slot in pool.slots)
    first, *others = (memory.name for memory in plan.accelerators)
    used[first] = max([used[first], *(used.pop(name) for name in others)])
    return used


def _hop_seconds(plan: Plan, cost: CostModel) -> list[float]:
    """Seconds that each link between the weights' home and the accelerator takes for a layer, page by page."""
    lanes = make_lanes(plan)
    schedule = Schedule(plan, Engine(lanes.values()), lanes)
    roles = plan.machine.roles
    fast = [memory.name for memory in plan.accelerators]
    by_way_of = {pool.memory.name for pool in plan.pools} - {*fast}
    stops = [roles.weights, *by_way_of, fast[0]]
    pages = plan.layout.layer(0)
    return [
        sum(cost.work(schedule.move(source, target, page.nbytes)[1]).seconds for page in pages)
        for source, target in pairwise(stops)
        if source != target
    ] or [0.0]


def _layer_seconds(plan: Plan, cost: CostModel) -> tuple[float, float, float, float]:
    """Seconds of link, host and accelerator for a micro-batch in one layer of a decode step, and of its prefill."""
    lanes = make_lanes(plan)
    schedule = Schedule(plan, Engine(lanes.values()), lanes)
    batch = schedule.micro_batches[0]

    def seconds(works: Sequence[Work]) -> float:
        return sum(cost.work(work).seconds for work in works)

    schedule.size(0)
    works = batch.works
    prefill = seconds([works["pre_attention"], works["attention"], works["post_attention"]])
    schedule.size(max(1, plan.batch.new_tokens // 2))
    works = batch.works
    accelerator = seconds([works["pre_attention"], works["post_attention"]])
    if plan.kv_role == "accelerator":
        return 0.0, 0.0, accelerator + seconds([works["attention"]]), prefill
    if plan.kv_slots:
        link = [works["load_kv"]] if "load_kv" in works else []
        return seconds(link), 0.0, accelerator + seconds([works["attention"]]), prefill
    link = [] if schedule.unified else [works["load_hidden"]]
    return seconds(link), seconds([works["cpu_attention"]]), accelerator, prefill
