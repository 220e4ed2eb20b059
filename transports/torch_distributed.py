"""Collectives over a process group of torch.distributed: gloo between hosts, nccl between NVIDIA GPUs."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from moesched.errors import BadInput

from .gathering import GatheringTransport

if TYPE_CHECKING:
    from moesched.seams import Array

Backend = Literal["gloo", "nccl"]


class TorchDistributedTransport(GatheringTransport):
    """Carries out collectives over gloo or nccl, for clusters that have them.

    The transport has its own group and does not use torch's global one. Nothing is encrypted, and no keys are checked.

    Args:
        rank: number of this rank, from 0.
        ranks: number of ranks.
        backend: torch's name of the library; nccl copies the bytes to the GPU and back.
        store: the store by which ranks find each other; by default the one at MASTER_ADDR and MASTER_PORT, which
            torchrun sets.
        meeting: a name that all ranks give, and that no earlier transport at the same store had.
        group: a process group to use instead of a new one; None for a new one.
        device: index of the GPU for nccl; by default the rank's number.
        timeout_seconds: time limit of an exchange.

    Raises:
        BadInput: torch was built without the backend, or the ranks cannot meet.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        *,
        backend: Backend = "gloo",
        store: Store | None = None,
        meeting: str = "",
        group: Any = None,
        device: str | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        self._device = torch.device("cpu" if backend == "gloo" else device or f"cuda:{rank}")
        try:
            self._group = group or _group(
                backend, store, meeting, rank, ranks, timedelta(seconds=timeout_seconds)
            )
        except (RuntimeError, ValueError) as error:
            raise BadInput(f"rank {rank} cannot join {ranks} ranks over {backend}: {error}") from None
        super().__init__(rank, ranks, timeout_seconds=timeout_seconds)

    def all_gather(self, data: Array) -> list[Array]:
        """Gather bytes: send `data`, and return all ranks' arrays in rank order; all ranks give equally many bytes."""
        mine = torch.from_numpy(data).to(self._device)
        found = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._group.allgather([found], [mine]).wait()
        return [each.cpu().numpy() for each in found]

    def free(self) -> None:
        """Abort the running call of the library, which the other ranks notice."""
        with suppress(RuntimeError):
            self._group.abort()


def _group(
    backend: Backend, store: Store | None, meeting: str, rank: int, ranks: int, timeout: timedelta
) -> Any:
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise BadInput(f"this build of torch has no {backend}")
    if store is None:
        store, _, _ = next(iter(rendezvous("env://", rank, ranks, timeout=timeout)))
    store = PrefixStore(meeting, store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, ranks, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, ranks, options)
