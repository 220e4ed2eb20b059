"""Copies of small results from an accelerator to the host, through page-locked memory that is reused."""

from __future__ import annotations

from collections import defaultdict

import torch

Tensor = torch.Tensor

LEAST_READ_BACK, MOST_READ_BACK = 64, 1 << 16
"""Bytes of the smallest and of the largest piece of memory for a result."""
UNREAD = 16
"""Number of pieces of one size that are allocated at once: more than a stream's queue has tasks with unread results."""


class ReadBack:
    """Copies results of an accelerator to page-locked memory of the host, which is reused once the results were read.

    Results of more than `MOST_READ_BACK` bytes get new memory each time; decode steps have none as large.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        """The unused pieces of memory, by their bytes."""

    def copied(self, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
        """Start to copy a result to the host, on the current stream.

        Returns:
            the copy; and its memory, to be passed to `free` once the copy was read. For a large result, the memory is
            None.
        """
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
        """Take back the memory of a copy, for later copies; the copy must have been read."""
        self._free[memory.nbytes].append(memory)
