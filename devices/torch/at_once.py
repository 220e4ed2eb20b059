"""Tensors of torch between kernels and the host: computed at once, or in the order of a stream."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy.typing as npt
import torch

from ..products.linear import Tensor


class AtOnce:
    """The `Library` of torch: tensors are computed when a kernel is called, or enqueued on a stream."""

    computing: type[AbstractContextManager[object]] = torch.inference_mode

    def settle(self, micro_batch: int, *tensors: Tensor) -> None:
        """Do nothing: torch's tensors are not lazy."""

    def on_host(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Copy a tensor to the host's memory; waits for the device."""
        array: npt.NDArray[Any] = tensor.cpu().numpy()
        return array


LIBRARY = AtOnce()
