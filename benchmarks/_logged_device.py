"""The torch device, leaving its logits in a file: what nodes in processes of their own are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from moesched.devices.torch_device import TorchDevice


class LoggedDevice(TorchDevice):
    """Keeps all logits, and writes them to FOLDER/RANK.npy when it is closed; one row for each token, in their order.

    Args:
        folder: where to write them.
    """

    def __init__(self, checkpoint: Any, layout: Any, folder: str = "") -> None:
        super().__init__(checkpoint, layout, keep_logits=True)
        self._folder = Path(folder)
        self._place = 0

    def join(self, rank: int, transport: Any, first: Any) -> None:
        """Learn which of several nodes this is."""
        super().join(rank, transport, first)
        self._place = rank

    def close(self) -> None:
        """Write what was kept."""
        if self.logits:
            rows = torch.cat([logits for _, logits in self.logits]).numpy()
            np.save(self._folder / f"{self._place}.npy", rows)
        super().close()
