"""Facts about a Mac from programs of macOS, which has no /proc: the processor's name, free memory, wired memory."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence

Ask = Callable[[Sequence[str]], str]
"""Function that runs a program, and returns the text that it prints; empty where there is no such program."""

MEBIBYTE = 1 << 20

FREE_PAGES = ("free", "speculative", "inactive")
"""Pages that are free, or that the system frees when a process wants memory."""


def output_of(command: Sequence[str]) -> str:
    """Run the program `command`, and return its standard output; empty if the program is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def chip(ask: Ask = output_of) -> str:
    """Return the processor's name, such as "Apple M2 Ultra"; empty if the name is not known.

    Args:
        ask: runs a command and returns its output.
    """
    return ask(["sysctl", "-n", "machdep.cpu.brand_string"]).strip()


def free_memory(ask: Ask = output_of) -> int | None:
    """Return the bytes of the machine's memory that are free or can be freed; None if they are not known.

    Args:
        ask: runs a command and returns its output.
    """
    said = ask(["vm_stat"])
    size = re.search(r"page size of (\d+) bytes", said)
    counts = [re.search(rf"^Pages {kind}:\s+(\d+)\.", said, re.MULTILINE) for kind in FREE_PAGES]
    if size is None or not any(counts):
        return None
    return int(size[1]) * sum(int(count[1]) for count in counts if count)


def raise_wired_limit(nbytes: int) -> str:
    """Return the shell command by which a Mac's GPU may wire (pin) up to `nbytes` bytes, until the Mac restarts."""
    return f"sudo sysctl iogpu.wired_limit_mb={-(-nbytes // MEBIBYTE)}"
