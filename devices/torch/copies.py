"""Asynchronous copies between the host and an accelerator, through page-locked memory.

A copy from or to ordinary memory blocks its thread until the stream has reached it. Page-locked memory comes from
torch's own cache, which reuses a piece only after the copies that use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor

HOST = torch.device("cpu")


def indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of the host as an int64 tensor on the device."""
    return moved(torch.tensor(numbers, dtype=torch.int64), device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor itself if it is on the device already, otherwise an asynchronous copy on the current stream."""
    return tensor if tensor.device == device else copied(tensor, device)


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; between host and accelerator, an asynchronous one on the current stream."""
    if device.type == tensor.device.type:
        return tensor.to(device, copy=True)
    if device.type == "cpu":
        return _locked_like(tensor).copy_(tensor, non_blocking=True)
    return locked(tensor).to(device, non_blocking=True)


def locked(tensor: Tensor) -> Tensor:
    """The host's tensor in page-locked memory; itself if it is there already."""
    return tensor if tensor.is_pinned() else _locked_like(tensor).copy_(tensor)


def wait_for_copies(device: torch.device) -> None:
    """Block until the device's current stream has finished all its work; does nothing on the CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def _locked_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
