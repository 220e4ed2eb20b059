"""Simulated runs of policies with a routing that a test writes down, and all tasks of such a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moesched.drivers.validation import CheckedEngine
from moesched.engine import Engine
from moesched.machines import Machine, load_machine
from moesched.machines.sustained import at_peak
from moesched.plugins import make_policy
from moesched.runs.simulation import simulate
from moesched.seams import Policy
from moesched.tasks import DONE, Task
from moesched.testing import Case
from moesched.trace import Recorder

T4 = at_peak(load_machine("t4"))
LAYOUT = Case(name="cache", machine=T4, layers=4).layout()
Choices = Sequence[Sequence[Sequence[int] | Mapping[int, int]]]
"""Experts by step and layer."""


def with_rates(link: float, cpu: float) -> Machine:
    """A T4 with a link of this bandwidth in bytes per second, and a CPU of this peak in FLOP/s."""
    links = [msgspec.structs.replace(each, bandwidth=link, latency=0.0) for each in T4.links]
    processor = msgspec.structs.replace(T4.processors["cpu"], flops={"bfloat16": cpu}, launch_seconds=0.0)
    return msgspec.structs.replace(T4, links=links, processors=T4.processors | {"cpu": processor})


FAST_CPU, SLOW_CPU = with_rates(link=1e9, cpu=1e12), with_rates(link=100e9, cpu=1e7)
BALANCED = with_rates(link=1e9, cpu=1e9)
"""The CPU takes as long for one token as the link for an expert."""


class Scripted:
    """A routing that says which experts a step's tokens take in each layer, whatever the micro-batch.

    Counts, where given, are the tokens of each expert.
    """

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        chosen = self._choices[step][layer]
        return dict(chosen) if isinstance(chosen, Mapping) else dict.fromkeys(chosen, 1)


class Watch(Recorder):
    """Knows all tasks of a run, also those that were cancelled."""

    def watch(self, engine: Engine, memories: Any = None, pools: Any = ()) -> None:
        super().watch(engine, memories, pools)
        assert isinstance(engine, CheckedEngine)
        self._submitted = engine.tasks

    def tasks(self, *verbs: str, state: int = DONE) -> list[Task]:
        """Those of these verbs that ran, in their order of submission."""
        return [task for task in self._submitted if task.verb in verbs and task.state == state]

    def experts(self, *verbs: str) -> list[tuple[int, int, int]]:
        """Step, layer and expert of the steps' tasks."""
        return [(task.step, task.layer, task.expert) for task in self.tasks(*verbs) if task.step >= 0]


def simulated(
    policy: str, choices: Choices, settings: Mapping[str, Any], accuracy: float = 1.0, **case: Any
) -> Watch:
    """A policy's run on the T4's virtual clock, for one request by default.

    accuracy: of previews of the router.
    """
    return run_of(make_policy(policy, dict(settings)), choices, accuracy, **case)


def run_of(policy: Policy, choices: Choices, accuracy: float = 1.0, **case: Any) -> Watch:
    """A run as `simulated`, of a policy that exists."""
    case = {"machine": T4, "prompts": (1,), "experts": 6, "layers": len(choices[0]), "weights": 1.5, **case}
    watch = Watch()
    plan = Case(name="cache", new_tokens=len(choices), **case).plan(policy)
    simulate(plan, policy, routing=Scripted(choices), preview_accuracy=accuracy, recorder=watch)
    return watch
