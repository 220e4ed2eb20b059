"""Test of whether an exception comes from a signal's handler or from the code that the signal interrupted."""

from __future__ import annotations

import dis
import signal
import traceback
from functools import partial
from types import CodeType, FunctionType, MethodType

from moesched.system.signals import Stopped

RAISE = dis.opmap["RAISE_VARARGS"]
"""The instruction of a `raise` statement."""


def came_from_a_signal(error: BaseException) -> bool:
    """Test whether an exception was raised by a signal's handler, rather than by the code that the signal interrupted.

    Handlers written in Python have a frame in the traceback. Python's own handler of Ctrl-C has none: the innermost
    frame is that of the interrupted code, which is not at a `raise` statement.
    """
    if isinstance(error, Stopped):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    if any(frame.f_code in handlers for frame, _ in frames):
        return True
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if not isinstance(error, KeyboardInterrupt) or innermost is None:
        return False
    return innermost.tb_frame.f_code.co_code[innermost.tb_lasti] != RAISE


def _code(handler: object) -> CodeType | None:
    """Return the code of a signal's handler; None for handlers that are not written in Python."""
    if isinstance(handler, partial):
        return _code(handler.func)
    if isinstance(handler, MethodType):
        return _code(handler.__func__)
    return handler.__code__ if isinstance(handler, FunctionType) else None
