"""Devices that leave their logits in files: what nodes in processes of their own are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moesched import plugins


class LoggedDevice:
    """A device that keeps all logits, and writes them to FOLDER/RANK.npy at the end; a row for each token, in order.

    Args:
        folder: where to write them.
        device: what it is otherwise, `torch` or `mlx`.
    """

    def __init__(self, checkpoint: Any, layout: Any, folder: str = "", device: str = "torch") -> None:
        self._device: Any = plugins.find("devices", device)(checkpoint, layout, keep_logits=True)
        self._folder = Path(folder)
        self._place = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def join(self, rank: int, transport: Any, first: LoggedDevice) -> None:
        """Learn which of several nodes this is."""
        self._place = rank
        self._device.join(rank, transport, self._device if first is self else first._device)

    async def aclose(self) -> None:
        """Write what was kept, and free all else."""
        logits = self._device.logits
        if logits:
            rows = np.concatenate([np.asarray(each) for _, each in logits])
            np.save(self._folder / f"{self._place}.npy", rows)
        await self._device.aclose()
