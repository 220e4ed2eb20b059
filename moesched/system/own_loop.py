"""Running of coroutines from synchronous functions, even if an event loop already runs, as in a notebook.

A thread can run only one event loop at a time. If the calling thread runs one, the coroutine runs in a new loop on a
new thread; the calling thread waits, and passes Ctrl-C on.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


def run_on_own_loop(function: Callable[[], Awaitable[T]]) -> T:
    """Call a coroutine function, run its coroutine on a new event loop, and return the result.

    Raises:
        KeyboardInterrupt: Ctrl-C cancelled the coroutine.
    """
    return _OtherThread(function).result() if _a_loop_runs() else _run(function)


@contextmanager
def interruptible() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt at once until the context ends, even while an event loop runs."""
    if not _on_main_thread() or not _a_loop_runs():
        yield
        return
    with _at_ctrl_c(signal.default_int_handler):
        yield


class _OtherThread(Generic[T]):
    """Runs a coroutine function on a loop and a thread of its own."""

    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        self._function = function
        self._ended: Future[T] = Future()
        self._interrupted = False
        self._cancel: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._work, name="moesched loop", daemon=True)

    def result(self) -> T:
        """Start the thread, and wait for the function's result.

        The first Ctrl-C cancels the coroutine; a later one raises KeyboardInterrupt in the coroutine's code.

        Raises:
            KeyboardInterrupt: Ctrl-C cancelled the coroutine.
        """
        if _on_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with _at_ctrl_c(lambda number, frame: self._interrupt()):
                self._wait()
        else:
            self._wait()
        error = self._ended.exception()
        if self._interrupted and (error is None or isinstance(error, asyncio.CancelledError)):
            raise KeyboardInterrupt  # also where it came too late to cancel anything: the caller may have more to do
        return self._ended.result()

    def _wait(self) -> None:
        self._thread.start()
        wait([self._ended])
        self._thread.join()

    def _interrupt(self) -> None:
        if self._interrupted:
            thread, error = ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
            return
        self._interrupted = True
        if self._cancel is not None:
            self._cancel()

    def _work(self) -> None:
        try:
            self._ended.set_result(_run(self._main))
        except BaseException as error:
            self._ended.set_exception(error)

    async def _main(self) -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel)

        self._cancel = cancel
        if self._interrupted:
            cancel()
        return await self._function()


@contextmanager
def _at_ctrl_c(handler: Callable[..., object]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _a_loop_runs() -> bool:
    """Test whether an event loop runs on this thread."""
    for found in (asyncio.get_running_loop, anyio.get_cancelled_exc_class):  # the second one knows trio
        with suppress(RuntimeError):
            found()
            return True
    return False


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _run(function: Callable[[], Awaitable[T]]) -> T:
    return anyio.run(function, backend_options={"use_uvloop": _has_uvloop()})


def _has_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401  # tests only whether the module exists, which it does not on Windows
    except ImportError:
        return False
    return True
