"""Calls from inside of a running event loop, as in a notebook: same results, and Ctrl-C ends them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
import uvloop

import moesched
from listeners import CtrlC
from moesched.steps.step import Step
from moesched.system.own_loop import interruptible, run_on_own_loop
from moesched.testing import check_policy

T = TypeVar("T")


def on_a_callback(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function that awaits nothing in a callback of a loop, where no task is current."""

    async def run() -> T:
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def step() -> None:
            try:
                main().__await__().__next__()
            except StopIteration as done:
                result.set_result(done.value)

        asyncio.get_running_loop().call_soon(step)
        return await result

    return asyncio.run(run())


LOOPS: dict[str, Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]] = {
    "asyncio": lambda main: asyncio.run(main()),
    "uvloop": lambda main: uvloop.run(main()),
    "anyio on asyncio": lambda main: anyio.run(main, backend="asyncio"),
    "anyio on trio": lambda main: anyio.run(main, backend="trio"),
    "a callback": on_a_callback,
}


def inside(loop: str, call: Callable[[], T]) -> T:
    async def main() -> T:
        return call()

    result: T = LOOPS[loop](main)
    return result


@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_gives_the_same_tokens_inside_of_a_loop(model: Path, loop: str) -> None:
    def run() -> Any:
        return moesched.run_model(model, ["abc"], policy="cgopipe", max_new_tokens=4).tokens

    before = threading.active_count()
    assert inside(loop, run) == run()
    assert threading.active_count() <= before + 1, "a loop's own executor may start one"


def test_a_run_gives_the_same_tokens_in_a_worker_thread_of_a_loop(model: Path) -> None:
    def run() -> Any:
        return moesched.run_model(model, ["abc"], max_new_tokens=2).tokens

    async def by_asyncio() -> Any:
        return await asyncio.to_thread(run)

    async def by_anyio() -> Any:
        return await anyio.to_thread.run_sync(run)

    of_workers = [anyio.run(by_asyncio), anyio.run(by_anyio), anyio.run(by_anyio, backend="trio")]
    assert of_workers == [run()] * 3


@pytest.mark.parametrize("loop", LOOPS)
def test_ctrl_c_ends_a_run_inside_of_a_loop_with_its_tokens(model: Path, loop: str) -> None:
    ctrl_c = CtrlC(3)
    report = inside(
        loop,
        lambda: moesched.run_model(model, ["abc"], policy="cgopipe", max_new_tokens=5_000, listener=ctrl_c),
    )
    assert time.process_time() - ctrl_c.pressed < 1
    assert report.interrupted
    [tokens] = report.tokens or [[]]
    assert 3 <= len(tokens) < 5_000


@pytest.mark.parametrize("loop", LOOPS)
def test_ctrl_c_ends_a_simulation_inside_of_a_loop(loop: str) -> None:
    ctrl_c = CtrlC("planned")
    with pytest.raises(KeyboardInterrupt):
        inside(
            loop,
            lambda: moesched.simulate_model(
                "mixtral-8x7b", machine="t4", policy="cgopipe", workload=[[1]], batch_size=1, listener=ctrl_c
            ),
        )


def test_the_loop_of_the_caller_hears_of_ctrl_c_again_afterwards(model: Path) -> None:
    async def main() -> None:
        moesched.run_model(model, ["abc"], max_new_tokens=1)
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_a_policy_that_never_pauses(model: Path) -> None:
    class Endless(moesched_policy("resident")):  # type: ignore[misc]  # found by its name
        async def decode(self, step: Step) -> None:
            while True:  # signals that come together count as one
                os.kill(os.getpid(), signal.SIGINT)
                until = time.monotonic() + 0.2
                while time.monotonic() < until:
                    pass

    report = inside("asyncio", lambda: moesched.run_model(model, ["abc"], policy=Endless))
    assert report.interrupted


def test_a_ctrl_c_that_comes_too_late_to_cancel_anything_is_not_lost_nor_is_an_error_on_another_thread() -> (
    None
):
    async def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    async def fail() -> None:
        raise ZeroDivisionError

    def run() -> None:
        with interruptible():
            run_on_own_loop(press)

    with pytest.raises(KeyboardInterrupt):
        inside("asyncio", run)
    with pytest.raises(ZeroDivisionError):
        inside("asyncio", lambda: run_on_own_loop(fail))


def test_the_conformance_suite_runs_inside_of_a_loop() -> None:
    inside("asyncio", lambda: check_policy(moesched_policy("resident")))


def moesched_policy(name: str) -> Any:
    from moesched.plugins import find

    return find("policies", name)
