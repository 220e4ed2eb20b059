"""Collectives over mx.distributed: a ring of sockets between Macs, or jaccl over Thunderbolt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import numpy as np

from moesched.errors import BadInput

from .gathering import GatheringTransport

if TYPE_CHECKING:
    from moesched.seams import Array

Backend = Literal["any", "ring", "jaccl", "mpi", "nccl"]


class MxDistributedTransport(GatheringTransport):
    """Carries out collectives over MLX's ring or jaccl, for clusters that have them.

    Rank and number of ranks come from MLX's group, which `mlx.launch` sets in the environment. Nothing is encrypted.

    Args:
        backend: the backend by MLX's name, such as "ring" or "jaccl"; "any" for the first that is available.
        distributed: an object with the functions `init` and `all_gather` of mx.distributed; by default the module.
        timeout_seconds: time limit of an exchange.

    Raises:
        BadInput: the backend cannot start here.
    """

    def __init__(
        self, *, backend: Backend = "any", distributed: Any = mx.distributed, timeout_seconds: float = 60.0
    ) -> None:
        self._distributed = distributed
        try:
            self._group = distributed.init(strict=True, backend=backend)
        except (RuntimeError, ValueError) as error:
            raise BadInput(
                f"mx.distributed cannot start with {backend}: {error}; start the ranks with mlx.launch"
            ) from None
        super().__init__(self._group.rank(), self._group.size(), timeout_seconds=timeout_seconds)

    def all_gather(self, data: Array) -> list[Array]:
        """Gather bytes: send `data`, and return all ranks' arrays in rank order; all ranks give equally many bytes."""
        found = self._distributed.all_gather(mx.array(data), group=self._group, stream=mx.cpu)
        gathered: Array = np.array(found)
        return list(gathered.reshape(self.ranks, -1))

    def free(self) -> None:
        """Do nothing: MLX ends its group with the process."""
