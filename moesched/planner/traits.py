"""Finds a policy's traits from its plans: where its KV cache is, which weights stay, what micro-batches cost.

No policy is known by name here, so users' own policies are planned like those that ship.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as evolved
from itertools import pairwise
from statistics import fmean

import msgspec
from msgspec.structs import replace

from moesched.dispatch.kv_placement import evenly
from moesched.engine import Engine
from moesched.errors import BadInput
from moesched.machines.cost_model import CostModel
from moesched.planner.few_layers import probed
from moesched.planner.joint_experts import runs_experts_jointly
from moesched.planner.setting import UNLIMITED, Setting
from moesched.runs.planning import make_lanes
from moesched.steps.plan import Plan
from moesched.steps.reservations import Declared
from moesched.steps.roles import Role
from moesched.steps.run_state import RunState
from moesched.work import Work

MANY = 5
"""From this number of micro-batches on, each further one costs equal bytes, since they share the buffers of a layer."""

TIGHT_PLANS = 3
"""Largest number of plans, each with less memory than the one before, made to find a policy's smallest buffer."""


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """A policy's use of memories, for any batch.

    Attributes:
        attention_on_gpu, ffn_on_gpu: A_g and F_g of MoE-Lightning: whether the GPU computes attention and the FFN in
            decode. If the policy splits the KV cache, `attention_on_gpu` is for the part of the cache on the host.
        kv_on_gpu: whether all of the KV cache is in the accelerator's memory.
        keeps: largest share of the weights' bytes that stays in the accelerator's memory, from 0 to 1.
        streams: whether the policy can keep a smaller share than `keeps` in this memory, and fetch the other weights.
        buffer: bytes of the accelerator's streaming buffer for each byte of a layer's streamed weights.
        fetch: seconds that the slowest link takes for all weights of a layer; 0 if the FFN is not on the GPU, since the
            planner's bound on throughput leaves out fetches that only the prefill needs.
        stages: number of accelerators in the policy's pipeline.
        joint: whether an expert runs once for all micro-batches, so that its weights are read once.
    """

    attention_on_gpu: bool
    ffn_on_gpu: bool
    kv_on_gpu: bool
    keeps: float
    streams: bool
    buffer: float
    fetch: float
    stages: int = 1
    joint: bool = False


class MicroBatchCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one micro-batch.

    The stages of a pipeline compute at the same time, so the seconds of link, accelerator and prefill are divided by
    the number of stages. The seconds of the host are not, since all stages share it.

    Attributes:
        link, host, accelerator: seconds of each lane for one layer of a decode step in the middle of the generation,
            without fetches of weights.
        prefill: seconds of the accelerator for one layer of the prefill.
        nbytes: bytes of the micro-batch, by memory.
    """

    link: float
    host: float
    accelerator: float
    prefill: float
    nbytes: dict[str, int]


class SizeOption(msgspec.Struct, frozen=True, kw_only=True):
    """One size of micro-batches, with the costs of a micro-batch of this size.

    Attributes:
        size: requests of a micro-batch, µ.
        chunk: the largest number of tokens of a micro-batch that pass a layer together in prefill; None for no limit.
        most: largest number of micro-batches of that size.
        shared: bytes by memory that the micro-batches need together, independent of their number.
        each: cost of a micro-batch; if the policy splits the KV cache, with the cache on the host.
        resident: cost of a micro-batch whose cache is on the accelerator; None if the policy does not split the cache.
    """

    size: int
    most: int
    shared: dict[str, int]
    each: MicroBatchCost
    chunk: int | None = None
    resident: MicroBatchCost | None = None


class TraitProbe:
    """Finds the traits of a policy from plans with unlimited memory, and from plans in which not all weights fit.

    Attributes:
        few: whether plans of a few layers show the traits; a policy may refuse to plan so small a model.
        traits: the traits found.

    Raises:
        BadInput: the policy plans nothing at all.
    """

    def __init__(self, setting: Setting) -> None:
        batch = setting.batch(1, 1)
        unlimited = dict.fromkeys(setting.machine.memories, UNLIMITED)
        on_host = 0.0 if setting.splits_kv else None
        self.few = True
        try:
            roomy, _ = probed(setting).plan(batch, unlimited, on_host)
            setting = probed(setting)
        except BadInput:
            self.few = False
            roomy, _ = setting.plan(batch, unlimited, on_host)
        resident_share = resident_bytes(roomy)
        fast = roomy.memory("accelerator")
        stages = len(roomy.stages)
        least, tight = roomy, False
        left = 3 * resident_share // stages // 4
        # A ring has as many slots whether all or few of the pages pass through it.
        for _ in range(TIGHT_PLANS):
            try:
                short = unlimited | {fast.name: fast.used - resident_share // stages + left}
                least, _ = setting.plan(batch, short, on_host)
            except BadInput:
                break
            tight, left = True, round(_buffer(least) * weight_bytes(least) / len(least.layers))
        self._least = least
        self._ffn_on_gpu = not roomy.declared.experts_on_host
        self.traits = Traits(
            attention_on_gpu=roomy.kv.on_gpu == 1 or roomy.kv.slots > 0,
            ffn_on_gpu=self._ffn_on_gpu,
            kv_on_gpu=roomy.kv.on_gpu == 1,
            keeps=resident_share / weight_bytes(roomy),
            streams=resident_share == 0 or tight,
            buffer=_buffer(least),
            fetch=self.fetch_seconds(setting.cost),
            stages=stages,
            joint=setting.nodes == 1 and runs_experts_jointly(setting),
        )

    def fetch_seconds(self, cost: CostModel) -> float:
        """Return the slowest link's seconds for a layer's weights, by a cost model; 0 if the host computes the FFN."""
        return max(_hop_seconds(self._least, cost)) if self._ffn_on_gpu else 0.0


class SizeProbe:
    """Finds the costs of micro-batches of `size` average requests from plans with unlimited memory.

    Args:
        few: whether plans of a few layers are enough.
        joint: whether an expert runs once for all micro-batches.
    """

    def __init__(self, setting: Setting, size: int, *, few: bool = True, joint: bool = False) -> None:
        self._size = size
        self._chunk = setting.prefill_chunk
        self._most = -(-len(setting.lengths) // size)
        setting = replace(setting, lengths=(round(fmean(setting.lengths)),) * len(setting.lengths))
        cut = probed(setting) if few else setting
        unlimited = dict.fromkeys(setting.machine.memories, UNLIMITED)
        count = min(self._most, MANY)

        def plan_of(micro_batches: int, resident: int) -> Plan:
            share = resident / micro_batches if setting.splits_kv else None
            return cut.plan(setting.batch(micro_batches, size), unlimited, share)[0]

        def used_by(plan: Plan) -> dict[str, int]:
            return _used(plan, plan if cut is setting else setting.undecided(plan.batch))

        plan = plan_of(count, 0)
        used = used_by(plan)
        fewer = used_by(plan_of(count - 1, 0)) if count > 1 else dict.fromkeys(used, 0)
        each = {memory: used[memory] - fewer[memory] for memory in used}
        self._shared = {memory: used[memory] - count * each[memory] for memory in used}
        together = self._most if joint else 1
        self._each = _MicroBatchWork(plan, 0, each, together)
        self._resident: _MicroBatchWork | None = None
        if setting.splits_kv:
            plan = plan_of(count, 1)
            more = used_by(plan)
            here = {memory: each[memory] + more[memory] - used[memory] for memory in used}
            self._resident = _MicroBatchWork(plan, plan.kv.held_by("accelerator")[0], here, together)

    def option(self, cost: CostModel) -> SizeOption:
        """Return the costs, by a cost model, of micro-batches of this size."""
        return SizeOption(
            size=self._size,
            chunk=self._chunk,
            most=self._most,
            shared=self._shared,
            each=self._each.cost(cost),
            resident=None if self._resident is None else self._resident.cost(cost),
        )


_LayerWork = tuple[float, Work]
"""Pair of a share of the layers, and the work that each of these layers has."""


class _MicroBatchWork:
    """The work of one micro-batch of a plan on each lane in a layer, and the micro-batch's bytes by memory.

    Where layers differ, the work of each kind of layer is weighted by its share of the layers.

    Args:
        number: index of the micro-batch.
        nbytes: bytes of the micro-batch, by memory.
        together: number of micro-batches that an expert runs on at once; each has an equal part of the expert's work.
    """

    def __init__(self, plan: Plan, number: int, nbytes: dict[str, int], together: int) -> None:
        self._nbytes = nbytes
        self._together = together
        self._stages = len(plan.stages)
        lanes = make_lanes(plan)
        run_state = RunState(plan, Engine(lanes.values()), lanes)
        batch = run_state.micro_batches[number]
        self._shares = [count / len(plan.layers) for count in plan.layout.config.kinds.values()]
        run_state.begin_step()
        self._prefill: list[_LayerWork] = []
        for each in run_state.prefill_batches:
            if each.chunk is not None and each.chunk.micro_batch == number:
                for kind, (share, works) in enumerate(zip(self._shares, each.works_at[0], strict=True)):
                    self._prefill += [(share, works[verb]) for verb in ("pre_attention", "attention")]
                    self._prefill.append(self._ffn(run_state, works, kind))
        run_state.end_step()
        run_state.skip(max(1, plan.batch.new_tokens // 2) - 1)
        run_state.begin_step()
        self._accelerator: list[_LayerWork] = []
        self._host: list[_LayerWork] = []
        self._link: list[_LayerWork] = []
        for kind, (share, works) in enumerate(zip(self._shares, batch.works_at[0], strict=True)):
            self._accelerator.append((share, works["pre_attention"]))
            if plan.declared.experts_on_host:
                self._experts_there(plan, run_state, works, kind)
            else:
                self._accelerator.append(self._ffn(run_state, works, kind))
            if all(batch.kv.on_accelerator) or plan.kv.slots:
                self._accelerator.append((share, works["attention"]))
                self._link += [(share, works["load_kv"])] if "load_kv" in works else []
            else:
                self._host.append((share, works["cpu_attention"]))
                self._link += [] if run_state.unified else [(share, works["load_hidden"])]

    def _ffn(self, run_state: RunState, works: Mapping[str, Work], kind: int) -> _LayerWork:
        """Return a pair: the share of layers that are of a kind, and the FFN's work (`post_attention`) in such a layer.

        If an expert runs on several micro-batches at once, the work is that of all these micro-batches, and the share
        is divided by the number of micro-batches. So work times share is still the part of one micro-batch.

        Args:
            works: the works (FLOPs and bytes) of the micro-batch in this kind of layer, by verb.
            kind: index of the kind of layer.
        """
        work, made = works["post_attention"], run_state.works
        if self._together > 1:
            tokens, amount = self._together * work.tokens, made.kinds[kind].post_attention
            work = made.work("post_attention", work.resource, tokens, amount, kind)
        return self._shares[kind] / self._together, work

    def _experts_there(self, plan: Plan, run_state: RunState, works: Mapping[str, Work], kind: int) -> None:
        """Add the FFN's work in a layer, with experts on the host, to the lanes' lists of work.

        The accelerator routes and combines, the host runs the experts, and the link copies the experts' outputs to the
        accelerator (not in unified memory).

        Args:
            works: the works (FLOPs and bytes) of the micro-batch in this kind of layer, by verb.
            kind: index of the kind of layer.
        """
        share, made = self._shares[kind], run_state.works
        self._accelerator += [(share, works["route"]), (share, works["combine"])]
        operations, tokens = made.kinds[kind], works["route"].tokens
        all_tokens = self._together * tokens
        experts = made.work("experts", plan.machine.roles.host, all_tokens, operations.experts, kind)
        self._host.append((share / self._together, experts))
        if not run_state.unified:
            nbytes = tokens * operations.layer.feed_forward.top_k * operations.hidden_bytes
            host, accelerator = plan.memory("host").name, plan.memory("accelerator").name
            self._link.append((share, made.move(host, accelerator, nbytes)[1]))

    def cost(self, model: CostModel) -> MicroBatchCost:
        """Return the micro-batch's bytes, and its seconds on each lane by a cost model."""

        def seconds(works: Sequence[_LayerWork]) -> float:
            return sum(share * model.work(work).seconds for share, work in works)

        return MicroBatchCost(
            link=seconds(self._link) / self._stages,
            host=seconds(self._host),
            accelerator=seconds(self._accelerator) / self._stages,
            prefill=seconds(self._prefill) / self._stages,
            nbytes=self._nbytes,
        )


