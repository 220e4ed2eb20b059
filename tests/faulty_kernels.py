"""Kernels as authors write them: two that are right, and others with one mistake each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from moesched.devices.kernels.seam import Bound, Case, Kernel
from moesched.devices.products.linear import expert_ffn


class Plain(Kernel):
    """An expert by torch's products, of up to four rows of float32."""

    operation = "expert"
    name = "plain"
    takes = "up to 4 rows of float32"

    def __init__(self, resources: Any) -> None:
        """Take nothing of them."""

    def refusal(self, case: Case) -> str:
        return "" if case.rows <= 4 and case.dtype == "float32" else "it takes up to 4 rows of float32"

    def bind(self, case: Case, weights: Any, memory: Any) -> Bound:
        gate, up, down = (weights[name] for name in ("gate", "up", "down"))
        return lambda x_nD, y_nD: y_nD.copy_(self.computed(x_nD, gate, up, down))

    def computed(self, x_nD: torch.Tensor, *matrices: Any) -> torch.Tensor:
        """The outputs."""
        return expert_ffn(x_nD, *matrices)


class Hasty(Plain):
    """Takes what it cannot compute: leaves out the gate's SiLU."""

    name = "hasty"

    def computed(self, x_nD: torch.Tensor, *matrices: Any) -> torch.Tensor:
        gate, up, down = (torch.cat(matrix) for matrix in matrices)
        return ((x_nD @ gate.T) * (x_nD @ up.T)) @ down.T


class Dependent(Plain):
    """Calls itself independent, and scales several rows."""

    name = "dependent"
    independent = True

    def computed(self, x_nD: torch.Tensor, *matrices: Any) -> torch.Tensor:
        gate, up, down = (torch.cat(matrix) for matrix in matrices)
        inner_nI = F.silu(summed(x_nD, gate)) * summed(x_nD, up)
        return summed(inner_nI, down) * (1 + 2e-7 * (len(x_nD) > 1))


def summed(x_nD: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """The product, each output the sum of its own numbers."""
    return (x_nD[:, None] * matrix).sum(dim=-1)


class Restless(Plain):
    """Gives other bits each time."""

    name = "restless"
    calls = 0

    def computed(self, x_nD: torch.Tensor, *matrices: Any) -> torch.Tensor:
        self.calls += 1
        return expert_ffn(x_nD, *matrices) * (1 + 1e-7 * self.calls)


class Greedy(Plain):
    """Writes to its input."""

    name = "greedy"

    def computed(self, x_nD: torch.Tensor, *matrices: Any) -> torch.Tensor:
        outputs_nD = expert_ffn(x_nD, *matrices)
        x_nD.zero_()
        return outputs_nD


class Doubling(Plain):
    """Writes to its weights."""

    name = "doubling"

    def computed(self, x_nD: torch.Tensor, *matrices: Any) -> torch.Tensor:
        outputs_nD = expert_ffn(x_nD, *matrices)
        for block in matrices[0]:
            block.mul_(2)
        return outputs_nD


class Partial(Plain):
    """Leaves the last row out."""

    name = "partial"

    def bind(self, case: Case, weights: Any, memory: Any) -> Bound:
        whole = super().bind(case, weights, memory)
        return lambda x_nD, y_nD: whole(x_nD[:-1], y_nD[:-1])


class Raising(Plain):
    """Raises."""

    name = "raising"

    def computed(self, x_nD: torch.Tensor, *matrices: Any) -> torch.Tensor:
        raise ZeroDivisionError("division by zero")


class Silent(Plain):
    """Gives no text where it takes a case."""

    name = "silent"

    def refusal(self, case: Case) -> str:
        return None  # type: ignore[return-value]  # as an author may forget


class Narrow(Kernel):
    """A product that loses its last column."""

    operation = "output_projection"
    name = "narrow"
    takes = "everything"

    def __init__(self, resources: Any) -> None:
        """Take nothing of them."""

    def refusal(self, case: Case) -> str:
        return ""

    def bind(self, case: Case, weights: Any, memory: Any) -> Bound:
        return lambda attended_TX, residual_TD: residual_TD[:, :-1]


class Router(Narrow):
    """Chooses the same experts for each token, as a plain tuple; these experts do not exist."""

    operation = "route"
    name = "router"
    first = 1000

    def bind(self, case: Case, weights: Any, memory: Any) -> Bound:
        network = case.network

        def run(hidden_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
            experts_Tk = torch.arange(self.first, self.first + network.top_k).repeat(len(hidden_TD), 1)
            return hidden_TD, experts_Tk, torch.ones(experts_Tk.shape), torch.zeros(1)

        return run


class FirstExperts(Router):
    """Chooses the first experts for each token."""

    first = 0


class Nameless(Narrow):
    """Has no text that says what it takes."""

    takes = None  # type: ignore[assignment]  # as an author may forget


class Broken(Narrow):
    """Cannot be made."""

    def __init__(self, resources: Any) -> None:
        raise OSError("no such library")


class Misspelt(Narrow):
    """Has an operation that does not exist."""

    operation = "experto"


class Abstract(Kernel):
    """Has no `bind`."""

    operation, name, takes = "expert", "abstract", "everything"

    def __init__(self, resources: Any) -> None:
        """Take nothing of them."""

    def refusal(self, case: Case) -> str:
        return ""


class NotFinite(Plain):
    """Gives numbers that are not finite."""

    name = "not finite"

    def computed(self, x_nD: torch.Tensor, *matrices: Any) -> torch.Tensor:
        return torch.full_like(x_nD, torch.inf)


class Mistaken(Narrow):
    """Reads weights by the name that Hugging Face gives them."""

    name = "mistaken"

    def bind(self, case: Case, weights: Any, memory: Any) -> Bound:
        return weights["o_proj"]  # type: ignore[no-any-return]  # as an author may guess


class Forgetful(Narrow):
    """Binds to nothing."""

    name = "forgetful"

    def bind(self, case: Case, weights: Any, memory: Any) -> Bound:
        return None  # type: ignore[return-value]  # as an author may forget


class Foreign(Narrow):
    """A product that gives an array of numpy."""

    name = "foreign"

    def bind(self, case: Case, weights: Any, memory: Any) -> Bound:
        return lambda attended_TX, residual_TD: residual_TD.numpy()
