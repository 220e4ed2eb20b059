"""Tensors of torch between kernels and the host: computed at once, or in the order of a stream."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy.typing as npt
import torch

from ..products.linear import Tensor


class AtOnce:
    """The library of a batch's verbs on torch."""

    computing: type[AbstractContextManager[object]] = torch.inference_mode

    def settle(self, micro_batch: int, *tensors: Tensor) -> None:
        """Do nothing: they are computed, or in a stream."""

    def on_host(self, tensor: Tensor) -> npt.NDArray[Any]:
        """The tensor in the host's memory; waits for the device."""
        array: npt.NDArray[Any] = tensor.cpu().numpy()
        return array


LIBRARY = AtOnce()
