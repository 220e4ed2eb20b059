"""What rows of gpu_hour.py need, made beside the rows that need nothing: models, a built llama.cpp, its model's file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from _fresh_process import FreshProcess, RowFailed, last_line

LLAMA = "llama-batched-bench"
PAUSE = 0.1
NICENESS = 10
"""Of a compiler that runs beside what is measured."""


class Preparation(NamedTuple):
    """A call that makes something.

    Attributes:
        after: names of those that have to be done first.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    after: tuple[str, ...] = ()


class Preparations:
    """Those that are wanted, each in a process of its own.

    Attributes:
        seconds: time that those that are done took, by name.
    """

    def __init__(self, wanted: Mapping[str, Preparation]) -> None:
        self.seconds: dict[str, float] = {}
        self._waiting = dict(wanted)
        self._running: dict[str, tuple[FreshProcess, float]] = {}
        self._failed: dict[str, str] = {}
        self.advance()

    def __enter__(self) -> Preparations:
        return self

    def __exit__(self, *error: object) -> None:
        for process, _ in self._running.values():
            process.close(gently=True)

    def advance(self) -> None:
        """Note those that have ended, and begin those that can."""
        for name, (process, begun) in list(self._running.items()):
            if process.done():
                del self._running[name]
                try:
                    process.result(PAUSE)
                    self.seconds[name] = time.monotonic() - begun
                except RowFailed as error:
                    self._failed[name] = str(error)
        for name, each in list(self._waiting.items()):
            if reason := self.failure(each.after):
                self._failed[name] = reason
                del self._waiting[name]
            elif self.ready(each.after):
                self._running[name] = FreshProcess(each.call, *each.arguments), time.monotonic()
                del self._waiting[name]

    def wait(self) -> None:
        """Wait a moment for those that run."""
        time.sleep(PAUSE)
        self.advance()

    def running(self) -> list[str]:
        """Those that run now, and so take something from what is measured."""
        return sorted(self._running)

    def ready(self, names: Iterable[str]) -> bool:
        """Whether all of these are done."""
        return all(name in self.seconds for name in names)

    def failure(self, names: Iterable[str]) -> str:
        """Why one of these will never be there; empty if they are or may be."""
        for name in names:
            if name in self._failed:
                return f"{name}: {self._failed[name]}"
            if not (name in self.seconds or name in self._running or name in self._waiting):
                return f"{name}: it was not asked for"
        return ""


def build_llama(source: Path, folder: Path) -> None:
    """Build llama.cpp's benchmark for this machine's GPU.

    Raises:
        RowFailed: it does not build.
    """
    import torch

    os.nice(NICENESS)
    major, minor = torch.cuda.get_device_capability(0)
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CUDA_ARCHITECTURES": f"{major}{minor}",
        "GGML_CUDA": "ON",
        "LLAMA_CURL": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_SERVER": "OFF",
    }
    defined = [f"-D{name}={value}" for name, value in settings.items()]
    _succeed("cmake", "-G", "Ninja", "-S", str(source), "-B", str(folder), *defined)
    _succeed("cmake", "--build", str(folder), "--target", LLAMA)


def write_gguf(model: Path, file: Path, source: Path | None) -> None:
    """Write a model's weights as llama.cpp reads them.

    source: of llama.cpp, which has the module that writes such files; None where that is installed.

    Raises:
        RowFailed: there is no such module.
    """
    from peers import gguf_file

    from moesched.models.checkpoint import open_checkpoint

    if source is not None:
        sys.path.insert(0, str(source / "gguf-py"))
    try:
        gguf_file.write_gguf(open_checkpoint(model), file)
    except ModuleNotFoundError as error:
        raise RowFailed(f"{error}: install gguf, or give --llama-source") from None


def _succeed(*command: str) -> None:
    """Run a program that prepares something.

    Raises:
        RowFailed: it is not there or fails.
    """
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise RowFailed(f"{command[0]} is not installed") from None
    except subprocess.CalledProcessError as error:
        raise RowFailed(f"{command[0]}: {last_line(error.stderr or error.stdout)}") from None
