"""Orderly end of a program at a signal: SIGINT (Ctrl-C), SIGTERM, or SIGHUP (its terminal was closed).

The first signal raises `Stopped`, so that every `finally` runs on the way to the program's end. A part of the program
that has its own way to stop registers it with `stopped_by`; `signals_held` delays the signal while files are finished.
A second signal ends the process at once; temporary files are removed even then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from moesched.system.scratch import remove_all

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SECONDS = 0.5
"""Signals within this time count as one: a terminal that closes sends several."""
RETRY_SECONDS = 0.05
INSIST_SECONDS = 1.0

_SHOW_CURSOR = "\x1b[?25h"


class Stopped(KeyboardInterrupt):
    """Raised at the first signal that asks the program to end."""


class _Signals:
    """State of this process's signals: the first one that came, and the functions to call for it."""

    def __init__(self) -> None:
        self.in_use = False
        self.first: int | None = None
        self.stop: Callable[[], object] | None = None
        self.insist: Callable[[], object] | None = None
        self.held = 0
        self.waits_for_results = False
        self._pending = False
        self._since = 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Stop the program by `deliver` at the first signal, and end the process at once at a later one.

        A signal within `SAME_SECONDS` of the first has no effect.
        """
        now = time.monotonic()
        if self.first is None:
            self.first, self._since, self._pending = number, now, True
            self.deliver(frame)
        elif now - self._since > SAME_SECONDS:
            end_at_once()

    def deliver(self, frame: FrameType | None) -> None:
        """Stop the program because of the first signal; no effect if none came or signals are delayed.

        A signal that interrupts a module's import is delivered a little later, unless `stopped_by` has set a function.

        Args:
            frame: the frame that is interrupted; None if this is a normal call.
        """
        if self.held or self.waits_for_results or not self._pending:
            return
        if self.stop is None and _is_importing(frame):
            self._retry()
            return
        self.forget()
        if self.stop is None:
            raise Stopped
        self.stop()
        if self.insist is not None:
            self._call_after(INSIST_SECONDS, self._insist)

    def forget(self) -> None:
        """Mark the first signal as delivered; stop the timer for its next delivery, or for `insist` of `stopped_by`."""
        self._pending = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def lost(self, told: sys.UnraisableHookArgs) -> None:
        """Deliver the signal again if Python ignored the exception `Stopped`, as it does in finalizers.

        told: facts about the ignored exception, from Python, which calls this as `sys.unraisablehook`.
        """
        if isinstance(told.exc_value, Stopped):
            self._pending = True
            self._retry()
        else:
            sys.__unraisablehook__(told)

    def _retry(self) -> None:
        self._call_after(RETRY_SECONDS, self.deliver)

    def _insist(self, _: FrameType | None) -> None:
        if self.insist is not None:
            self._call_after(INSIST_SECONDS, self._insist)
            self.insist()

    @staticmethod
    def _call_after(seconds: float, act: Callable[[FrameType | None], object]) -> None:
        signal.signal(signal.SIGALRM, lambda number, frame: act(frame))
        signal.setitimer(signal.ITIMER_REAL, seconds)


_signals = _Signals()


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Until the context ends, raise `Stopped` at the first SIGINT, SIGTERM or SIGHUP, and end the process at a second.

    The context is for a whole program, on its main thread. A signal that was ignored when the program began, as under
    nohup, stays ignored. After the context all three are ignored, so that none disturbs the interpreter's end.
    """
    _signals.in_use = True
    sys.unraisablehook = _signals.lost
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _signals.handle)
    try:
        yield
    finally:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        _signals.forget()
        remove_all()  # a signal may have cut a removal short


def first_signal() -> int | None:
    """Return the number of the signal that asked this program to end; None where there was none."""
    return _signals.first


def exit_code_of_signal() -> int:
    """Return the exit code for the signal that ended this program (Ctrl-C if none is known): 128 plus its number."""
    return 128 + (_signals.first or signal.SIGINT)


def interruption() -> str:
    """Return "interrupted", with the signal's name if a signal other than Ctrl-C ended this program."""
    number = _signals.first
    return (
        "interrupted" if number in (None, signal.SIGINT) else f"interrupted ({signal.Signals(number).name})"
    )


@contextmanager
def stopped_by(stop: Callable[[], object], insist: Callable[[], object] | None = None) -> Iterator[None]:
    """Until the context ends, have the first signal call `stop` on the main thread instead of raising `Stopped`.

    The context has no effect if a thread other than the main one enters it, or if the program does not use
    `ends_in_order`.

    Args:
        insist: called each second after `stop`, until the context ends; it may raise `Stopped`. With None, only `stop`
            is called.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _signals.stop, _signals.insist
    _signals.stop, _signals.insist = stop, insist
    try:
        _signals.deliver(None)
        yield
    finally:
        _signals.stop, _signals.insist = before


@contextmanager
def ctrl_c_interrupts() -> Iterator[None]:
    """Make every Ctrl-C raise KeyboardInterrupt until the context ends, so that none ends the whole program."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def signals_held() -> Iterator[None]:
    """Delay the first signal until the context ends; where `ends_in_order` is not in use, delay Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
    elif not _signals.in_use:
        with _interrupt_held():
            yield
    else:
        _signals.held += 1
        try:
            yield
        finally:
            _signals.held -= 1
        _signals.deliver(None)


def hold_signals() -> None:
    """Delay the first signal until `release_signals`, so that results can be written first."""
    _signals.waits_for_results = _signals.in_use


def release_signals() -> None:
    """End the delay that `hold_signals` began, and deliver the signal that came meanwhile."""
    _signals.waits_for_results = False
    _signals.deliver(None)


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Delay Ctrl-C until the context ends, and then raise KeyboardInterrupt; for programs without `ends_in_order`."""
    came = False

    def remember(*_: object) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def end_at_once() -> None:
    """Remove temporary files and end this process, without any other cleanup; children of `tied_child` end, too."""
    remove_all()
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR.encode())  # a progress bar hides it
    os._exit(exit_code_of_signal())


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
