"""A kernel from outside the tree: an expert in float32 whose rows do not depend on each other.

    python examples/own_kernel.py

The command checks the kernel's promises, and runs a small model with it. An installed package registers its kernels as
entry points of the group `moesched.kernels`; `--device-set own_kernels=examples/own_kernel.py:RowByRow` needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import moesched
from moesched.devices.kernels.check import check_kernel
from moesched.devices.kernels.layer_weights import Weights
from moesched.devices.kernels.seam import ROWS, Bound, Case, Kernel

MODEL = Path(__file__).parent / "tiny-mixtral"
MOST_ROWS = 8


class RowByRow(Kernel):
    """Multiplies one row at a time: each output is one sum in one order, whatever the other rows."""

    operation = "expert"
    name = "row by row"
    takes = f"up to {MOST_ROWS} rows of float32 on a CPU"
    independent = True

    def __init__(self, resources: object) -> None:
        """Take nothing of what kernels share: this one needs neither threads nor the model."""

    def refusal(self, case: Case) -> str:
        """Many rows, other numbers, other devices, packed or transposed weights, experts with biases."""
        if case.rows > MOST_ROWS:
            return f"it takes up to {MOST_ROWS} rows"
        if case.dtype != "float32" or case.device != "cpu":
            return "it computes in float32 on a CPU"
        if not case.network.is_usual:
            return "it runs experts of three matrices"
        return "" if case.formats <= {ROWS} else "it reads matrices in plain rows"

    def bind(self, case: Case, weights: Weights, memory: Any) -> Bound:
        """Write silu(gate x) * up x, times down, to y, row by row."""
        gate, up, down = (weights[name] for name in ("gate", "up", "down"))

        def run(x_nD: torch.Tensor, y_nD: torch.Tensor) -> None:
            for x_D, y_D in zip(x_nD, y_nD, strict=True):
                inner_I = F.silu(multiplied(gate, x_D)) * multiplied(up, x_D)
                y_D.copy_(multiplied(down, inner_I))

        return run


def multiplied(blocks: Sequence[torch.Tensor], x_D: torch.Tensor) -> torch.Tensor:
    """A matrix in row blocks times a vector; each output is the sum of its row."""
    return torch.cat([(block * x_D).sum(dim=1) for block in blocks])


def main() -> None:
    """Check the kernel, and run a model with it and without."""
    print(f"RowByRow keeps its promises in {check_kernel(RowByRow)} cases")
    for own in ((), (RowByRow,)):
        report = moesched.run_model(
            MODEL,
            ["Once upon a time"],
            max_new_tokens=8,
            dtype="float32",
            device_settings={"own_kernels": own},
        )
        print(f"experts by {', '.join(report.kernels['expert'])}: {report.text}")


if __name__ == "__main__":
    main()
