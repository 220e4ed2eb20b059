"""Our expert kernel, alone."""

from __future__ import annotations

import torch

from moesched.devices.native.compiled import instruction_sets
from moesched.devices.native.kernels import NativeKernels
from peers.expert import ROWS, answers, experts
from peers.protocol import Answer, Message, serve


def load() -> tuple[Answer, Message]:
    """The kernel with the best instruction set here."""
    matrices, kernel = experts(), NativeKernels(max(ROWS))

    def call(number: int, x_nD: torch.Tensor) -> torch.Tensor:
        return kernel.expert(x_nD, *([matrix] for matrix in matrices[number]))

    return answers(matrices[0], call), {"versions": {"instructions": instruction_sets()[0]}}


if __name__ == "__main__":
    serve(load)
