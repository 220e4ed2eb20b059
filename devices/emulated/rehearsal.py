"""The rehearsal of an emulated run: times the run's operations on this machine before the emulated clock starts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from moesched.drivers.pricing import nanoseconds
from moesched.engine import Engine
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import WeightLayout, weight_layout
from moesched.requests.batch import Batch
from moesched.requests.sampling import Sampling
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.runs.simulation import simulate
from moesched.runs.virtual_run import VirtualRun
from moesched.seams import CostModel, Device, Exchange, Policy, Progress
from moesched.steps.plan import Plan
from moesched.steps.roles import KV_ROLES, Role
from moesched.steps.step import Step
from moesched.tasks import Phase, Task

from ..torch.device import TorchDevice

if TYPE_CHECKING:
    from moesched.seams import Array

REPEATS = 4
"""Number of micro-batches of the rehearsal; all are like the plan's largest one."""
STEPS = 3
"""Number of steps of the rehearsal."""
NO_LIMIT = 1 << 62


class Rehearsed(NamedTuple):
    """The time that the tasks of one verb (kind of task) take on one lane (queue of tasks), in all layers together.

    Attributes:
        lane: name of the lane.
        real: seconds of real work on this machine.
        modelled: seconds on the emulated machine by the cost model.
    """

    lane: str
    verb: str
    real: float
    modelled: float


def rehearse(
    checkpoint: Checkpoint, layout: WeightLayout, plan: Plan, cost: CostModel, tell: Progress
) -> dict[Phase, list[Rehearsed]]:
    """Run the model's last layer on the plan's largest micro-batch, one task after the other, and measure the tasks.

    The last layer has experts; the first ones may have none. All weights are streamed: this is the slow case, as
    computing with resident weights is never slower.

    Args:
        checkpoint: the model's files.
        layout: the division of the model's weights into pages.
        cost: the cost model of the emulated machine, for the modelled times.
        tell: is called with the progress.

    Returns:
        for prefill and for decode, the times of each verb on each lane.
    """
    one_layer = _last_layer(checkpoint)
    config = one_layer.config
    short = weight_layout(config, layout.dtype, layout.page_bytes)
    batch = _largest_micro_batch(plan.batch)
    policy = _OneLayer([role for role in KV_ROLES if plan.kv.held_by(role)], plan.declared.experts_on_host)
    budgets = dict.fromkeys(plan.memories, NO_LIMIT)
    with closing(_TimedDevice(one_layer, short, cost, tell)) as device:
        if config.ranks > 1:
            device.join(0, _Alone(), device)
        make = partial(plan_run, plan.machine, short, batch, policy, budgets, device.slot_bytes)
        device.expected = simulate(make(), policy).tasks
        trial = make()
        device.begin(trial, _prompts(batch.prompts, config.vocabulary), Sampling())
        with ThreadPoolExecutor(1, "rehearsal") as thread:
            # A lane's thread sets the number of cores that torch uses; the caller's own number must not change.
            thread.submit(_perform, trial, policy, cost, device).result()
        return device.summary(len(plan.layers))


def _last_layer(checkpoint: Checkpoint) -> Checkpoint:
    """Return the model with its last layer alone, as layer 0."""
    config = msgspec.structs.replace(checkpoint.config, pattern=(checkpoint.config.typical_layer,))
    last = f"layers.{checkpoint.config.layers - 1}."
    tensors = {
        name.replace(last, "layers.0.", 1): stored
        for name, stored in checkpoint.tensors.items()
        if name.startswith(last) or not name.startswith("layers.")
    }
    return msgspec.structs.replace(checkpoint, config=config, tensors=tensors)


def _perform(plan: Plan, policy: Policy, cost: CostModel, device: Device) -> None:
    """Run a plan by its policy on a virtual clock, which advances by the times of the cost model `cost`.

    When a task ends on this clock, `device` does the task's real work.
    """
    VirtualRun([Rank(plan, policy, device)], cost=cost, sharing=False, make_engine=Engine).run()


class _Alone:
    """A transport for a single rank, without any exchange: each collective returns a copy of the rank's own array."""

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        return part.copy()

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        assert array is not None, "the only rank is the root"
        return array.copy()

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array]:
        return [part.copy()]

    async def aclose(self) -> None: ...


