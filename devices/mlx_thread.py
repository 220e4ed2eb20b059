"""A thread that does a device's work for all lanes: MLX has arrays built and evaluated by one and the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class OneThread:
    """Runs what any thread hands over, one call after the other, and hands back what it comes to or raises."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)

    def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run it there; blocks until it is done."""
        return self._thread.submit(work, *arguments).result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
