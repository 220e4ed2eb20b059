"""A thread that does a device's work for all lanes, because one thread must build and evaluate all MLX arrays."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class OneThread:
    """Runs calls from all threads on one thread, one after the other.

    Raw locks are used because a hand-over by them takes less than half as long as by an executor.
    """

    def __init__(self, name: str) -> None:
        self._turn = threading.Lock()
        self._given, self._done = threading.Lock(), threading.Lock()
        self._given.acquire()
        self._done.acquire()
        self._call: Call | None = None
        self._posted: deque[Call] = deque()
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a function on the thread, after all posted calls, and return its result.

        An error of the function or of a posted call is raised here.
        """
        with self._turn:
            self._call = (work, arguments)
            self._given.release()
            self._done.acquire()
            value, error = self._value, self._error
            self._value = self._error = self._call = None
        if error is not None:
            raise error
        result: T = value
        return result

    def post(self, work: Callable[..., object], *arguments: Any) -> None:
        """Queue a call without waking the thread: the call runs at the start of the next `call`."""
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
        with self._turn:
            self._given.release()
            self._thread.join()

    def _work(self) -> None:
        posted = self._posted
        while True:
            self._given.acquire()
            if self._call is None:
                return
            try:
                while posted:
                    work, arguments = posted.popleft()
                    work(*arguments)
                work, arguments = self._call
                self._value = work(*arguments)
            except BaseException as error:
                posted.clear()  # they build on what failed
                self._error = error
            del work, arguments
            self._done.release()
