"""Shows errors to the user, mostly as a line on standard error, and chooses the exit code."""

from __future__ import annotations

import errno
import inspect
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from moesched.errors import (
    BadInput,
    MoeschedError,
    OutOfMemory,
    PolicyError,
    TaskFailed,
    memory_refusal,
    report_of,
)
from moesched.runs.policy_errors import explained, is_policys
from moesched.system.plain_text import plain_text
from moesched.system.signal_origin import came_from_a_signal
from moesched.system.signals import exit_code_of_signal, first_signal, interruption
from moesched.system.standard_output import abandon, command_output
from moesched.system.whole_file import path_refusal

BAD_INPUT = 2
FAILED = 1
LONGEST_LINE = 4000
"""The most characters of an error's line; a longer one, which quotes a long name or value, loses its middle."""
OF_SEVERAL_MACHINES = ("--nodes", "--local", "--hosts", "--network")
"""Flags of other commands that users may expect `serve` to have."""
SAME_OPTIONS = (("--gen", "--max-new-tokens", "--max-tokens"), ("--model", "MODEL"))
"""Names that different commands have for one option; a command has at most one name of each tuple."""
WHOLE_TRACEBACK: ContextVar[bool] = ContextVar("whole traceback", default=False)
"""True if the command was called with --traceback."""


def exit_code_of(
    error: BaseException,
    *,
    forgotten: Sequence[PolicyError] = (),
    having: Callable[[str], Sequence[str]] = lambda _: (),
) -> int:
    """Print an error on standard error, and return the program's exit code for it.

    An error of a policy is printed with lines of the policy's code, and an unexpected error with its traceback. Bad
    input, lack of memory, Ctrl-C and other foreseen errors are printed as one line.

    Args:
        forgotten: errors about coroutines that the policy called without awaiting them. If `error` is an error of the
            policy, the first of these is printed in its place, since the missing `await` is the cause.
        having: function from an option, such as "--gen", to the names of the commands that have it.
    """
    if WHOLE_TRACEBACK.get():
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, SystemExit) and came_from_a_signal(error):  # others are a plug-in's, and failures
        return error.code if isinstance(error.code, int) else FAILED
    terminal_closed = isinstance(error, OSError) and first_signal() is not None
    if isinstance(error, KeyboardInterrupt) or terminal_closed:
        abandon(command_output())
        tell(interruption())
        return exit_code_of_signal()
    if isinstance(error, BrokenPipeError):  # the reader of standard output has closed it, as `head` does
        abandon(command_output())
        return FAILED
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        abandon(command_output())
        tell(f"{error.filename or 'standard output'}: {error.strerror}: free some space, or write elsewhere")
        return BAD_INPUT
    if not isinstance(error, OutOfMemory) and (reason := memory_refusal(error)):
        tell(f"out of memory ({reason}): free some memory, or raise the limits of this process")
        return BAD_INPUT if report_of(error) is None else FAILED
    if type(error).__module__.startswith("cyclopts"):
        tell(_refused_arguments(error, having))
        return BAD_INPUT
    if is_policys(error):
        first, *others = explained(forgotten[0] if forgotten else error)
        tell(first)
        for line in others:
            tell_more(line)
        return FAILED
    if isinstance(error, TaskFailed) and not isinstance(error.__cause__, MoeschedError):
        traceback.print_exception(error, file=sys.stderr)
        return FAILED
    if isinstance(error, MoeschedError):
        tell(str(error))
        began = report_of(error) is not None
        return BAD_INPUT if isinstance(error, BadInput) and not began else FAILED
    if isinstance(error, OSError) and (refusal := path_refusal(error)):
        tell(refusal)
        return BAD_INPUT
    traceback.print_exception(error, file=sys.stderr)
    return FAILED


def _refused_arguments(error: BaseException, having: Callable[[str], Sequence[str]]) -> str:
    """Return the message for an error with which cyclopts refused the arguments of the command line.

    Args:
        having: function from an option to the names of the commands that have it.
    """
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword} is given twice: give it once"
    if isinstance(error, UnknownOptionError) and _asks_for_several_servers(error):
        return (
            f"serve has no {error.token.keyword}: a server is one process on one machine. Predict several machines "
            "with moesched simulate --arrivals ... --nodes N"
        )
    if isinstance(error, UnknownOptionError) and (remedy := _same_option(error)):
        return remedy
    if isinstance(error, UnknownOptionError) and error.command_chain:
        flag, _, _ = (error.token.keyword or error.token.value).partition("=")
        if others := having(flag):
            command = " ".join(error.command_chain)
            return f"{command} has no {flag}, an option of {', '.join(others)}. See moesched {command} --help"
    if (
        isinstance(error, MissingArgumentError)
        and not error.tokens_so_far
        and "Did you mean" not in str(error)
    ):
        return _needed(error)
    if isinstance(error, UnusedCliTokensError):
        command, (first, *_) = " ".join(error.command_chain or ()), error.unused_tokens or [""]
        is_prompt = error.target is not None and "prompt" in inspect.signature(error.target).parameters
        remedy = (
            f"write --prompt {shlex.quote(first)} if it is the prompt, or omit it" if is_prompt else "omit it"
        )
        return f"{command} takes no argument {first!r}: {remedy}. See moesched {command} --help"
    place = _place_of_bad_value(error)
    return (
        f"{place and f'Invalid value for {place}: '}{error} See moesched --help, or --help after a command."
    )


def _place_of_bad_value(error: BaseException) -> str:
    """Return the name of a positional argument with a refused value; empty if the message of `error` needs no name."""
    if not isinstance(error, CoercionError) or error.msg is None or error.argument is None:
        return ""
    return "" if error.token is None or error.token.keyword else error.argument.name


def _asks_for_several_servers(error: UnknownOptionError) -> bool:
    return [*(error.command_chain or ())] == ["serve"] and error.token.keyword in OF_SEVERAL_MACHINES


def _same_option(error: UnknownOptionError) -> str | None:
    """Return a hint if this command has the given option, but under another name; None otherwise."""
    given, _, _ = (error.token.keyword or error.token.value).partition("=")
    own = {name for argument in error.argument_collection for name in argument.names}
    for names in SAME_OPTIONS:
        if given in names and (same := own.intersection(names)):
            return f"{' '.join(error.command_chain or ())} has no {given}: use {', '.join(same)}"
    return None


def _needed(error: MissingArgumentError) -> str:
    """Return the message for a missing argument, or for a flag without a value: its name and its meaning.

    If the command line has a word that belongs to no argument, the message asks whether the word was meant as the value
    of the missing one.
    """
    command, argument = " ".join(error.command_chain or ()), error.argument
    assert argument is not None
    choices = ", ".join(argument.get_choices() or ())
    meaning = f"{argument.parameter.help or ''} {choices and f'One of {choices}.'}"
    help = f"See moesched {command} --help"
    if error.keyword:
        return f"{error.keyword} needs a value: {meaning} {help}"
    [first, *_] = error.unused_tokens or [""]
    meant = f"Did you mean {argument.name} {first}? " if first and not first.startswith("-") else ""
    return f"{command} needs {argument.name}: {meaning} {meant}{help}"


def tell(message: str) -> None:
    """Print a message as one line on standard error; do nothing if that is closed."""
    tell_more(f"moesched: {' '.join(message.split())}")


def tell_more(text: str) -> None:
    """Print a further line below a message on standard error; do nothing if that is closed."""
    line = plain_text(text)
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        abandon(sys.stderr)
