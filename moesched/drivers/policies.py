"""A policy's coroutine, which both drivers step directly, so that it can await task handles and nothing else."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from moesched.errors import PolicyError, TaskCancelled
from moesched.tasks import DONE, Task


class PolicyRun:
    """One coroutine, with the handle that it awaits, and its result or error."""

    def __init__(self, main: Coroutine[Task, Any, Any], rank: int = 0) -> None:
        self.rank = rank
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.awaited: Task | None = None
        self._main = main
        self._pending: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Have the next `resume` raise an error in the coroutine, at its await."""
        self._pending = error

    def close(self) -> None:
        """Close the coroutine, which runs its `finally` blocks."""
        self.done, self.awaited = True, None
        try:
            self._main.close()
        except BaseException as error:
            self.error = error

    def resume(self) -> None:
        """Go on until the coroutine awaits a handle that has not settled, or ends."""
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
                if isinstance(error, RuntimeError) and "no running event loop" in str(error):
                    error = _awaits_a_stranger("something of asyncio")
                self.done, self.error = True, error
                return
            if not isinstance(awaited, Task):
                self._pending = _awaits_a_stranger(repr(awaited))
            elif awaited.state < DONE:
                self.awaited = awaited
                awaited.waiter = self
                if awaited.state < DONE:
                    return
                # Another thread settled it meanwhile, perhaps before `waiter` was set.
                self.awaited = None


def results_of(runs: Sequence[PolicyRun]) -> list[Any]:
    """The return values of the coroutines, after all have ended.

    Raises:
        the first error, if any; a TaskCancelled, which follows from another rank's failure, only where there is no
        other.
    """
    errors = [run.error for run in runs if run.error is not None]
    errors.sort(key=lambda error: isinstance(error, TaskCancelled))
    for run in runs:
        run.error = None  # a task refers to the run that awaited it, and an error to tasks
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()
    return [run.result for run in runs]


def _awaits_a_stranger(what: str) -> PolicyError:
    return PolicyError(
        f"a policy may await the handles of its tasks only, not {what}: a virtual clock cannot wait for it"
    )
