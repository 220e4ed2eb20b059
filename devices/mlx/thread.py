"""A thread that does the work of all lanes (queues of tasks), since a single thread has to handle all MLX arrays."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class _Call:
    """A call for the thread to make; has the call's result or error once the lock `ended` is released."""

    __slots__ = ("arguments", "ended", "error", "value", "work")

    def __init__(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.work = work
        self.arguments = arguments
        self.value: Any = None
        self.error: BaseException | None = None
        self.ended = threading.Lock()
        self.ended.acquire()


class OneThread:
    """Runs calls from all threads on one thread, one after the other.

    Each call has a lock, which the caller waits for and which is released when the call has ended. Handing a call to an
    executor of the standard library would take more than twice as long. Each call keeps its own result, so a caller
    that Ctrl-C interrupts does not disturb the others.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Run the function `work` on the thread, after all posted calls, and return its result.

        An error that the function or a posted call raises is raised here.
        """
        call = _Call(work, arguments)
        self._calls.put(call)
        call.ended.acquire()
        if call.error is not None:
            raise call.error
        result: T = call.value
        return result

    def post(self, work: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
        """Queue a call of `work` without waking the thread: the call is made at the start of the next `call`."""
        self._posted.append((work, arguments))

    def drop_posted(self) -> None:
        """Drop the posted calls that have not run, after a batch ended early."""
        self._posted.clear()

    @property
    def ended(self) -> bool:
        """True once the thread has ended; it then takes no more calls."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the thread."""
        self._calls.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            self._make(call)
            del call  # it holds arrays

    def _make(self, call: _Call) -> None:
        try:
            while self._posted:
                work, arguments = self._posted.popleft()
                work(*arguments)
            call.value = call.work(*call.arguments)
        except BaseException as error:
            self._posted.clear()  # they build on what failed
            call.error = error
        call.ended.release()
