"""A test policy that divides and joins the tasks of experts at random, to find faults in the engine and devices.

A seed determines the choices. The policy must generate the same tokens as every other policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from moesched.dispatch import LayerByLayer, Routed, users_of
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class RandomRows(LayerByLayer):
    """Runs each expert in several random tasks, each for some rows of one micro-batch or for all rows of several.

    All weights stay on the accelerator. If the host has all experts, too, it runs some of the tasks, chosen at random.

    Settings:
        seed: seed of all random choices.
        together: number of micro-batches that are routed before their experts run; None for all.
    """

    def __init__(self, seed: int = 0, together: int | None = None) -> None:
        self.random = Random(seed)
        self.together = together

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")
        plan.keep(plan.layout.pages)
        self.on_host = plan.machine.unified or plan.machine.weights_on_host
        if self.on_host:
            plan.run_experts_on_host(resident=True)

    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        choose = self.random
        if self.on_host:
            for j in routed:
                step.offload_routed(i, j)
        tasks = [
            (e, *each) for e, users in users_of(routed).items() for each in self._tasks(routed, e, users)
        ]
        back = set()
        for expert, micro_batches, rows in choose.sample(tasks, len(tasks)):
            if self.on_host and choose.random() < 0.5:
                step.run_expert(i, expert, micro_batches, at="host", rows=rows)
                back.update(micro_batches)
            else:
                step.run_expert(i, expert, micro_batches, rows=rows)
        for j in sorted(back):
            step.load_routed(i, j)

    def _tasks(
        self, routed: Routed, expert: int, users: Sequence[int]
    ) -> Iterator[tuple[list[int], range | None]]:
        """Yield random tasks of an expert that together compute each row of the expert once.

        A task is given by its micro-batches and its range of rows. With several micro-batches, the range is None, which
        stands for all rows.

        Args:
            routed: the number of rows of each expert, by micro-batch, then by expert.
            users: the micro-batches that chose the expert.
        """
        choose = self.random
        left = choose.sample(users, len(users))
        while left:
            taken = [left.pop() for _ in range(choose.randint(1, len(left)))]
            if len(taken) > 1:
                yield taken, None
                continue
            tokens = routed[taken[0]][expert]
            cuts = sorted(choose.sample(range(1, tokens), choose.randint(0, min(3, tokens - 1))))
            for start, stop in zip([0, *cuts], [*cuts, tokens], strict=True):
                yield taken, range(start, stop)
