"""A bound call of a C function does what ctypes does."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable

import pytest

from moesched.system.bound_call import bound_call

HELD = b"held by the test"


class Text(ctypes.Structure):
    _fields_ = (("text", ctypes.c_char * 8),)


def compared(text: bytes, arguments: Text) -> Callable[..., int]:
    """The call of `strcmp`, which takes two addresses."""
    address = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value
    assert address is not None
    compare = ctypes.CDLL(None).strcmp
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return bound_call(compare, address, arguments)


def test_it_passes_both_addresses_and_gives_the_result() -> None:
    assert compared(HELD, Text(b"h"))() > 0
    assert compared(HELD, Text(b"i"))() < 0


def test_it_sees_fields_that_change() -> None:
    arguments = Text(b"i")
    call = compared(HELD, arguments)
    before = call()
    arguments.text = b"h"
    assert before < 0 < call()


def test_it_passes_four_numbers_more() -> None:
    seen: list[tuple[int, ...]] = []

    def function(*given: int) -> int:
        seen.append(given)
        return 7

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 4)
    arguments = Text()
    call = bound_call(kind(function), 1, arguments)
    assert call(1 << 40, -2, 3, -(1 << 62)) == 7
    assert seen == [(1, ctypes.addressof(arguments), 1 << 40, -2, 3, -(1 << 62))]


def test_other_counts_of_numbers_are_refused() -> None:
    with pytest.raises(TypeError):
        compared(HELD, Text(b"h"))(1, 2, 3)


def test_it_keeps_its_arguments() -> None:
    arguments = Text(b"h")
    call, kept = compared(HELD, arguments), weakref.ref(arguments)
    del arguments
    gc.collect()
    assert kept() is not None
    del call
    gc.collect()
    assert kept() is None


def test_other_threads_run_meanwhile_unless_the_function_is_one_of_pythons() -> None:
    has_interpreter = [
        bound_call(library(None).PyGILState_Check, 0, Text())() for library in (ctypes.CDLL, ctypes.PyDLL)
    ]
    assert has_interpreter == [0, 1]
