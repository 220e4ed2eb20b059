"""A test policy that chooses order, processor and time of tasks at random, to find faults in the engine and devices.

A seed determines the choices. The policy must generate the same tokens as every other policy.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import Any, get_args

from moesched.models.layout import Page
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.steps.verbs.base import Priority
from moesched.tasks import Task

PRIORITIES: tuple[Priority, ...] = get_args(Priority)


class Adversarial:
    """Submits tasks in a random legal order, with random priorities; fetches, evicts and awaits at random times.

    Settings:
        seed: seed of all random choices.
        cancels: whether to cancel some fetches. Which of them can still be cancelled depends on timing.
    """

    def __init__(self, seed: int = 0, cancels: bool = True) -> None:
        self.random, self.priorities = random.Random(seed), random.Random(seed)
        self.scores = seed % 2 == 1
        self.cancels = cancels

    def plan(self, plan: Plan) -> None:
        choose = self.random
        plan.discipline = choose.choice(("in_order", "ready_first"))
        for j in plan.micro_batches:
            self._place_kv(plan, j)
        plan.reserve_kv_buffers(choose.randint(0, 3))
        self.kv_slots = plan.kv.slots
        self.unified = plan.machine.unified
        self.host_has_weights = plan.machine.weights_on_host and not self.unified
        self.experts_on_host = (self.unified or self.host_has_weights) and choose.random() < 0.5
        if self.experts_on_host:
            plan.run_experts_on_host()
        if self.scores:
            plan.request_scores()
        layer = max(map(plan.layout.layer, plan.layers), key=len)
        room = plan.free("accelerator") // max(map(plan.slot_bytes, plan.layout.pages))
        slots = max(len(layer), min(choose.randint(len(layer), 3 * len(layer)), room))
        self.pool = plan.pool(
            "accelerator", "adversary", slots, plan.layout.pages, choose.choice(("ring", "lru", "none"))
        )

    async def prefill(self, step: Step) -> None:
        """Submit all tasks of the step, a few at a time, each time for a random micro-batch.

        Chunks of the same prompts are submitted one after the other.
        """
        chains: list[list[int]] = []
        for j in step.micro_batches:
            if step.goes_on(j):
                chains[-1].append(j)
            else:
                chains.append([j])
        programs = [self._in_turn(step, chain) for chain in chains]
        answers: dict[int, Any] = {}
        while programs:
            program = self.random.choice(programs)
            for _ in range(self.random.randint(1, 8)):
                try:
                    with step.priority(self.priorities.choice(PRIORITIES)):
                        handle = program.send(answers.pop(id(program), None))
                except StopIteration:
                    programs.remove(program)
                    break
                if handle.verb in ("route", "preview_route"):
                    answers[id(program)] = await handle
                elif self.random.random() < 0.02:
                    await handle

    decode = prefill

    def _in_turn(self, step: Step, chain: Sequence[int]) -> Generator[Task, dict[int, int], None]:
        for j in chain:
            yield from self._micro_batch(step, j)

    def _micro_batch(self, step: Step, j: int) -> Generator[Task, dict[int, int], None]:
        """Submit all tasks of micro-batch `j` in an order that data dependencies allow; yield each task.

        The caller sends back the value of a `route` task: the number of rows of each chosen expert.
        """
        choose = self.random
        yield step.embed(j)
        for i in step.layers:
            early = choose.random() < 0.5 and self._takes_slot(step, i, j)
            if early:
                yield step.load_kv(i, j)
            self._hold(step, step.dense_pages(i))
            yield step.pre_attention(i, j)
            if early or self._takes_slot(step, i, j):
                yield from self._attend_loaded(step, i, j, early)
            else:
                yield from self._attend(step, i, j)
            if choose.random() < 0.5:
                self._hold(step, step.pages(i))
                yield step.post_attention(i, j)
                continue
            self._hold(step, step.dense_pages(i))
            routed = yield step.route(i, j)
            if choose.random() < 0.2 and i + 1 in step.layers:
                later = choose.choice(step.layers[i + 1 :])
                self._hold(step, step.dense_pages(later))
                yield step.preview_route(later, j)
            yield from self._run_experts(step, i, j, choose.sample(sorted(routed), len(routed)))
            yield step.combine(i, j)
        yield step.sample(j)

    def _place_kv(self, plan: Plan, j: int) -> None:
        """Place the KV cache of micro-batch `j` in one memory for all layers, or in a random memory for each layer."""
        choose = self.random
        if plan.batch.beams == 1 and choose.random() < 0.3:
            on_host = {i for i in plan.layers if choose.random() < 0.5}
            plan.place_kv("host", [j], on_host)
            plan.place_kv("accelerator", [j], set(plan.layers) - on_host)
        else:
            plan.place_kv("host" if choose.random() < 0.5 else "accelerator", [j])

    def _run_experts(
        self, step: Step, i: int, j: int, experts: Sequence[int]
    ) -> Generator[Task, dict[int, int], None]:
        """Run experts of layer `i` for micro-batch `j`, in the given order; yield the submitted tasks.

        A random part of the experts runs on the host.
        """
        choose = self.random
        there = [expert for expert in experts if self.experts_on_host and choose.random() < 0.5]
        if there or (self.experts_on_host and choose.random() < 0.1):
            yield step.offload_routed(i, j)
        for expert in experts:
            if expert not in there or not self.host_has_weights:
                self._hold(step, step.expert_pages(i, expert))
            yield step.run_expert(i, expert, j, at="host" if expert in there else "accelerator")
            if expert == (there or [-1])[-1]:
                yield step.load_routed(i, j)

    def _attend(self, step: Step, i: int, j: int) -> Generator[Task, dict[int, int], None]:
        """Run attention of layer `i` for micro-batch `j` where the KV cache can be read; yield the submitted tasks."""
        kv_on_host = not step.kv_on_accelerator(j, i)
        on_host = kv_on_host and (step.phase(j) == "decode" or step.chunked or self.random.random() < 0.5)
        if on_host or (self.unified and self.random.random() < 0.5):
            yield step.offload_qkv(i, j)
            yield step.cpu_attention(i, j)
            yield step.load_hidden(i, j)
        else:
            yield step.attention(i, j)
            if kv_on_host:
                yield step.offload_kv(i, j)

    def _takes_slot(self, step: Step, i: int, j: int) -> bool:
        """Choose at random whether attention runs on the accelerator with a copy of the host's KV cache.

        If it does, take a buffer for the copy. Return False in prefill, if the KV cache is on the accelerator, or if no
        buffer is free.
        """
        loads = step.phase(j) == "decode" and not step.kv_on_accelerator(j, i)
        taken = loads and self.kv_slots > 0 and self.random.random() < 0.5
        self.kv_slots -= taken
        return taken

    def _attend_loaded(
        self, step: Step, i: int, j: int, early: bool
    ) -> Generator[Task, dict[int, int], None]:
        """Run decode attention on the accelerator with a copy of the host's KV cache; yield the submitted tasks.

        early: whether the task that copies the KV cache was submitted already.
        """
        if not early:
            yield step.load_kv(i, j)
        yield step.attention(i, j)
        self.kv_slots += 1
        yield step.offload_kv(i, j)

    def _hold(self, step: Step, needed: Sequence[Page]) -> None:
        """Fetch needed pages of weights that the pool lacks, in random order and portions; sometimes one page more.

        If the pool has too little room, random pages that are not needed are evicted.
        """
        choose = self.random
        if choose.random() < 0.1:
            self._start_for_nothing(step, needed)
        missing = [page for page in needed if page not in self.pool]
        if choose.random() < 0.2:
            stray = choose.choice(step.pages(choose.choice(step.layers)))
            if stray not in self.pool and stray not in missing and len(needed) < len(self.pool.slots):
                missing.append(stray)
        choose.shuffle(missing)
        keep = {page.id for page in needed}
        others = [page for page in self.pool.pages() if page.id not in keep]
        choose.shuffle(others)
        while self.pool.empty_slots < len(missing):
            step.evict([others.pop()], self.pool)
        while missing:
            portion = [missing.pop() for _ in range(choose.randint(1, len(missing)))]
            step.fetch(portion, self.pool, urgent=choose.random() < 0.5)

    def _start_for_nothing(self, step: Step, needed: Sequence[Page]) -> None:
        """Fetch a random page that is not needed; then, at random, promote the fetch, cancel it, or evict the page."""
        choose = self.random
        page = choose.choice(step.pages(choose.choice(step.layers)))
        if page in self.pool or page in needed or not self.pool.empty_slots:
            return
        step.fetch([page], self.pool, speculative=choose.random() < 0.5)
        if choose.random() < 0.5:
            step.promote([page], self.pool)
        if choose.random() < 0.8 and not (self.cancels and step.cancel([page], self.pool)):
            step.evict([page], self.pool)