def resident_bytes(plan: Plan) -> int:
    """Return the bytes of weights in the accelerators' memories before the first step: resident or cached."""
    fast = plan.accelerators
    stay = sum(each.nbytes for each in plan.weights.resident if each.memory in fast)
    return stay + filled_bytes(plan, plan.memory("accelerator").name)


def weight_bytes(plan: Plan) -> int:
    """Return the bytes that all weights of a plan take in slots of the device's memory."""
    return sum(map(plan.slot_bytes, plan.layout.pages))


def _buffer(plan: Plan) -> float:
    """Return the ratio of the streaming buffer's bytes to the streamed bytes of a layer; 0 if nothing streams."""
    streamed = (weight_bytes(plan) - resident_bytes(plan)) / len(plan.layers)
    fast = plan.memory("accelerator")
    slots = sum(pool.nbytes for pool in plan.weights.pools if pool.memory is fast)
    return (slots - filled_bytes(plan, fast.name)) / streamed if streamed else 0.0


def filled_bytes(plan: Plan, memory: str) -> int:
    """Return the bytes of those slots of a memory's pools in which weights are loaded before the first step."""
    return sum(
        len(pages) * pool.slot_bytes for pool, pages in plan.weights.filled if pool.memory.name == memory
    )


def _used(plan: Plan, deep: Plan) -> dict[str, int]:
    """Return the bytes, by memory, that a plan uses for anything but weights, computed for all layers of the model.

    Several accelerators count as one, with the name of the first and the bytes of the one that needs the most.

    Args:
        plan: a plan of a few layers, or of all.
        deep: a plan of all layers, with the same machine and batch; anything declared in it is ignored.
    """
    used = bytes_beside_pages(deep, plan)
    first, *others = (memory.name for memory in plan.accelerators)
    used[first] = max([used[first], *(used.pop(name) for name in others)])
    return used


