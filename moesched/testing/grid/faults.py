"""Turns the errors of a policy under test into faults: an error's line in the policy, its message and the test case."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

from moesched.errors import BadInput, MoeschedError, PolicyError
from moesched.runs.forgotten_awaits import forgotten_awaits
from moesched.runs.policy_errors import explained, in_words, is_policys, policy_line
from moesched.seams import Policy
from moesched.system.source_lines import is_a_librarys, is_our_file, raising_line
from moesched.testing.grid.results import Fault

UNKNOWN = "the policy"


def class_line_of(policy: type[Policy]) -> str:
    """Return the first line of a policy's class, as file:line, for faults that have no other line."""
    with suppress(OSError, TypeError):
        return f"{inspect.getsourcefile(policy)}:{inspect.getsourcelines(policy)[1]}"
    return UNKNOWN


def faults_of(run: Callable[[], object], case: str, class_line: str, *, whole: bool = False) -> list[Fault]:
    """Call `run`, and return the policy's faults: the error that ended it, or a coroutine that was not awaited.

    Args:
        run: runs the policy.
        case: name of the case.
        class_line: the first line of the policy's class, as file:line.
        whole: whether faults have the whole traceback.

    Raises:
        BadInput: `run` raised it, since the policy's plan does not fit.
        Exception: `run` raised an error that is not the policy's.
    """
    failure: Exception | None = None
    with forgotten_awaits() as forgotten:
        try:
            run()
        except BadInput:
            raise
        except Exception as error:
            if not (is_policys(error) or isinstance(error, AssertionError | MoeschedError)):
                raise
            failure = error
    try:
        if failure is not None and not forgotten:
            return [_fault(failure, case, class_line, whole=whole)]
        return [_fault(each, case, class_line) for each in forgotten[:1]]
    finally:
        failure = None  # it refers to this frame


def unfit_fault(error: BadInput, case: str, class_line: str) -> Fault:
    """Return the fault to report for a policy whose plan fits in no case.

    Args:
        error: the error of the first plan.
        case: name of the first case.
        class_line: the first line of the policy's class, as file:line.
    """
    cause = error.__cause__
    line = cause.line if isinstance(cause, PolicyError) else ""
    if not line and cause is not None:
        line = raising_line(cause)
    return Fault(line=line or class_line, message=f"fits in no case: {reason_of(error)}", case=case)


def reason_of(error: BadInput) -> str:
    """Return the message of an error about a plan that does not fit, without the file:line of the policy's code."""
    return str(error.__cause__ if isinstance(error.__cause__, PolicyError) else error)


def begins_traceback(line: str) -> bool:
    """Test whether a line is the first line of a traceback by `faulthandler`."""
    return "most recent call first" in line


def endless_line(traceback: Sequence[str], class_line: str) -> str | None:
    """Return the line, as file:line, in which a policy that does not end was busy; None without a line number.

    It is the policy's innermost line in a traceback, or `class_line` if the traceback has none of the policy.

    Args:
        traceback: lines as `faulthandler` writes them, the innermost frame first.
        class_line: the first line of the policy's class, as file:line.
    """
    for line in traceback:
        file, found, rest = line.strip().removeprefix('File "').partition('", line ')
        if found and not is_a_librarys(file) and not is_our_file(file):
            number = rest.partition(" ")[0]
            return f"{file}:{number}" if number.isdecimal() else None
    return class_line


def _fault(error: Exception, case: str, class_line: str, *, whole: bool = False) -> Fault:
    line = policy_line(error).partition(" (")[0]
    more = explained(error)[1:]
    if whole:
        more = "".join(traceback.format_exception(error)).splitlines()
    return Fault(line=class_line if line == UNKNOWN else line, message=in_words(error), case=case, more=more)
