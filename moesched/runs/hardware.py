"""Runs on real hardware: a plan's schedule on a device's lanes, to a report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import anyio

from moesched.drivers.realtime import RealtimeDriver
from moesched.drivers.validation import new_shared_engine
from moesched.errors import BadInput, NotFinite, TaskFailed, TransportError
from moesched.machines.networks import NETWORK
from moesched.requests.sampling import Sampling
from moesched.runs.assembly import assemble, close_at_end, observers_of
from moesched.runs.generation import TokenHandling
from moesched.runs.outcome import Report, make_report
from moesched.runs.ranks import OnDevices, Rank
from moesched.seams import Device, Emulates, HasOwnBytes, KeepsTime, Observer, Policy
from moesched.steps.plan import Plan
from moesched.trace import LastSteps, Recorder


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
    """Run a plan on real hardware. Ctrl-C ends it cleanly; the report then holds the tokens so far.

    The run also ends early if logits are not finite, or if this node of a cluster loses the others. The report's
    `failure` then names the first such value, or the lost node.

    Args:
        tokens: stop tokens of requests, and the receiver of their tokens.
        peers: the other ranks or nodes in this process; plan, policy and device are those of the first. Observers and
            report are those of the first too, except for the trace.
        keep_open: leave the device open for another batch; the caller closes it.

    Raises:
        BadInput: the plan is a pipeline, which no device runs.
    """
    if len(plan.stages) > 1:
        raise BadInput(
            f"policy {type(policy).__name__} makes a pipeline of {len(plan.stages)} accelerators, and devices run "
            f"one: give --machine with one accelerator instead of {plan.machine.name}, or use `moesched simulate`"
        )
    started = time.perf_counter()
    ranks = [Rank(plan, policy, device), *peers]
    hardware = _HardwareRun(ranks, tokens, observers, recorder)
    interrupted, failure = False, None
    try:
        hardware.run(prompts, sampling or Sampling(), keep_open=keep_open)
    except KeyboardInterrupt:
        interrupted = True
    except TaskFailed as error:
        failure = _failure_of(error, one_of_several=plan.nodes.count > 1 and not peers)
        if failure is None:
            raise
    if recorder is not None:
        recorder.origin = hardware.origin
    seconds = time.perf_counter() - started
    return make_report(
        plan,
        policy,
        hardware.rank_runs[0].outcome(),
        seconds,
        measured=True,
        interrupted=interrupted,
        failure=failure,
        emulation=device.emulation() if isinstance(device, Emulates) else None,
        own_bytes=plan.layout.config.ranks * device.own_bytes if isinstance(device, HasOwnBytes) else 0,
        peers=[each.plan for each in peers],
    )


def _failure_of(error: TaskFailed, *, one_of_several: bool) -> str | None:
    """The reason for an early end with a report; None if the error is to be raised."""
    cause = error.__cause__
    lost = one_of_several and isinstance(cause, TransportError)
    return str(cause) if lost or isinstance(cause, NotFinite) else None


class _HardwareRun:
    """All ranks of this process on their devices, driven in real time."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        tokens: TokenHandling | None,
        observers: Sequence[Observer],
        recorder: Recorder | LastSteps | None,
    ) -> None:
        self._ranks = ranks
        self.rank_runs = [
            assemble(
                rank,
                new_shared_engine,
                kinds=rank.device.kinds,
                tokens=tokens if number == 0 or tokens is None else tokens.unheard(),
            )
            for number, rank in enumerate(ranks)
        ]
        device = ranks[0].device
        tasks = OnDevices(ranks, [each.lanes.values() for each in self.rank_runs]) if ranks[1:] else None
        self._driver = RealtimeDriver(
            [each.engine for each in self.rank_runs],
            tasks.execute if tasks else device.execute,
            kinds={NETWORK: "guest", **device.kinds},
            streams=tasks or device.streams,
            observers=observers_of(self.rank_runs, observers, recorder),
            clock=device.clock if isinstance(device, KeepsTime) else time.perf_counter_ns,
        )

    @property
    def origin(self) -> int:
        """The device clock's time at which the run began."""
        return self._driver.origin

    def run(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keep_open: bool) -> None:
        """Generate all tokens."""
        anyio.run(self._generate, prompts, sampling, keep_open, backend_options={"use_uvloop": _has_uvloop()})

    async def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, keep_open: bool) -> None:
        try:
            with ExitStack() as opened:
                for each in self.rank_runs:
                    close_at_end(opened, each)
                for rank in reversed(self._ranks):  # here, so that Ctrl-C waits for it
                    rank.device.begin(rank.plan, prompts, sampling)
                await self._driver.run(*(each.generation.run() for each in self.rank_runs))
        finally:
            if not keep_open:
                for rank in self._ranks:
                    await rank.device.aclose()


def _has_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401  # tests only whether the module exists, which it does not on Windows
    except ImportError:
        return False
    return True
