"""Loops in C that benchmarks measure limits with, compiled for this processor on first use."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from zlib import crc32

from moesched.system.cache import cache_folder

COMPILE = ("cc", "-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-pthread")


@cache
def compiled(source: Path) -> ctypes.CDLL:
    """The functions of a C file."""
    file = cache_folder() / f"{source.stem.strip('_')}-{crc32(source.read_bytes()):08x}.so"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        begun = file.with_suffix(".part")
        subprocess.run([*COMPILE, "-o", str(begun), str(source)], check=True)
        begun.replace(file)
    return ctypes.CDLL(str(file))
