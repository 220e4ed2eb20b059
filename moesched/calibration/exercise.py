"""Exercises: small random models run on the device, in set manners, to see what their tasks take.

The first layer's weights stay in memory, the second layer's are fetched anew, so that both are seen.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from moesched import plugins
from moesched.drivers.interrupts import interrupts_held
from moesched.machines import Machine
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import DType, ModelConfig
from moesched.models.layout import weight_layout
from moesched.requests.batch import Batch
from moesched.runs.runs import plan_run, run
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import Task

KEPT_LAYER, FETCHED_LAYER = 0, 1


class Manner(Enum):
    """What runs at once."""

    SERIAL = "one task after the other"
    FRESH = "the same, and every micro-batch has weights that were fetched just before"
    READING = "pages are fetched while the accelerator computes"
    ATTENDING = "the same, while the host attends for some of the micro-batches"
    SHARING = "accelerator and host each compute some of the experts"

    @property
    def one_by_one(self) -> bool:
        """Whether nothing runs at once."""
        return self in (Manner.SERIAL, Manner.FRESH)


def small_model(name: str, *, hidden: int, intermediate: int, heads: int, vocabulary: int) -> ModelConfig:
    """A shape to exercise with: two layers of eight experts, of which every token takes two."""
    return ModelConfig(
        name=name,
        layers=2,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=heads // 4,
        head_dim=hidden // heads,
        experts=8,
        top_k=2,
        vocabulary=vocabulary,
        norm_eps=1e-5,
        rope_theta=1e4,
        sliding_window=None,
        max_positions=4096,
        tied_embeddings=False,
        stop_tokens=(),
        dtype="bfloat16",
    )


class Exercise:
    """Policy of one run.

    Args:
        manner: what runs at once.
        turn: with an even one, the even steps take a layer's second half as one task and the odd ones task by
            task; with an odd one it is the other way about.
        long: micro-batches that the host attends for.
    """

    def __init__(self, manner: Manner, turn: int, long: Sequence[int]) -> None:
        self.manner = manner
        self.turn = turn
        self.long = tuple(long)

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")
        plan.run_experts_on_host()
        plan.keep(plan.layout.layer(KEPT_LAYER))
        pages = plan.layout.layer(FETCHED_LAYER)
        self.buffer = plan.pool("accelerator", "fetched", len(pages), pages)

    async def prefill(self, step: Step) -> None:
        await self._run(step)

    async def decode(self, step: Step) -> None:
        await self._run(step)

    async def _run(self, step: Step) -> None:
        fresh = self.manner is Manner.FRESH
        if not fresh:
            fetched = self._fetch(step)
            if self.manner not in (Manner.READING, Manner.ATTENDING):
                await fetched
        for j in step.micro_batches:
            await self._alone(step.embed(j))
        for i in step.layers:
            await self._layer(step, i)
        for j in step.micro_batches:
            last = step.sample(j)
            await self._alone(last)
        if not fresh:
            self._evict(step)
        await last

    def _fetch(self, step: Step) -> Task:
        return step.fetch(step.pages(FETCHED_LAYER), self.buffer)

    def _evict(self, step: Step) -> None:
        step.evict(step.pages(FETCHED_LAYER), self.buffer)

    async def _layer(self, step: Step, i: int) -> None:
        attending = self.long if self.manner is Manner.ATTENDING else ()
        others = [j for j in step.micro_batches if j not in attending]
        fresh = self.manner is Manner.FRESH and i == FETCHED_LAYER
        for place, j in enumerate(others):
            if fresh:
                await self._fetch(step)
            await self._alone(step.pre_attention(i, j))
            await self._alone(step.attention(i, j))
            # Beside another one's experts in every step, as policies have it: what the host does is done by then.
            for k in attending[(place + step.index) % len(others) :: len(others)]:
                self._attend_on_host(step, i, k)
            await self._second_half(step, i, j)
            if fresh:
                self._evict(step)
        for j in attending:
            step.post_attention(i, j)

    def _attend_on_host(self, step: Step, i: int, j: int) -> None:
        step.pre_attention(i, j)
        step.offload_qkv(i, j)
        step.cpu_attention(i, j)
        step.load_hidden(i, j)

    async def _second_half(self, step: Step, i: int, j: int) -> None:
        by_task = (step.index + self.turn) % 2 == 1 and self.manner.one_by_one
        if not by_task and self.manner is not Manner.SHARING:
            await self._alone(step.post_attention(i, j))
            return
        routed = await step.route(i, j)
        on_host = list(routed)[1::2] if self.manner is Manner.SHARING else []
        if on_host:
            step.offload_routed(i, j)
        for expert in routed:
            await self._alone(
                step.run_expert(i, expert, j, at="host" if expert in on_host else "accelerator")
            )
        if on_host:
            step.load_routed(i, j)
        await self._alone(step.combine(i, j))

    async def _alone(self, task: Task) -> None:
        if self.manner.one_by_one:
            await task


class Watch:
    """Remembers the tasks of the steps."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def ended(self, task: Task) -> None:
        """Remember a task, unless it loads what stays."""
        if task.step >= 0:
            self.tasks.append(task)


class Gym:
    """A small model on disk, and the prompts that it is exercised with.

    Args:
        groups: the prompt lengths of each micro-batch.
        long: micro-batches that the host attends for.
    """

    def __init__(
        self, checkpoint: Path, dtype: DType, groups: Sequence[Sequence[int]], long: Sequence[int]
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.long = long
        self.lengths = tuple(length for group in groups for length in group)
        numbers = iter(range(len(self.lengths)))
        self.micro_batches = tuple(tuple(next(numbers) for _ in group) for group in groups)

    def run(self, machine: Machine, manner: Manner, turn: int, steps: int) -> list[Task]:
        """Run the model for that many steps, prefill included; returns the tasks in the order of their ends.

        The same tokens come out every time, so that tasks can be compared between runs.

        Raises:
            KeyboardInterrupt: Ctrl-C ended the run before all tasks were done.
        """
        with interrupts_held():  # a Ctrl-C that is raised while Python collects would be lost
            gc.collect()  # what the run before left, weights and all, in cycles
        checkpoint = open_checkpoint(self.checkpoint)
        layout = weight_layout(checkpoint.config, self.dtype)
        device = plugins.find("devices", "torch")(checkpoint, layout)
        vocabulary = checkpoint.config.vocabulary
        prompts = [
            [(31 * request + 17 * place * place) % vocabulary for place in range(length)]
            for request, length in enumerate(self.lengths)
        ]
        policy, watch = Exercise(manner, turn, self.long), Watch()
        batch = Batch(self.lengths, steps, self.micro_batches)
        plan = plan_run(machine, layout, batch, policy, slot_bytes=device.slot_bytes)
        if run(plan, policy, device, prompts, observers=[watch]).interrupted:
            raise KeyboardInterrupt
        return watch.tasks
