"""Calls of C functions that are made again and again with the same arguments.

A call by ctypes runs 25 µs longer where the last call's data has pushed its code out of the processor's caches, as a
kernel's weights do. So it is an object of its own, compiled in bound_call.c; without a C compiler, ctypes makes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

_VERSION = 1
"""The version of bound_call.c that fits."""

_PYTHON_API = 4
"""The flag of functions that ctypes calls without letting other Python threads run."""


def _compiled() -> Callable[..., Callable[[], int]] | None:
    try:
        module: Any = import_module("moesched.system._bound_call")
    except ImportError:
        return None
    made: Callable[..., Callable[[], int]] = module.BoundCall
    return made if module.VERSION == _VERSION else None


_make = _compiled()


def bound_call(function: Any, first: int, second: ctypes.Structure) -> Callable[[], int]:
    """Return a function that calls `function(first, &second)` and returns its int; other Python threads run meanwhile.

    Args:
        function: a ctypes function whose `argtypes` are two pointers; one of a `PyDLL` lets no other thread run.
        first: an address, which must stay valid as long as calls are made.
        second: a structure, whose fields may change between calls.
    """
    if _make is None:
        return partial(function, first, ctypes.byref(second))
    address = ctypes.cast(function, ctypes.c_void_p).value
    keeps_interpreter = bool(function._flags_ & _PYTHON_API)
    return _make(address, first, ctypes.addressof(second), keeps_interpreter, (function, second))
