"""Operations that exist only in multi-node runs: sums of the node's own experts, rows routed by the first node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moesched.seams import Transport
from moesched.steps.node_tasks import ROWS, SUM
from moesched.steps.plan import Plan
from moesched.tasks import Task

from ..products.linear import Tensor
from ..shared.node_exchanges import NodeExchanges
from .micro_batch import MicroBatchState
from .moe_layer import MoELayer, Routed


class NodeSide:
    """Runs the verbs that exist only where several nodes share a model's experts.

    Args:
        device: where hidden states are.
        dtype: theirs.
        project_output: what comes before a layer's norm and router.
        sample: chooses a micro-batch's tokens, where the node attends.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        states: Sequence[MicroBatchState],
        moe: MoELayer,
        device: torch.device,
        dtype: torch.dtype,
        project_output: Callable[[Task], None],
        sample: Callable[[Task], Any] | None,
    ) -> None:
        self._node = plan.nodes.index
        self._top_k = plan.layout.config.top_k
        self._states = states
        self._moe = moe
        self._device = device
        self._dtype = dtype
        self._project_output = project_output
        exchanges = NodeExchanges(plan, transport, [state.told for state in states], _on_host, sample)
        self.verbs: dict[str, Callable[[Any], Any]] = {
            "partial_sum": self._partial_sum,
            "combine": self._add_residual,
            **exchanges.verbs,
            **exchanges.token_verbs,
        }
        if plan.nodes.centralised:
            self.verbs["route"] = self._route_for_all if plan.nodes.attends else self._take_rows

    def _partial_sum(self, task: Task) -> None:
        """The weighted sum (T, D) of what this node's own experts made, float32."""
        state = self._states[task.micro_batch]
        others = [expert for expert, node in task.operands.items() if node != self._node]
        state.told[SUM] = self._moe.partial_sum(state, others)

    def _add_residual(self, task: Task) -> None:
        """The nodes' sum and the residual, rounded once, as one machine does."""
        state = self._states[task.micro_batch]
        total_TD = self._tensor(state.told.pop(SUM))
        state.hidden_TD = total_TD.add_(state.hidden_TD).to(self._dtype)

    def _route_for_all(self, task: Task) -> dict[int, int]:
        state = self._states[task.micro_batch]
        self._project_output(task)
        routed = self._moe.route(task)
        state.told[ROWS] = _on_host(torch.cat([each.float() for each in routed], dim=-1))
        return self._moe.give_rows(state, routed)

    def _take_rows(self, task: Task) -> dict[int, int]:
        state = self._states[task.micro_batch]
        told_TX = self._tensor(state.told.pop(ROWS))
        choices = self._top_k
        x_TD, experts_Tk, weights_Tk = told_TX.tensor_split((-2 * choices, -choices), dim=-1)
        routed = Routed(x_TD.to(self._dtype), experts_Tk.long(), weights_Tk)
        return self._moe.give_rows(state, routed)

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _on_host(tensor: Tensor) -> Any:
    return tensor.cpu().numpy()
