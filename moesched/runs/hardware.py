"""Runs a plan's policy on real hardware, with the lanes of a device, and returns the run's report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial

from msgspec.structs import replace

from moesched.drivers.realtime import RealtimeDriver
from moesched.drivers.validation import new_shared_engine
from moesched.errors import BadInput, MoeschedError, NotFinite, TaskFailed, TransportError
from moesched.machines.networks import NETWORK
from moesched.requests.sampling import Sampling
from moesched.runs.assembly import assemble
from moesched.runs.device_values import lane_kinds, value_checks
from moesched.runs.ending import Ending
from moesched.runs.generation import TokenHandling
from moesched.runs.out_of_memory import memory_refusals
from moesched.runs.outcome import Report, make_report
from moesched.runs.ranks import OnDevices, Rank, clock_of
from moesched.runs.watched import closed_at_end, observers_of
from moesched.seams import (
    Device,
    Emulates,
    GivesScores,
    NamesKernels,
    Observer,
    Policy,
    ReportsHome,
    WarmsUp,
)
from moesched.steps.plan import Plan
from moesched.system.logs import Log
from moesched.system.own_loop import run_on_own_loop
from moesched.system.signals import Stopped, stopped_by
from moesched.system.source_lines import calling_line
from moesched.trace import LastSteps, Recorder

_log = Log(__name__)


def run(
    plan: Plan,
    policy: Policy,
    device: Device,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling | None = None,
    tokens: TokenHandling | None = None,
    observers: Sequence[Observer] = (),
    recorder: Recorder | LastSteps | None = None,
    peers: Sequence[Rank] = (),
    keep_open: bool = False,
) -> Report:
    """Run a plan on real hardware. Ctrl-C ends the run cleanly; the report then holds the tokens so far.

    The run also ends early if weights cannot be read, if logits are not finite, or if this node of a cluster loses the
    others. The report's `failure` then gives the reason. Any other error of a run that has begun is raised, with the
    report as its attribute `report`.

    Args:
        prompts: the token ids of each request's prompt.
        sampling: how tokens are sampled; by default greedily.
        tokens: stop tokens, and the callback for new tokens.
        observers: called with each task of the first rank, when it ends.
        recorder: records the tasks of all ranks, for a trace; None for no trace.
        peers: the other ranks or nodes in this process; `plan`, `policy` and `device` are the first rank's. Observers
            and report cover the first rank only, the trace covers all.
        keep_open: leave the device open for another batch; the caller closes it.

    Raises:
        BadInput: the plan is a pipeline, which no device runs; or it requests router scores, and the device gives none.
        NotFinite: logits are not finite before any token, as with damaged weights; the error has no report.
        OutOfMemory: the system refused memory.
    """
    _require_runnable(plan, policy, device)
    started = time.perf_counter()
    ranks = [Rank(plan, policy, device), *peers]
    hardware = _HardwareRun(ranks, tokens, observers, recorder)
    ending = Ending()
    with ending, memory_refusals(plan):
        hardware.run(prompts, sampling or Sampling(), keep_open=keep_open)
    if not hardware.began:
        ending.raise_error()
    if plan.nodes.count == 1 and not plan.batch.first_request and not hardware.gave_tokens:
        ending.raise_cause(NotFinite)
    if recorder is not None:
        recorder.origin = hardware.origin
    seconds = time.perf_counter() - started
    report = make_report(
        plan,
        policy,
        hardware.rank_runs[0].outcome(),
        seconds,
        measured=True,
        interrupted=ending.interrupted or hardware.interrupted,
        failure=ending.failure,
        peers=[each.plan for each in peers],
    )
    report = _with_device_figures(report, device)
    if not _report_suffices(ending.error, one_of_several=plan.nodes.count > 1 and not peers):
        ending.raise_error(report)
    return report


def _require_runnable(plan: Plan, policy: Policy, device: Device) -> None:
    """Raise BadInput if a plan is a pipeline, or requests router scores that the device does not give."""
    if len(plan.stages) > 1:
        raise BadInput(
            f"policy {type(policy).__name__} makes a pipeline of {len(plan.stages)} accelerators, and devices run "
            f"one: give --machine with one accelerator instead of {plan.machine.name}, or use `moesched simulate`"
        )
    if plan.declared.scores and not (isinstance(device, GivesScores) and device.gives_scores):
        raise BadInput(
            f"device {type(device).__name__} gives no router scores, which policy {type(policy).__name__} requests: "
            "use --device torch"
        )


def _with_device_figures(report: Report, device: Device) -> Report:
    """Add to a report what only the run's device knows: emulation, warm-up, source of the weights, kernels."""
    if isinstance(device, Emulates):
        report = replace(report, emulation=device.emulation())
    if isinstance(device, WarmsUp):
        report = replace(report, warm_up_seconds=device.warm_up_seconds())
    if isinstance(device, ReportsHome):
        report = replace(report, weights_home=device.weights_home)
    if isinstance(device, NamesKernels):
        report = replace(report, kernels={name: list(used) for name, used in device.kernels.items()})
    return report


