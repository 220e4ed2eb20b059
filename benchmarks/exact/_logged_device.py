"""Devices that leave their logits in files: what nodes in processes of their own are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moesched.devices.mlx.device import MlxDevice
from moesched.devices.torch.device import TorchDevice


class _Logged:
    """Keeps all logits, and writes them to FOLDER/RANK.npy at the end; a row for each token, in order.

    Args:
        folder: where to write them.
    """

    def __init__(self, checkpoint: Any, layout: Any, folder: str = "") -> None:
        super().__init__(checkpoint, layout, keep_logits=True)  # type: ignore[call-arg]  # a device comes next
        self._folder = Path(folder)
        self._place = 0

    def join(self, rank: int, transport: Any, first: Any) -> None:
        """Learn which of several nodes this is."""
        self._place = rank
        super().join(rank, transport, first)  # type: ignore[misc]  # a device comes next

    async def aclose(self) -> None:
        """Write what was kept, and free all else."""
        logits = self.logits  # type: ignore[attr-defined]  # a device's
        if logits:
            rows = np.concatenate([np.asarray(each) for _, each in logits])
            np.save(self._folder / f"{self._place}.npy", rows)
        await super().aclose()  # type: ignore[misc]  # a device comes next


class LoggedTorch(_Logged, TorchDevice):
    """The torch device, with its logits in files."""


class LoggedMlx(_Logged, MlxDevice):
    """The MLX device, with its logits in files."""
