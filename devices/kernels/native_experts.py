"""The native library's kernels for one expert: one call runs the whole expert."""

from __future__ import annotations

from ..native.arguments import OneExpert
from .layer_weights import Held, Weights
from .native_kernel import NativeKernel
from .native_preparation import expert_kind, expert_weights, lies_transposed
from .native_products import ByColumns
from .seam import Bound, Case


class NativeExpert(NativeKernel):
    """Runs one expert on the rows of tokens that chose it."""

    operation = "expert"

    def refusal(self, case: Case) -> str:
        """Return why a case is refused: an expert that C cannot run, or a reason of `NativeKernel`; else empty."""
        return super().refusal(case) or unknown_experts(case)

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        network, held = case.network, Held()
        blocks = weights["gate_up" if "gate_up" in weights else "gate"]
        transposed = lies_transposed(weights)
        outputs = len(blocks[0]) if transposed else sum(map(len, blocks))
        expert = OneExpert(
            hidden=self._config.hidden,
            width=outputs // 2 if "gate_up" in weights else outputs,
            kind=expert_kind(network, transposed),
            weights=expert_weights(weights, transposed, held),
        )
        return self._threads.bound_expert(expert, [weights, held])


class NativeExpertByColumns(ByColumns, NativeExpert):
    """Runs one expert on a few rows, if its matrices are stored transposed and its activation has a limit."""

    takes = f"{ByColumns.takes}; a limited activation"

    def refusal(self, case: Case) -> str:
        """Return why a case is refused: an activation without a limit, or a reason of a base class; else empty."""
        limited = case.network.activation.limit is not None
        return super().refusal(case) or ("" if limited else "it runs experts with a limited activation")


def unknown_experts(case: Case) -> str:
    """Return why C cannot run the experts of a case's layer; empty if it can."""
    network = case.network
    known = network.is_usual or network.activation.limit is not None
    return "" if known else "it runs experts of three matrices, or with a limited activation"


NATIVE_EXPERTS = (NativeExpert, NativeExpertByColumns)
