"""The loading of the native library, and the instruction sets and formats that it has on this machine.

The library is compiled when the package is installed, if there is a C compiler; without it, torch computes everything.
It is called through ctypes, which lets other Python threads run meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from moesched.errors import BadInput

AUTO, TORCH = "auto", "torch"
VERSION = 17
"""The version of the C functions' signatures; a library that returns another version is not used."""

_CALLS = tuple(
    f"moesched_{name}"
    for name in (
        *("embed", "attention_inputs", "attend", "attend_prompts"),
        *("store", "output_projection", "route", "moe_layer", "logits"),
    )
)
"""Names of the functions with two parameters: the team of threads, and a pointer to a struct of arguments."""

_WHERE = Path(__file__).parent
_REMEDY = "install GCC or Clang, then moesched again"


class Library(ctypes.CDLL):
    """The functions of the native library. Other Python threads run during all calls but `moesched_embed`."""

    moesched_embed: Any


def _built() -> list[Path]:
    return sorted(_WHERE.glob("_kernels*.so"))


@cache
def library_checksum() -> str:
    """Return a checksum of the compiled library's file; empty if the library was not compiled."""
    return "".join(f"{crc32(path.read_bytes()):08x}" for path in _built()[:1])


@cache
def _loaded() -> Library | str:
    return load(_built())


def load(paths: Sequence[Path]) -> Library | str:
    """Load the library from the first of the paths; returns the library, or the reason why it cannot be used."""
    for path in paths:
        try:
            library = Library(str(path))
        except OSError as error:
            return f"{path.name} does not load ({error})"
        try:
            version = library.moesched_version()
        except AttributeError:
            version = 1
        if version != VERSION:
            return f"{path.name} has version {version} instead of {VERSION}"
        _declare(library)
        # To get the interpreter back may take longer than this call.
        library.moesched_embed = ctypes.PyDLL(str(path)).moesched_embed
        library.moesched_embed.argtypes = library.moesched_logits.argtypes
        return library
    return "it was not compiled when moesched was installed"


def _declare(library: Library) -> None:
    pointer, number, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    library.moesched_instruction_sets.restype = text
    library.moesched_formats.restype = text
    library.moesched_new_team.restype = pointer
    library.moesched_new_team.argtypes = [text, ctypes.c_int, pointer, ctypes.c_int, ctypes.c_int]
    library.moesched_free_team.restype = None
    library.moesched_free_team.argtypes = [pointer]
    shape: list[Any] = [pointer, number, number, number, pointer, number]
    library.moesched_product.argtypes = [*shape, pointer, pointer]
    library.moesched_columns.argtypes = [*shape, pointer, pointer]
    for function in _CALLS:
        getattr(library, function).argtypes = [pointer, pointer]
    library.moesched_expert.argtypes = [pointer, pointer, number, number, pointer, pointer]
    library.moesched_copy.restype = None
    library.moesched_copy.argtypes = [pointer, pointer, number]
    library.moesched_new_reads.restype = pointer
    library.moesched_new_reads.argtypes = [ctypes.c_int]
    library.moesched_free_reads.restype = None
    library.moesched_free_reads.argtypes = [pointer]
    library.moesched_read.argtypes = [pointer, pointer, number]
    library.moesched_combine.restype = None
    library.moesched_combine.argtypes = [number, number, number, *[pointer] * 5]
    library.moesched_join_mxfp4.restype = None
    library.moesched_join_mxfp4.argtypes = [number, pointer, pointer, pointer]


def library() -> Library:
    """Return the loaded library; call this only if `instruction_sets()` is not empty."""
    loaded = _loaded()
    assert isinstance(loaded, Library), loaded
    return loaded


@cache
def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets that the kernels can use on this processor, best first; none without a library."""
    loaded = _loaded()
    return () if isinstance(loaded, str) else tuple(loaded.moesched_instruction_sets().decode().split())


@cache
def formats() -> tuple[str, ...]:
    """Return the storage formats of matrices that the kernels read; C knows a format by its index in the result."""
    return tuple(library().moesched_formats().decode().split())


def why_unusable() -> str:
    """Return the reason why the native library cannot be used here; empty if it can be used."""
    loaded = _loaded()
    return loaded if isinstance(loaded, str) else ""


def availability() -> str:
    """Return a sentence for users that says which kernels are used here, or why none are."""
    here = instruction_sets()
    return (
        f"CPU kernels: {here[0]}" if here else f"no CPU kernels, torch does without: {_loaded()}: {_REMEDY}"
    )


def check_choice(kernel: str) -> None:
    """Check a user's choice of kernel: `auto`, `torch` (no native kernel), or an instruction set.

    Raises:
        BadInput: this machine has no such kernel.
    """
    here = instruction_sets()
    if kernel not in (AUTO, TORCH, *here):
        because = "" if here else f"; the CPU kernels cannot be used: {_loaded()}: {_REMEDY}"
        raise BadInput(f"kernel is {kernel!r}: give one of {', '.join((AUTO, TORCH, *here))}{because}")
