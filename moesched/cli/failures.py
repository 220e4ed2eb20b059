"""Errors as users see them: a line on standard error and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import sysconfig
import traceback
from contextlib import suppress
from signal import SIGINT, Signals
from types import TracebackType

from moesched.errors import (
    BadInput,
    MoeschedError,
    OutOfMemory,
    PolicyError,
    TaskFailed,
    memory_refusal,
    report_of,
)
from moesched.system.plain_text import plain_text
from moesched.system.signals import exit_code_of_signal, first_signal

BAD_INPUT = 2
FAILED = 1
LONGEST_LINE = 4000
"""Characters of an error; a longer one, which quotes a long name or value, loses its middle."""

_CALLERS_OF_POLICIES = (
    "moesched.drivers.capture",
    "moesched.drivers.policies",
    "moesched.drivers.replay",
    "moesched.runs.generation",
    "moesched.runs.planning",
)


def exit_code_of(error: BaseException) -> int:
    """Print an error on standard error; returns the exit code.

    Errors in the input or in a policy are one line. An unexpected exception keeps its traceback.
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    terminal_closed = isinstance(error, OSError) and first_signal() is not None
    if isinstance(error, KeyboardInterrupt) or terminal_closed:
        _abandon_stdout()
        tell(interruption())
        return exit_code_of_signal()
    if isinstance(error, BrokenPipeError):
        return _reader_left()
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _abandon_stdout()
        tell(f"{error.filename or 'standard output'}: {error.strerror}: free some space, or write elsewhere")
        return BAD_INPUT
    if not isinstance(error, OutOfMemory) and (reason := memory_refusal(error)):
        tell(f"out of memory ({reason}): free some memory, or raise the limits of this process")
        return BAD_INPUT if report_of(error) is None else FAILED
    if type(error).__module__.startswith("cyclopts"):
        tell(f"{error} See moesched --help, or --help after a command.")
        return BAD_INPUT
    if isinstance(error, PolicyError):
        tell(f"{policy_line(error)}: {type(error).__name__}: {error}")
        return FAILED
    if isinstance(error, TaskFailed):
        return _task_failed(error)
    if isinstance(error, MoeschedError):
        tell(str(error))
        began = report_of(error) is not None
        return BAD_INPUT if isinstance(error, BadInput) and not began else FAILED
    traceback.print_exception(error, file=sys.stderr)
    return FAILED


def tell(message: str) -> None:
    """Print one line on standard error, if anybody reads it."""
    line = plain_text(" ".join(message.split()))
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"
    with suppress(OSError):
        print("moesched:", line, file=sys.stderr, flush=True)


def interruption() -> str:
    """The word for an end by a signal, with the signal's name unless it was Ctrl-C."""
    number = first_signal()
    return "interrupted" if number in (None, SIGINT) else f"interrupted ({Signals(number).name})"


def policy_line(error: BaseException) -> str:
    """The line of the policy that an error came from, as file:line; the policy's name where the line is unknown."""
    line = ""
    frames = traceback.walk_tb(error.__traceback__)
    for frame, number in frames:
        module = frame.f_globals.get("__name__", "")
        if module in _CALLERS_OF_POLICIES:
            line = ""  # inner frames are the policy, or functions that it called
        elif not _is_ours(module) and not _is_pythons(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{number}"
    return line or _method_line(error.__traceback__) or "the policy"


def _is_ours(module: str) -> bool:
    """Whether a file belongs to the framework; the policies that ship do not."""
    return f"{module}.".startswith("moesched.") and not module.startswith("moesched.policies")


def _is_pythons(file: str) -> bool:
    standard = sysconfig.get_path("stdlib")
    return file.startswith(standard) and "site-packages" not in file


def _method_line(trace: TracebackType | None) -> str:
    """The first line of the policy method that returned before its step was complete."""
    for frame, _ in traceback.walk_tb(trace):
        known = frame.f_locals
        policy = known.get("policy") or getattr(known.get("self"), "_policy", None)
        kind = getattr(known.get("step"), "kind", "")
        method = getattr(type(policy), kind, None)
        if method is not None:
            code = method.__code__
            return f"{code.co_filename}:{code.co_firstlineno} ({type(policy).__name__}.{kind})"
    return ""


def _task_failed(error: TaskFailed) -> int:
    """Print a failed task: one line for an expected error, else the traceback."""
    cause = error.__cause__
    if isinstance(cause, MoeschedError):
        tell(str(error))
        return FAILED
    traceback.print_exception(error, file=sys.stderr)
    return FAILED


def _reader_left() -> int:
    """End quietly when the reader of our output has closed it, as `head` does."""
    _abandon_stdout()
    return FAILED


def _abandon_stdout() -> None:
    """Flush what can be flushed, and prevent the interpreter's final flush, which would fail."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass
