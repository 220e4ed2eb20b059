"""Preparations for rows of gpu_hour.py: models, llama.cpp and its model's file; some run beside the first rows."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared import gguf_files
from benchmarks.shared.fresh_process import FreshProcess, RowFailed, last_line
from moesched.models.checkpoint import open_checkpoint
from moesched.system.cores import usable_cores

LLAMA = "llama-batched-bench"
PAUSE = 0.1
NICENESS = 10
"""Of what runs beside rows that are measured."""


class Preparation(NamedTuple):
    """A call that makes something, and the preparations that it needs."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    after: tuple[str, ...] = ()


class Preparations:
    """Those that are wanted, each in a process of its own, which starts once those that it needs are done.

    Attributes:
        seconds: time that those that are done took, by name.
    """

    def __init__(self, wanted: Mapping[str, Preparation]) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = time.monotonic()
        self._waiting = dict(wanted)
        self._running: dict[str, FreshProcess] = {}
        self._failed: dict[str, str] = {}
        self._start()

    def __enter__(self) -> Preparations:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._running.values():
            process.close(gently=True)

    def advance(self) -> None:
        """Note those that have ended, and start those that waited for them."""
        for name, process in list(self._running.items()):
            if process.done():
                del self._running[name]
                try:
                    process.result(PAUSE)
                    self.seconds[name] = time.monotonic() - self._begun
                except RowFailed as error:
                    self._failed[name] = str(error)
        self._start()

    def wait(self) -> None:
        """Wait a moment for those that run."""
        time.sleep(PAUSE)
        self.advance()

    def running(self) -> list[str]:
        """Those that run now, and so take something from what is measured."""
        return sorted(self._running)

    def ready(self, names: Iterable[str]) -> bool:
        """Test whether all of these are done."""
        return all(name in self.seconds for name in names)

    def failure(self, names: Iterable[str]) -> str:
        """The reason that one of these will never be there; empty if they are or may be."""
        for name in names:
            if name in self._failed:
                return f"{name}: {self._failed[name]}"
            if not (name in self.seconds or name in self._running or name in self._waiting):
                return f"{name} was not asked for"
        return ""

    def _start(self) -> None:
        """Start those that have all that they need; those that will never have it have failed."""
        for name, each in list(self._waiting.items()):
            if reason := self.failure(each.after):
                del self._waiting[name]
                self._failed[name] = reason
            elif self.ready(each.after):
                del self._waiting[name]
                self._running[name] = FreshProcess(each.call, *each.arguments)


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
    jobs = max(1, usable_cores() // 2)
    _succeed("cmake", "--build", str(folder), "--target", LLAMA, "--parallel", str(jobs))


def write_gguf(model: Path, file: Path) -> None:
    """Write a model's weights as llama.cpp reads them, unless the file is there."""
    if file.exists():
        return
    os.nice(NICENESS)
    begun = file.with_suffix(".part")
    gguf_files.write_gguf(open_checkpoint(model), begun)
    begun.rename(file)


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