def _report_suffices(error: Exception | None, *, one_of_several: bool) -> bool:
    """Test whether `error` need not be raised, because the text of the error in the run's report is enough.

    True for failed tasks whose cause is an error of moesched, such as unreadable weights.

    one_of_several: whether this is a node of a cluster; then the loss of other nodes need not be raised either.
    """
    cause = error.__cause__ if isinstance(error, TaskFailed) else None
    return isinstance(cause, MoeschedError) and (one_of_several or not isinstance(cause, TransportError))


class _HardwareRun:
    """The run of all ranks of this process on their devices, in real time.

    Attributes:
        rank_runs: the lanes, engine, run state and generation of each rank.
        began: whether the devices became ready, so that the policies could begin.
        interrupted: whether a signal ended the run.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        tokens: TokenHandling | None,
        observers: Sequence[Observer],
        recorder: Recorder | LastSteps | None,
    ) -> None:
        self.began = self.interrupted = False
        self._ranks = ranks
        self.rank_runs = [
            assemble(
                rank,
                new_shared_engine,
                kinds=lane_kinds(rank.device),
                tokens=tokens if number == 0 or tokens is None else tokens.without_receiver(),
            )
            for number, rank in enumerate(ranks)
        ]
        device = ranks[0].device
        tasks = OnDevices(ranks, [each.lanes.values() for each in self.rank_runs]) if ranks[1:] else None
        self._driver = RealtimeDriver(
            [each.engine for each in self.rank_runs],
            tasks.execute if tasks else device.execute,
            kinds={NETWORK: "guest", **lane_kinds(device)},
            streams=tasks or device.streams,
            observers=observers_of(self.rank_runs, observers, recorder),
            checks=value_checks(device, ranks[0].plan),
            clock=clock_of(device),
        )

    @property
    def gave_tokens(self) -> bool:
        """True once a request has a token."""
        return any(self.rank_runs[0].generation.tokens)

    @property
    def origin(self) -> int:
        """The time on the device's clock at which the run began, in nanoseconds."""
        return self._driver.origin

    def run(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keep_open: bool) -> None:
        """Generate all tokens of the prompts; the devices are closed at the end unless `keep_open`."""
        run_on_own_loop(partial(self._generate, prompts, sampling, keep_open))

    async def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, keep_open: bool) -> None:
        loop, running = asyncio.get_running_loop(), asyncio.current_task()
        assert running is not None
        try:
            with ExitStack() as opened:
                opened.enter_context(closed_at_end(self.rank_runs))
                stop = partial(loop.call_soon_threadsafe, self._interrupt, running)
                opened.enter_context(stopped_by(stop, self._stop_policy))
                for rank in reversed(self._ranks):  # here, so that Ctrl-C waits for it
                    rank.device.begin(rank.plan, prompts, sampling)
                self.began = True
                await self._driver.run(*(each.generation.run() for each in self.rank_runs))
        except asyncio.CancelledError:
            if not self.interrupted:
                raise
        finally:
            if not keep_open:
                async with AsyncExitStack() as closing:
                    for rank in reversed(self._ranks):
                        closing.push_async_callback(rank.device.aclose)

    def _stop_policy(self) -> None:
        """Raise `Stopped` in a policy that awaits nothing, so that the event loop has no turn to call `_interrupt`."""
        if self.began and not self.interrupted:
            _log.warning("interrupted in the policy", line=calling_line())
            raise Stopped

    def _interrupt(self, running: asyncio.Task[None]) -> None:
        """Cancel `running`, the run's asyncio task; the run ends once the engine's tasks that have started are over."""
        self.interrupted = True
        running.cancel()
        if waiting_for := self._driver.describe_running():
            _log.warning("stopping; the next signal stops at once", waiting_for=waiting_for)
