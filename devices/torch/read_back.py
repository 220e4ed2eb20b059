"""Copies of small results to the host, through page-locked memory that is used again and again."""

from __future__ import annotations

from collections import defaultdict

import torch

Tensor = torch.Tensor

LEAST_READ_BACK, MOST_READ_BACK = 64, 1 << 16
"""Bytes of the least and of the largest memory for a result."""
UNREAD = 16
"""Results of a size that are not read yet: a stream has fewer tasks in its queue, so that no more memory is needed."""


class ReadBack:
    """Copies results of an accelerator to page-locked memory of the host, which is used again once they were read.

    Only tensors of up to `MOST_READ_BACK` bytes, as those of decode steps are; others get memory of their own.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        """Unused memory, by its bytes."""

    def copied(self, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
        """An asynchronous copy on the current stream, and the memory to return with `free` if it is used again."""
        if tensor.nbytes > MOST_READ_BACK:
            return tensor.to("cpu", non_blocking=True), None
        nbytes = max(LEAST_READ_BACK, 1 << (tensor.nbytes - 1).bit_length())
        unused = self._free[nbytes]
        if not unused:
            with torch.inference_mode(False):  # it is written to in every mode
                memory = torch.empty(UNREAD * nbytes, dtype=torch.uint8, pin_memory=True)
            unused.extend(memory.split(nbytes))
        memory = unused.pop()
        copy = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor, non_blocking=True), memory

    def free(self, memory: Tensor) -> None:
        """Take memory back whose copy was read."""
        self._free[memory.nbytes].append(memory)
