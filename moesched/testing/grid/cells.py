"""Cells of the grid, each a model, a machine and a batch size, and the simulation of policies in a cell."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import msgspec

from moesched.errors import BadInput
from moesched.inputs.accelerators import cut_over_ranks
from moesched.inputs.budgets import assumed_process
from moesched.inputs.lookup import find_machine, find_policy, find_shape
from moesched.inputs.options import SizeOptions
from moesched.jobs.simulate_model import require_context
from moesched.machines.cost import cost_model
from moesched.models.config import ModelConfig
from moesched.models.layout import WeightLayout, room_for, weight_layout
from moesched.planner.setting import Setting
from moesched.planner.sizing import choose_sizes
from moesched.planner.trial_run import TrialFigures, trial_run
from moesched.plugins import make_policy
from moesched.requests.batching import batch_of
from moesched.requests.workloads import load_workload
from moesched.seams import Observer, Policy
from moesched.steps.plan import Plan
from moesched.trace import Recorder

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "mixtral-0.8b")
MACHINES = ("t4", "a100-80g", "cpu-nvme")
BATCH_SIZES = (1, 16)
LEFT_OUT = ("qwen3-30b-a3b", 16)
"""A model and a batch size that the default grid omits: they take twice the time of all its other cells."""
WORKLOAD = "mtbench"
MICRO_BATCHES = 4
"""Number of micro-batches of a batch, the same for all policies, so that they are compared at the same work."""


class Cell(msgspec.Struct, frozen=True):
    """A cell of the grid: a model, a machine and a batch size with which policies are simulated.

    Attributes:
        model, machine: names or files.
        batch_size: number of requests.
    """

    model: str
    machine: str
    batch_size: int

    @property
    def name(self) -> str:
        """The cell's model, machine and batch size as text."""
        return f"{self.model} on {self.machine}, batch of {self.batch_size}"

    def plan(self, name: str, settings: dict[str, Any]) -> tuple[Plan, Policy]:
        """Make a policy, and plan the cell's batch with it.

        Args:
            name: the policy's name, or file.py:Class.
            settings: the policy's settings by name.

        Raises:
            BadInput: the plan does not fit into the machine's memory.
        """
        policy = find_policy(name)
        whole, machine = find_shape(self.model), find_machine(self.machine)
        config, machine, budgets = cut_over_ranks(whole, machine, None, None, policy)
        layout = _layout(config)
        workload = load_workload(WORKLOAD)
        lengths = workload.lengths(self.batch_size, seed=0)
        new_tokens = workload.new_tokens[0]
        require_context(lengths, new_tokens, config)
        setting = Setting(
            make=partial(make_policy, name, settings),
            machine=machine,
            layout=layout,
            lengths=tuple(lengths),
            new_tokens=new_tokens,
            cost=cost_model(machine, layout.dtype),
            budgets=budgets,
            slot_bytes=room_for,
            process=assumed_process(machine),
        )
        size = -(-self.batch_size // MICRO_BATCHES)
        with suppress(BadInput):
            return setting.plan(setting.batch(-(-self.batch_size // size), size))
        wanted = SizeOptions(batch_size=self.batch_size, micro_batch_size=size)
        sizes = choose_sizes(setting, wanted, successive=False)  # with the prompts in chunks
        return setting.plan(batch_of(setting.lengths, new_tokens, sizes))


class Simulated(NamedTuple):
    """The simulation of a policy in a cell: the policy's plan, and the figures of the run."""

    plan: Plan
    run: TrialFigures

    @property
    def seconds(self) -> float:
        """The predicted time of the whole batch, from the end of loading on, in seconds."""
        return self.run.seconds(self.plan.batch)


def simulate_cell(
    cell: Cell,
    name: str,
    settings: dict[str, Any],
    *,
    observers: Sequence[Observer] = (),
    recorder: Recorder | None = None,
) -> Simulated:
    """Simulate the prefill and a few decode steps of a policy in a cell.

    Args:
        name: the policy's name, or file.py:Class.
        settings: the policy's settings by name.
        observers: called with each task of the run when it ends.
        recorder: records the run; None for no recording.

    Raises:
        BadInput: the plan does not fit.
    """
    plan, policy = cell.plan(name, settings)
    return Simulated(plan, trial_run(plan, policy, observers=observers, recorder=recorder))


def cells_of(
    models: Sequence[str] = (), machines: Sequence[str] = (), batch_sizes: Sequence[int] = ()
) -> list[Cell]:
    """Return a cell for each combination of model, machine and batch size; an empty argument stands for default values.

    Args:
        models, machines: names or files.
        batch_sizes: numbers of requests. If all three arguments are empty, the cells of `LEFT_OUT` are omitted.

    Raises:
        BadInput: a model or a machine is unknown.
    """
    default = not (models or machines or batch_sizes)
    models, machines = models or MODELS, machines or MACHINES
    for model in models:
        find_shape(model)
    for machine in machines:
        find_machine(machine)
    return [
        Cell(model, machine, batch_size)
        for model in models
        for machine in machines
        for batch_size in batch_sizes or BATCH_SIZES
        if not (default and (model, batch_size) == LEFT_OUT)
    ]


@cache
def _layout(config: ModelConfig) -> WeightLayout:
    """Return the division of a model's weights into pages; cached, since all policies use the same pages."""
    return weight_layout(config)
