"""Copies between the host and an accelerator that do not make the host wait: by way of page-locked memory.

A copy from or to ordinary memory holds up the thread that asks for it until its stream has come so far. Page-locked
memory comes from torch's own cache, which reuses a piece only after the copies that use it.
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
    """The tensor itself where it is on the device already, else a copy, there when the current stream comes so far."""
    return tensor if tensor.device == device else copied(tensor, device)


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of its own on the device, there when the current stream comes so far."""
    if device.type == tensor.device.type:
        return tensor.to(device, copy=True)
    if device.type == "cpu":
        return _locked_like(tensor).copy_(tensor, non_blocking=True)
    return locked(tensor).to(device, non_blocking=True)


def locked(tensor: Tensor) -> Tensor:
    """The host's tensor in page-locked memory; itself if it is there already."""
    return tensor if tensor.is_pinned() else _locked_like(tensor).copy_(tensor)


def wait_for_copies(device: torch.device) -> None:
    """Block until the current stream of the device has done all that it was given; nothing to do on the CPU."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()


def _locked_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
