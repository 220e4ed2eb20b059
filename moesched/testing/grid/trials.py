"""Small cases that find a policy's faults: tight memory, random shapes, and durations unlike any machine's.

The cases run on a device that computes hashes instead of tensors ("on symbols").
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from random import Random

import msgspec
from msgspec.structs import replace

from moesched.machines import Machine
from moesched.machines.cost import cost_model
from moesched.machines.cost_model import CostModel
from moesched.plugins import make_policy
from moesched.seams import Policy, is_expert_parallel
from moesched.testing.policy_checks import Case, Clock, check_plans, node_cases, policy_cases
from moesched.work import Demand, Work

SEEDS = range(3)
"""Seeds of the random shapes, and of the uneven durations."""
MOST_UNEVEN = 5
"""Uneven durations lie between 1/2**5 and 2**5 of the machine's."""


class Trial(msgspec.Struct, frozen=True):
    """A small case with a clock and durations, run on a device that computes hashes instead of tensors.

    Attributes:
        clock: "virtual"; or "shared", on which concurrent tasks slow each other down.
        uneven: the seed of random durations; None for the machine's own durations.
    """

    case: Case
    clock: Clock = "virtual"
    uneven: int | None = None

    @property
    def name(self) -> str:
        """The case, the clock and the kind of durations, as text for messages."""
        if self.uneven is not None:
            return f"{self.case.name}, uneven durations {self.uneven}"
        return f"{self.case.name}, lanes that slow each other" if self.clock == "shared" else self.case.name

    def run(self, policy: str, settings: dict[str, object]) -> None:
        """Plan the case with a policy, run it, and check the tokens.

        Args:
            policy: the policy's name, or file.py:Class, or module:Class.
            settings: the policy's settings by name.

        Raises:
            BadInput: the policy's plan does not fit.
            Exception: the policy has a fault.
        """
        policies: list[Policy] = [make_policy(policy, settings) for _ in range(self.case.nodes)]
        plans = [self.case.plan(each, node) for node, each in enumerate(policies)]
        cost = cost_model(plans[0].machine, plans[0].layout.dtype)
        check_plans(
            plans,
            policies,
            self.clock,
            self.name,
            cost if self.uneven is None else UnevenTimes(cost, self.uneven),
            ends_early=self.case.ends_early,
        )


class UnevenTimes:
    """A cost model that multiplies a machine's durations by random factors; equal pieces of work have equal factors.

    Tasks then end in orders that no real machine would give.

    Args:
        cost: the cost model of the machine.
        seed: seed of the factors.
    """

    def __init__(self, cost: CostModel, seed: int) -> None:
        self._cost = cost
        self._seed = seed

    def work(self, work: Work) -> Demand:
        """Return the resources that `work` takes on the machine, and its time, multiplied by the random factor."""
        demand = self._cost.work(work)
        same = (self._seed, work.kind, work.resource, work.flops, work.nbytes, work.tokens)
        chosen = Random(blake2b(repr(same).encode(), digest_size=8).digest())
        factor = 2 ** chosen.uniform(-MOST_UNEVEN, MOST_UNEVEN)
        return demand._replace(seconds=demand.seconds * factor, lead=demand.lead * factor)


def trials_of(policy: type[Policy]) -> list[Trial]:
    """Return the small cases in which to run a policy; the cases that find most faults come first."""
    known = policy_cases()
    ample = [replace(case, name=f"{case.name}, eight times the weights", weights=8.0) for case in known[:2]]
    cases = known + ample + (node_cases() if is_expert_parallel(policy) else [])
    shapes = [random_case(seed, [case.machine for case in known]) for seed in SEEDS]
    return [
        *(Trial(case) for case in cases),
        *(Trial(case) for case in shapes),
        *(Trial(case, "shared") for case in cases),
        *(Trial(case, uneven=seed) for case in (*cases, *shapes) for seed in SEEDS),
    ]


def random_case(seed: int, machines: Sequence[Machine]) -> Case:
    """Make a case with a model, batch and memory drawn from `seed`, on one of these machines."""
    choose = Random(seed)
    experts = choose.randint(2, 8)
    prompts = tuple(choose.randint(1, 9) for _ in range(choose.randint(1, 6)))
    return Case(
        name=f"random shape {seed}",
        machine=choose.choice(machines),
        layers=choose.randint(1, 6),
        experts=experts,
        top_k=choose.randint(1, min(4, experts)),
        prompts=prompts,
        new_tokens=choose.randint(1, 5),
        micro_batch_size=choose.randint(1, len(prompts)),
        weights=choose.uniform(0.5, 1.3),
        pages_per_expert=choose.randint(1, 3),
    )
