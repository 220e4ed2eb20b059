"""Coroutines of policies, which drivers resume themselves, so that policies can await task handles and nothing else."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Collection, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import coroutine
from typing import Any

from moesched.errors import PolicyError, TaskCancelled
from moesched.seams import Policy
from moesched.steps.step import Step
from moesched.steps.verbs.base import gate_of
from moesched.system.signal_origin import came_from_a_signal
from moesched.tasks import DONE, Join, Lane, Task

_NEEDS_A_LOOP = re.compile("no running event loop|'create_future'|inside a task|the parent task")
"""Matches the errors of asyncio in a policy that uses it, since no event loop runs the policy."""


class PolicyCoroutine:
    """A policy's coroutine for one rank, with the task handle that it awaits, and its result or error.

    Args:
        lanes: lanes of the rank's engine; only tasks on these may be awaited.

    Attributes:
        awaited: the task that it awaits; None while it runs and once it has ended.
    """

    def __init__(self, main: Coroutine[Task, Any, Any], rank: int, lanes: Collection[Lane]) -> None:
        self.rank = rank
        self._lanes = frozenset(lanes)
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.awaited: Task | None = None
        self._main = main
        self._pending: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Have the next `resume` raise this error in the coroutine, at the line where the coroutine awaits."""
        self._pending = error

    def close(self) -> None:
        """Close the coroutine, which runs its `finally` blocks."""
        self.done, self.awaited = True, None
        try:
            self._main.close()
        except BaseException as error:
            self.error = error

    def resume(self) -> None:
        """Run the coroutine until it awaits a handle that has not settled, or ends."""
        self.awaited = None
        while True:
            try:
                if self._pending is None:
                    awaited: object = self._main.send(None)
                else:
                    error, self._pending = self._pending, None
                    awaited = self._main.throw(error)
            except StopIteration as end:
                self.done, self.result = True, end.value
                return
            except BaseException as error:
                if isinstance(error, (RuntimeError, AttributeError)) and _NEEDS_A_LOOP.search(str(error)):
                    trace = error.__traceback__
                    error = _awaits_a_stranger("something of asyncio").with_traceback(trace)
                self.done, self.error = True, error
                return
            if not isinstance(awaited, Task):
                self._pending = _awaits_a_stranger(repr(awaited))
            elif awaited.id < 0 or (awaited.lane not in self._lanes and not isinstance(awaited, Join)):
                self._pending = PolicyError(
                    f"{awaited!r} is no task of this run: await what its verbs return"
                )
            elif awaited.state < DONE:
                self.awaited = awaited
                awaited.waiter = self
                if awaited.state < DONE:
                    return
                # Another thread settled it meanwhile, perhaps before `waiter` was set.
                self.awaited = None


@coroutine
def scheduled(policy: Policy, step: Step) -> Generator[Task, None, None]:
    """Let a policy schedule a step; yields each handle that the policy awaits, for the driver to wait for.

    While the policy waits, and once it has ended, calls of the step's verbs are refused. A step in which any
    micro-batch decodes is scheduled by the policy's `decode`, any other step by its `prefill`.

    Raises:
        PolicyError: the method is not `async def`, or raised something that is no `Exception`, such as SystemExit.
    """
    gate, thrown = gate_of(step), None
    try:
        gate.open()
        main: object = policy.prefill(step) if step.kind == "prefill" else policy.decode(step)
        if not isinstance(main, Coroutine):
            raise _no_coroutine(policy, step, main)
        while True:
            awaited = main.send(None) if thrown is None else main.throw(thrown)
            gate.close()
            try:
                thrown = None
                yield awaited
            except (
                BaseException
            ) as error:  # the driver threw it: the policy awaits something else, or the run ends
                thrown = error.with_traceback(None)
            gate.open()
    except StopIteration:
        return
    except BaseException as error:
        if error is thrown:
            raise
        with policys_failures():
            raise
    finally:
        gate.end()
        thrown = None  # its traceback refers to this frame


@contextmanager
def policys_failures() -> Iterator[None]:
    """Turn whatever a policy's code raises in this context into an `Exception`, unless a signal raised it.

    Otherwise a policy that raises SystemExit would silently end the process.

    Raises:
        PolicyError: the policy raised something that is no `Exception`.
    """
    try:
        yield
    except (AttributeError, TypeError) as error:
        if not any(f"'{kind}' object" in str(error) for kind in ("mappingproxy", "ScoredTokens")):
            raise
        failure = PolicyError(
            f"the plan requests no router scores: call plan.request_scores() in Policy.plan: {error}"
            if "attribute 'scores'" in str(error)
            else f"what a plan or a task gives is read-only: copy it first, with dict(...): {error}"
        )
        raise failure.with_traceback(error.__traceback__) from error
    except Exception:
        raise
    except BaseException as error:
        if came_from_a_signal(error):
            raise
        failure = PolicyError(
            f"the policy raised {error!r}: return to end a step, raise an Exception to fail"
        )
        raise failure.with_traceback(error.__traceback__) from error


def results_of(runs: Sequence[PolicyCoroutine]) -> list[Any]:
    """Return the result of each coroutine, after all of them have ended.

    Raises:
        Exception: the first error of a coroutine. A TaskCancelled, which follows from another rank's failure, is raised
            only if no coroutine has another error.
    """
    errors = [run.error for run in runs if run.error is not None]
    errors.sort(key=_only_cancelled)
    for run in runs:
        run.error = None  # a task refers to the run that awaited it, and an error to tasks
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()
    return [run.result for run in runs]


def _only_cancelled(error: BaseException) -> bool:
    """Test whether an error is a TaskCancelled, or a group of nothing else."""
    if isinstance(error, BaseExceptionGroup):
        _, others = error.split(TaskCancelled)
        return others is None
    return isinstance(error, TaskCancelled)


def _no_coroutine(policy: Policy, step: Step, gave: object) -> PolicyError:
    method = f"{'prefill' if step.kind == 'prefill' else 'decode'} of {type(policy).__name__}"
    if isinstance(gave, AsyncGenerator):
        return PolicyError(f"{method} has a `yield`, which makes it a generator: await handles instead")
    return PolicyError(f"{method} gave {gave!r}, no coroutine: define it `async def`")


def _awaits_a_stranger(what: str) -> PolicyError:
    return PolicyError(
        f"a policy may await the handles of its tasks only, not {what}: a virtual clock cannot wait for it"
    )
