"""The native library's kernels for one expert with a limited activation, as those of gpt-oss: a call runs it whole."""

from __future__ import annotations

import torch

from ..native.arguments import LimitedExpert
from ..native.compiled import library
from ..native.kernels import NativeKernels, address, matrix_of
from .layer_weights import Blocks, Tensor, Weights
from .native_kernel import BFLOAT16, NativeKernel
from .native_products import ByColumns
from .resources import Resources
from .seam import COLUMNS, EXPERT_MATRICES, Bound, Case


class NativeLimitedExpert(NativeKernel):
    """Runs one expert with a limited activation on the rows of tokens that chose it."""

    operation = "expert"
    takes = f"{NativeKernel.takes}; a limited activation"

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        self.name = f"{self.name}, limited"

    def refusal(self, case: Case) -> str:
        """Return why a case is refused: another activation, or a reason of `NativeKernel`; else empty."""
        assert case.layer is not None, "it is in a layer"
        limited = case.layer.feed_forward.activation.limit is not None
        return super().refusal(case) or ("" if limited else "it runs experts with a limited activation")

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Return the function that runs one expert on n rows x and writes the n outputs to y: (x_nD, y_nD) -> None."""
        return _Expert(self._threads, case, weights)


class NativeLimitedExpertByColumns(ByColumns, NativeLimitedExpert):
    """Runs one expert with a limited activation on a few rows, where its matrices are stored transposed."""

    takes = f"{ByColumns.takes}; a limited activation"


class _Expert:
    """A bound expert: the arguments of its native call, and the tensors and descriptions that they point to."""

    __slots__ = ("_arguments", "_kept", "_threads")

    def __init__(self, threads: NativeKernels, case: Case, weights: Weights) -> None:
        assert case.layer is not None, "it is in a layer"
        activation = case.layer.feed_forward.activation
        assert activation.limit is not None, "the kernel refuses others"
        transposed = COLUMNS in case.formats
        parts = [
            (name, weights[name], weights.get(f"{name}_bias")) for name in EXPERT_MATRICES if name in weights
        ]
        first = weights["gate_up" if "gate_up" in weights else "gate"]
        outputs = len(first[0]) if transposed else sum(map(len, first))
        self._arguments = LimitedExpert(
            width=outputs // 2 if "gate_up" in weights else outputs,
            transposed=transposed,
            limit=activation.limit,
            alpha=activation.alpha,
        )
        self._threads = threads
        self._kept = [self._point_to(name, blocks, bias, transposed) for name, blocks, bias in parts]

    def _point_to(
        self, name: str, blocks: Blocks, bias: Blocks | None, transposed: bool
    ) -> tuple[object, ...]:
        """Write the addresses of a matrix and its bias to the arguments; returns what must stay alive."""
        field = "gate" if name == "gate_up" else name
        matrix = matrix_of([block.T for block in blocks] if transposed else blocks)
        setattr(self._arguments, field, address(matrix))
        if bias is None:
            return blocks, matrix
        bias_N = (bias[0] if len(bias) == 1 else torch.cat([*bias])).to(BFLOAT16)
        setattr(self._arguments, f"{field}_bias", bias_N.data_ptr())
        return blocks, matrix, bias_N

    def __call__(self, x_nD: Tensor, y_nD: Tensor) -> None:
        x_nD = x_nD if x_nD.stride(1) == 1 else x_nD.contiguous()
        call = LimitedExpert.from_buffer_copy(self._arguments)  # lanes may run the expert at the same time
        call.rows, call.hidden = x_nD.shape
        call.stride, call.x, call.y = x_nD.stride(0), x_nD.data_ptr(), y_nD.data_ptr()
        self._threads.call(library().moesched_limited_expert, call)


NATIVE_LIMITED_EXPERTS = (NativeLimitedExpert, NativeLimitedExpertByColumns)