class _OneLayer:
    """The policy of the rehearsal: runs each verb (kind of task) of a layer for each micro-batch.

    Args:
        kv_roles: the memories, "accelerator" or "host", that the emulated run places KV caches in; the micro-batches of
            the rehearsal use them in turn.
        experts_on_host: whether the emulated run computes experts on the host; the rehearsal then does so, too.
    """

    def __init__(self, kv_roles: Sequence[Role], experts_on_host: bool) -> None:
        self._kv_roles = kv_roles
        self._experts_on_host = experts_on_host

    def plan(self, plan: Plan) -> None:
        for j in plan.micro_batches:
            plan.place_kv(self._kv_roles[j // 2 % len(self._kv_roles)], [j])
        pages = plan.layout.layer(0)
        self._buffer = plan.pool("accelerator", "weights", len(pages), pages)
        self._pinned = (
            plan.pool("pinned", "staging", len(pages), pages) if plan.machine.roles.pinned else None
        )
        if self._experts_on_host:
            plan.run_experts_on_host()
            if not plan.machine.weights_on_host:
                plan.keep([page for page in pages if page.expert >= 0], "host")

    async def prefill(self, step: Step) -> None:
        await self._schedule(step)

    async def decode(self, step: Step) -> None:
        await self._schedule(step)

    async def _schedule(self, step: Step) -> None:
        pages = step.pages(0)
        if self._pinned is not None:
            step.copy_to_pinned(pages, self._pinned)
        await step.fetch(pages, self._buffer, source=self._pinned)
        for j in step.micro_batches:
            step.embed(j)
            step.pre_attention(0, j)
            self._attend(step, j)
            await self._second_half(step, j)
            await step.sample(j)
        step.evict(pages, self._buffer)
        if self._pinned is not None:
            step.evict(pages, self._pinned)

    async def _second_half(self, step: Step, j: int) -> None:
        """Run all that follows attention for micro-batch `j`: in one task if `j` is odd, else expert by expert."""
        if j % 2:
            step.post_attention(0, j)
            return
        routed = await step.route(0, j)
        on_host = list(routed)[::2] if self._experts_on_host else []
        if on_host:
            step.offload_routed(0, j)
        for expert in routed:
            step.run_expert(0, expert, j, at="host" if expert in on_host else "accelerator")
        if on_host:
            step.load_routed(0, j)
        step.combine(0, j)

    def _attend(self, step: Step, j: int) -> None:
        if step.kv_on_accelerator(j):
            step.attention(0, j)
        elif step.phase(j) == "prefill":
            step.attention(0, j)
            step.offload_kv(0, j)
        else:
            step.offload_qkv(0, j)
            step.cpu_attention(0, j)
            step.load_hidden(0, j)


class _TimedDevice(TorchDevice):
    """A torch device that measures the time of its tasks, and reports the progress of the rehearsal.

    Attributes:
        expected: number of tasks of the rehearsal, for the progress.
    """

    def __init__(self, checkpoint: Checkpoint, layout: WeightLayout, cost: CostModel, tell: Progress) -> None:
        super().__init__(checkpoint, layout)
        self.expected = 0
        self._cost = cost
        self._tell = tell
        self._done = 0
        self._seconds: dict[tuple[Phase, str, str], list[tuple[float, float, bool]]] = {}

    def execute(self, task: Task) -> Any:
        """Run a task, and record its real seconds and those of the cost model; returns the task's value."""
        start = perf_counter_ns()
        value = super().execute(task)
        real = (perf_counter_ns() - start) / 1e9
        if task.phase is not None:
            key = (task.phase, task.lane.name, task.verb)
            modelled = nanoseconds(task.work, self._cost) / 1e9
            self._seconds.setdefault(key, []).append((real, modelled, task.layer >= 0))
        self._done += 1
        self._tell("rehearsing on this machine", self._done, self.expected)
        return value

    def summary(self, layers: int) -> dict[Phase, list[Rehearsed]]:
        """Estimate times for `layers` layers: by verb and lane, the number of tasks * the median time of one."""
        by_phase: dict[Phase, list[Rehearsed]] = {"prefill": [], "decode": []}
        for (phase, lane, verb), times in self._seconds.items():
            count = len(times) * (layers if times[0][2] else 1)
            real = median(each[0] for each in times)
            modelled = median(each[1] for each in times)
            by_phase[phase].append(Rehearsed(lane, verb, count * real, count * modelled))
        return by_phase


def _prompts(lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Make prompts of varied token ids, since equal tokens would all be routed to the same experts.

    Args:
        lengths: number of tokens of each prompt.
        vocabulary: number of token ids; all ids are less than this.
    """
    return [
        [(31 * request + 17 * place * place) % vocabulary for place in range(length)]
        for request, length in enumerate(lengths)
    ]


def _largest_micro_batch(batch: Batch) -> Batch:
    """Make a batch of four copies (REPEATS) of the micro-batch with the most prompt tokens.

    If this micro-batch has more tokens than the largest chunk of prefill, all prompts are shortened in proportion.
    """
    requests = max(batch.micro_batches, key=lambda each: sum(batch.prompts[request] for request in each))
    share = max(sum(chunk.tokens) for chunk in batch.chunks().values()) / sum(
        batch.prompts[r] for r in requests
    )
    lengths = [max(1, int(batch.prompts[request] * min(share, 1.0))) for request in requests]
    size = len(lengths)
    micro_batches = tuple(tuple(range(n * size, (n + 1) * size)) for n in range(REPEATS))
    return Batch(tuple(lengths * REPEATS), STEPS, micro_batches)
