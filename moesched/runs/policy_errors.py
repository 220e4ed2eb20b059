"""Explains a policy's error to its author: the line at fault, the policy's own frames, a hint at the likely cause."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator
from difflib import get_close_matches
from types import TracebackType
from typing import NamedTuple

from moesched.errors import MoeschedError, PolicyError, TaskCancelled
from moesched.system.source_lines import is_a_librarys, is_ours, is_pythons
from moesched.tasks import Task

MOST_FRAMES = 4
"""Largest number of frames that are shown of a deep stack: the innermost ones."""

_CALLERS_OF_POLICIES = (
    "moesched.drivers.capture",
    "moesched.drivers.policies",
    "moesched.drivers.replay",
    "moesched.plugins",
    "moesched.runs.generation",
    "moesched.runs.planning",
)

_TASKS = ("Kernel", "HostKernel", "PageTransfer", "Decision", "Preview", "Collective", "Task")
_HINTS = (
    (rf"^AttributeError: '({'|'.join(_TASKS)})'", "await the handle that a verb returns"),
    (r"^AttributeError: 'Plan' object has no attribute '\w+'$", "a plan has no verbs: call them in prefill and decode"),
    (r"^TypeError: object NoneType can't be used in 'await'", "define with `async def` what is awaited there"),
    (r"^TypeError: object \w+ can't be used in 'await'", "await one handle at a time, and only what a verb returned"),
    (r"\.(plan|prefill|decode)\(\) ", "the methods are plan(self, plan), prefill(self, step) and decode(self, step)"),
    (r"^RecursionError", "a method calls itself"),
    (r"'NoneType' object", "a verb, a method or an attribute gave None there"),
)  # fmt: skip


class Frame(NamedTuple):
    """A line of the policy's code in an error's traceback."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def source(self) -> str:
        """The text of the line, without its comment."""
        return linecache.getline(self.file, self.line).split("#")[0].strip()


def is_policys(error: BaseException) -> bool:
    """Test whether an error came from a policy's code: it broke a rule, or raised an exception of its own."""
    if isinstance(error, MoeschedError) and not isinstance(error, TaskCancelled):
        return isinstance(error, PolicyError)
    return bool(own_frames(error)) or _has_other_arguments(error)


def explained(error: BaseException) -> list[str]:
    """Return lines of text that explain a policy's error: place and message, the policy's frames if several, a hint.

    An exception group with one error is explained like that error. For a group of several, each error adds a line.
    """
    frames = own_frames(error)
    what = in_words(error)
    lines = [f"{policy_line(error)}: {what}"]
    if len(frames) > 1:
        lines += [f"  {frame} in {frame.function}: {frame.source}" for frame in frames[-MOST_FRAMES:]]
    if len(members := list(_members(error))) > 1:
        lines += [f"  {policy_line(each)}: {in_words(each)}" for each in members[:MOST_FRAMES]]
    lines += [f"  hint: {hint}" for pattern, hint in _HINTS if re.search(pattern, what)][:1]
    return lines


def _members(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of an exception group, including those of groups inside it; yield any other error itself."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _members(each)
    else:
        yield error


def _sole(error: BaseException) -> BaseException:
    """Return the single error of an exception group; return groups of several errors, and other errors, unchanged."""
    first, *others = _members(error)
    return error if others else first


def policy_line(error: BaseException) -> str:
    """Return the line of the policy that an error came from, as file:line; "the policy" where the line is unknown."""
    error = _sole(error)
    if isinstance(error, PolicyError) and error.line:
        return error.line
    frames = own_frames(error)
    return str(frames[-1]) if frames else _method_line(error.__traceback__) or "the policy"


def own_frames(error: BaseException) -> list[Frame]:
    """Return the policy's frames in an error's traceback, outermost first; of a recursion only the first frame."""
    frames: list[Frame] = []
    called = False
    for frame, number in traceback.walk_tb(_sole(error).__traceback__):
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if module in _CALLERS_OF_POLICIES:
            frames, called = [], True  # inner frames are the policy, or functions that it called
        elif is_ours(module) or is_pythons(code.co_filename):
            continue
        elif called or not is_a_librarys(code.co_filename):  # a policy may be an installed package
            found = Frame(code.co_filename, number, code.co_name)
            frames += [found] if found not in frames[-1:] else []
    return frames


def _has_other_arguments(error: BaseException) -> bool:
    """Test whether the framework's call of a policy's method failed because the method takes other arguments."""
    return isinstance(error, TypeError) and bool(
        re.search(r"\.(plan|prefill|decode)\(\) (takes|missing)", str(error))
    )


def in_words(error: BaseException) -> str:
    """Return the error's type and text, and for an unknown attribute a similar name.

    A handle's attributes are not suggested, since a policy should await the handle.
    """
    meant = ""
    error = _sole(error)
    if isinstance(error, AttributeError) and error.name and not isinstance(error.obj, Task):
        public = [name for name in dir(error.obj) if not name.startswith("_")]
        meant = "".join(f": did you mean {each!r}?" for each in get_close_matches(error.name, public, 1))
    return f"{type(error).__name__}: {error}{meant}"


def _method_line(trace: TracebackType | None) -> str:
    """Return where the policy's method in a traceback begins, as "file:line (class.method)"; "" if no method is found.

    trace: traceback of an error raised after the method ended and left its step or plan incomplete.
    """
    for policy, kind in _methods(trace):
        method = getattr(type(policy), kind, None)
        if method is not None:
            code = method.__code__
            return f"{code.co_filename}:{code.co_firstlineno} ({type(policy).__name__}.{kind})"
    return ""


def _methods(trace: TracebackType | None) -> Iterator[tuple[object, str]]:
    """Yield (policy, name of the method that ran) for each frame of a traceback in which the framework ran a policy."""
    for frame, _ in traceback.walk_tb(trace):
        known = frame.f_locals
        policy = known.get("policy") or getattr(known.get("self"), "_policy", None)
        if frame.f_globals.get("__name__") == "moesched.runs.planning":
            yield policy, "plan"
        elif "step" in known:
            yield policy, getattr(known["step"], "kind", "")
