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
    """Collectives over MLX's ring or jaccl, for clusters that have them.

    Rank and number of ranks are the group's, which `mlx.launch` sets in the environment. Nothing is encrypted.

    Args:
        backend: what gathers.
        distributed: the module that does it; something else that can `init` and `all_gather` in tests.
        timeout_seconds: how long an exchange may take.

    Raises:
        BadInput: the backend cannot begin here.
    """

    def __init__(
        self, *, backend: Backend = "any", distributed: Any = mx.distributed, timeout_seconds: float = 60.0
    ) -> None:
        self._distributed = distributed
        try:
            self._group = distributed.init(strict=True, backend=backend)
        except (RuntimeError, ValueError) as error:
            raise BadInput(
                f"mx.distributed cannot begin with {backend}: {error}; start the ranks with mlx.launch"
            ) from None
        super().__init__(self._group.rank(), self._group.size(), timeout_seconds=timeout_seconds)

    def all_gather(self, data: Array) -> list[Array]:
        """The bytes of all ranks, which are equally many, in their order."""
        found = self._distributed.all_gather(mx.array(data), group=self._group, stream=mx.cpu)
        gathered: Array = np.array(found)
        return list(gathered.reshape(self.ranks, -1))

    def free(self) -> None:
        """Nothing: MLX ends its group with the process."""
