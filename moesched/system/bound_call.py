"""Fast calls of C functions that are made again and again with the same arguments.

A call by ctypes takes 25 µs longer if ctypes's own code is no longer in the processor's caches, for example because a
kernel has read many weights since the last call. So bound_call.c defines a small callable object; without a C compiler,
ctypes is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

_VERSION = 2
"""The version of bound_call.c that this module expects."""

_PYTHON_API = 4
"""The flag of functions that ctypes calls without letting other Python threads run."""


def _compiled() -> Callable[..., Callable[..., int]] | None:
    try:
        module: Any = import_module("moesched.system._bound_call")
    except ImportError:
        return None
    made: Callable[..., Callable[..., int]] = module.BoundCall
    return made if module.VERSION == _VERSION else None


_make = _compiled()


def bound_call(function: Any, first: int, second: ctypes.Structure) -> Callable[..., int]:
    """Return a function that calls the C function `function(first, &second)`, and returns its int.

    The returned function takes no arguments, unless `function` takes four more, which must be 64-bit numbers or
    addresses: then the returned function takes these four, and passes them on.

    Args:
        function: a ctypes function whose `argtypes` begin with two pointers. During a call other Python threads run,
            unless the function is one of a `ctypes.PyDLL`.
        first: an address, which must stay valid as long as calls are made.
        second: a structure, whose fields may change between calls.
    """
    if _make is None:
        return partial(function, first, ctypes.byref(second))
    address = ctypes.cast(function, ctypes.c_void_p).value
    keeps_interpreter = bool(function._flags_ & _PYTHON_API)
    return _make(address, first, ctypes.addressof(second), keeps_interpreter, (function, second))