def bytes_beside_pages(facts: Plan, declared: Plan) -> dict[str, int]:
    """Return the bytes, by memory, that a plan takes beside its pages of weights, computed for another plan's layers.

    Args:
        facts: the other plan, with the same machine and batch. Only its layers count: anything that a policy declared
            in it is ignored.
        declared: the plan in which a policy declared its use of memory; it may have another number of layers.
    """
    used = {name: memory.used for name, memory in declared.memories.items()}
    for pool in (*declared.weights.resident, *declared.weights.pools):
        used[pool.memory.name] -= pool.nbytes
    if facts is not declared:
        for plan, sign in ((declared, -1), (facts, 1)):
            for each in plan.reservations.of(_at_depth(declared.declared, len(plan.layers))):
                used[each.memory] += sign * each.nbytes
    return used


def _at_depth(declared: Declared, layers: int) -> Declared:
    """Return what a policy declared, for another number of layers; the accelerator's share of the KV cache stays."""

    here: Role = "accelerator"

    def stretched(roles: tuple[Role | None, ...]) -> tuple[Role | None, ...]:
        chosen = evenly(layers, round(roles.count(here) / len(roles) * layers))
        elsewhere = next((role for role in roles if role != here), here)
        return tuple(here if layer in chosen else elsewhere for layer in range(layers))

    spread = {roles: stretched(roles) for roles in set(declared.kv_roles)}
    return evolved(declared, kv_roles=tuple(spread[roles] for roles in declared.kv_roles))


def _hop_seconds(plan: Plan, cost: CostModel) -> list[float]:
    """Return the seconds of each link on the weights' way to the accelerator, for all pages of an average layer.

    The pages are copied one by one.
    """
    lanes = make_lanes(plan)
    run_state = RunState(plan, Engine(lanes.values()), lanes)
    roles = plan.machine.roles
    fast = [memory.name for memory in plan.accelerators]
    by_way_of = {pool.memory.name for pool in plan.weights.pools} - {*fast}
    stops = [roles.weights, *by_way_of, fast[0]]
    config, layout = plan.layout.config, plan.layout
    examples = [
        (count / config.layers, layout.layer(next(i for i in plan.layers if config.layer(i) == kind)))
        for kind, count in config.kinds.items()
    ]

    def seconds(source: str, target: str) -> float:
        return sum(
            share * cost.work(run_state.works.move(source, target, page.nbytes)[1]).seconds
            for share, pages in examples
            for page in pages
        )

    return [seconds(source, target) for source, target in pairwise(stops) if source != target] or [0.0]
