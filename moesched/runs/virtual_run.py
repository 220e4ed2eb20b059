"""Runs plans on the virtual clock, for simulations, the planner and what-if analyses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moesched.drivers.resumed_links import resumed_link_delays
from moesched.drivers.validation import new_engine
from moesched.drivers.virtual import VirtualDriver
from moesched.drivers.wired_memory import wired_memory_delays
from moesched.engine import Engine
from moesched.machines.calibrated import seconds_after_await
from moesched.machines.cost import cost_model
from moesched.machines.cost_model import CostModel
from moesched.runs.assembly import assemble
from moesched.runs.decisions import simulated_decisions
from moesched.runs.generation import TokenHandling
from moesched.runs.ranks import OnDevices, Rank
from moesched.runs.watched import Watched, closed_at_end, observers_of
from moesched.seams import Delay, Observer
from moesched.steps.contention import lanes_contend
from moesched.steps.works import RowsOfExperts
from moesched.tasks import Collective, Decision, HostKernel, Kernel, Lane, PageTransfer, Preview, Task
from moesched.trace import LastSteps, Recorder

Perform = Callable[[Task], Any]


class VirtualRun:
    """A run of one or several plans on the virtual clock, each with its own lanes, engine, run state and generation.

    Args:
        ranks: the ranks or nodes of one model. If they have devices, these compute every task as it ends; otherwise
            nothing is computed.
        cost: gives the time of tasks; by default the measured costs of the first plan's machine, else its roofline.
        decisions: returns the value of a routing or sampling task if no device computes it; by default
            `simulated_decisions`.
        sharing: whether concurrent tasks slow each other down; by default, they do if lanes share a memory.
        make_engine: makes an engine, given its lanes; by default an `Engine`, or a `CheckedEngine` if the
            environment variable MOESCHED_VALIDATE is set and not 0.
        observers: called with each task of the first rank, when it ends.
        recorder: records the tasks of all ranks, for a trace.
        tokens: stop tokens, and the callback for new tokens.
        steps: number of steps to run; by default all of the batch.
        age: number of decode steps that count as done when decoding begins: the KV cache holds their keys and values.
        chosen: takes a `post_attention` task, and returns how many of the task's tokens each chosen expert gets. If it
            is None, a task takes its mean time over uniform choices of experts.

    Attributes:
        rank_runs: lanes, engine, run state and generation of each rank.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        *,
        cost: CostModel | None = None,
        decisions: Perform | None = None,
        sharing: bool | None = None,
        make_engine: Callable[[Iterable[Lane]], Engine] = new_engine,
        observers: Sequence[Observer] = (),
        recorder: Recorder | LastSteps | None = None,
        tokens: TokenHandling | None = None,
        steps: int | None = None,
        age: int = 0,
        chosen: RowsOfExperts | None = None,
    ) -> None:
        self.rank_runs = [
            assemble(rank, make_engine, tokens=tokens, steps=steps, age=age, chosen=chosen) for rank in ranks
        ]
        if ranks[0].hardware is None:
            perform = decided(decisions or simulated_decisions(ranks[0].plan))
        else:
            perform = self._on_devices(ranks)
        self._driver = virtual_driver(
            self.rank_runs, perform, cost=cost, sharing=sharing, observers=observers, recorder=recorder
        )

    @property
    def now(self) -> int:
        """The time on the virtual clock, in nanoseconds."""
        return self._driver.now

    def run(self) -> list[list[list[int]]]:
        """Generate all tokens; call this once.

        Returns:
            for each rank, the generated tokens of each request.

        Raises:
            Exception: the first error of a policy or a task.
        """
        with closed_at_end(self.rank_runs):
            return self._driver.run(*(each.generation.run() for each in self.rank_runs))

    def _on_devices(self, ranks: Sequence[Rank]) -> dict[type[Task], Perform]:
        devices = OnDevices(ranks, [each.lanes.values() for each in self.rank_runs])
        return dict.fromkeys(
            (Kernel, HostKernel, PageTransfer, Decision, Preview, Collective), devices.execute
        )


def decided(decisions: Perform) -> dict[type[Task], Perform]:
    """Return, by type of task, the function that returns a task's value in a run without a device.

    For routing, its previews and sampling, the function is `decisions`; other tasks have no value.
    """
    return dict.fromkeys((Decision, Preview), decisions)


def virtual_driver(
    runs: Sequence[Watched],
    perform: Mapping[type[Task], Perform],
    *,
    cost: CostModel | None = None,
    sharing: bool | None = None,
    observers: Sequence[Observer] = (),
    recorder: Recorder | LastSteps | None = None,
) -> VirtualDriver:
    """Return the driver of the runs of several ranks or nodes on one virtual clock.

    Args:
        perform: by type of task, the function that returns a task's value.
        cost, sharing, observers, recorder: see `VirtualRun`.
    """
    plan = runs[0].plan
    sharing = lanes_contend(plan) if sharing is None else sharing
    if recorder is not None:
        recorder.sharing = sharing
    return VirtualDriver(
        [each.engine for each in runs],
        cost or cost_model(plan.machine, plan.layout.dtype),
        sharing=sharing,
        perform=perform,
        observers=observers_of(runs, observers, recorder),
        delays=_delays(runs),
        after_await=seconds_after_await(plan.machine),
    )


def _delays(runs: Sequence[Watched]) -> dict[Lane, Delay]:
    """Return the functions that give tasks extra time, by lane."""
    delays: dict[Lane, Delay] = {}
    for each in runs:
        lanes = each.run_state.lanes
        delays |= wired_memory_delays(each.plan, lanes) | resumed_link_delays(each.plan.machine, lanes)
    return delays
