"""What a node of several does otherwise than a device alone: sums of its own experts, and exchanges with the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch

from moesched.parallel.node_tasks import ROWS, TOKENS
from moesched.plan import Plan
from moesched.seams import Transport
from moesched.tasks import Collective, Task

from .micro_batch import MicroBatchState
from .moe_layer import MoELayer, Routed
from .rank_side import exchange_of
from .torch_kernels import Tensor

FIRST = 0
"""The node that attends and samples in a centralised plan."""


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
        self._node = plan.node
        self._top_k = plan.layout.config.top_k
        self._transport = transport
        self._states = states
        self._moe = moe
        self._device = device
        self._dtype = dtype
        self._project_output = project_output
        self._sample = sample
        self.verbs: dict[str, Callable[[Any], Any]] = {
            "partial_sum": self._partial_sum,
            "all_reduce": self._all_reduce,
            "combine": self._add_residual,
        }
        if plan.centralised:
            self.verbs |= {"gather": self._gather, "broadcast": self._broadcast}
            self.verbs |= self._centre() if plan.attends else self._outside()

    def _centre(self) -> Mapping[str, Callable[[Any], Any]]:
        return {"route": self._route_for_all, "sample": self._sample_for_all}

    def _outside(self) -> Mapping[str, Callable[[Any], Any]]:
        return {"route": self._take_rows, "sample": self._take_tokens}

    # -- sums --------------------------------------------------------------------------------------

    def _partial_sum(self, task: Task) -> None:
        """The weighted sum (T, D) of what this node's own experts made, float32."""
        state = self._states[task.micro_batch]
        others = [expert for expert, node in task.operands.items() if node != self._node]
        state.sum_TD = self._moe.partial_sum(state, others)

    def _all_reduce(self, task: Collective) -> None:
        state = self._states[task.micro_batch]
        total = self._transport.all_reduce(self._node, exchange_of(task), _on_host(state.sum_TD))
        state.sum_TD = self._tensor(total)

    def _gather(self, task: Collective) -> None:
        state = self._states[task.micro_batch]
        parts = self._transport.gather(self._node, exchange_of(task), _on_host(state.sum_TD), FIRST)
        if parts is None:
            del state.sum_TD
        else:
            state.sum_TD = self._tensor(reduce(add, parts))

    def _add_residual(self, task: Task) -> None:
        """The nodes' sum and the residual, rounded once, as one machine does."""
        state = self._states[task.micro_batch]
        state.hidden_TD = state.sum_TD.add_(state.hidden_TD).to(self._dtype)
        del state.sum_TD

    # -- what the first node finds out, and the others are told --------------------------------------

    def _broadcast(self, task: Collective) -> None:
        told = self._states[task.micro_batch].told
        array = self._transport.broadcast(self._node, exchange_of(task), told.pop(task.operands, None), FIRST)
        if self._node != FIRST:
            told[task.operands] = array

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

    def _sample_for_all(self, task: Task) -> Any:
        assert self._sample is not None
        tokens = self._sample(task)
        self._states[task.micro_batch].told[TOKENS] = np.array(tokens, dtype=np.int64)
        return tokens

    def _take_tokens(self, task: Task) -> Any:
        return self._states[task.micro_batch].told.pop(TOKENS).tolist()

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _on_host(tensor: Tensor) -> Any:
    return tensor.cpu().numpy()
