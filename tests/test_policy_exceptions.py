"""Exceptions of a policy that would end the process are its own failure; signals stay signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial

import pytest

from meddling import CASE, CLOCKS, Everything, Meddling, refused
from moesched.runs.hardware import run
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.system.signal_origin import came_from_a_signal
from moesched.testing import run_on_symbols
from moesched.testing.policy_checks import Clock
from moesched.testing.symbolic.device import SymbolicDevice


class Shutdown(BaseException):
    """An exception that is no Exception."""


ENDS = [SystemExit(0), SystemExit("bye"), KeyboardInterrupt(), GeneratorExit(), Shutdown()]


class Raises(Everything):
    def __init__(self, error: BaseException, *, planning: bool = False) -> None:
        self.error = error
        self.planning = planning

    def plan(self, plan: Plan) -> None:
        if self.planning:
            raise self.error
        super().plan(plan)

    async def decode(self, step: Step) -> None:
        raise self.error


@pytest.mark.parametrize("planning", [False, True], ids=["in a step", "in the plan"])
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("error", ENDS, ids=repr)
def test_an_exception_that_would_end_the_process_is_the_policys_failure(
    error: BaseException, clock: Clock, planning: bool
) -> None:
    said = refused(Raises(error.with_traceback(None), planning=planning), clock)
    assert str(said).startswith(f"the policy raised {error!r}: return to end a step")
    assert said.__cause__ is error


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C and SIGTERM as in a script of one's own: the first as Python has it, the second leaves."""

    def leave(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, leave)
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_that_comes_while_a_policy_decides_stays_what_it_is(
    number: signal.Signals, raised: type[BaseException]
) -> None:
    def decide(step: Step, plan: Plan) -> None:
        signal.raise_signal(number)
        for _ in range(1000):
            """The signal interrupts this."""

    policy = Meddling(decide)
    with pytest.raises(raised):
        run_on_symbols(policy, CASE.plan(policy))


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_on_hardware_ends_the_run_with_a_report() -> None:
    def decide(step: Step, plan: Plan) -> None:
        signal.raise_signal(signal.SIGINT)

    policy = Meddling(decide)
    assert run(CASE.plan(policy), policy, SymbolicDevice(), []).interrupted


def test_a_signal_that_was_handled_by_a_method_or_a_partial_is_known(interrupts: None) -> None:
    """Handlers come as functions, methods and partials: asyncio's is the last."""

    class Server:
        def leave(self, *_: object) -> None:
            raise SystemExit(1)

    for handler in (Server().leave, partial(Server.leave, Server())):
        signal.signal(signal.SIGTERM, handler)
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGTERM)
        assert came_from_a_signal(caught.value)
