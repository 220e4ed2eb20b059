"""The memory that macOS lets a GPU keep wired, and how to raise it."""

from __future__ import annotations

MEBIBYTE = 1 << 20


def raise_wired_limit(nbytes: int) -> str:
    """The shell command that lets a Mac's GPU wire `nbytes` bytes, until the Mac restarts."""
    return f"sudo sysctl iogpu.wired_limit_mb={-(-nbytes // MEBIBYTE)}"
