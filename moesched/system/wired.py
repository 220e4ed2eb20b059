"""The memory that macOS lets a GPU keep wired, and how to raise it."""

from __future__ import annotations

MEBIBYTE = 1 << 20


def raise_wired_limit(nbytes: int) -> str:
    """The command that lets the GPU of a Mac wire that many bytes, until it starts again."""
    return f"sudo sysctl iogpu.wired_limit_mb={-(-nbytes // MEBIBYTE)}"
