"""Operations on MLX that exist only in multi-node runs: sums of the node's own experts, exchanged as numpy arrays.

Exchanges are numpy to numpy, on whatever thread; kernels before and behind them turn arrays into the host's and back on
the device's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from moesched.seams import Transport
from moesched.steps.node_tasks import ROWS, SUM
from moesched.steps.plan import Plan
from moesched.tasks import Task

from ..shared.node_exchanges import NodeExchanges
from .memory import ARRAY_DTYPES
from .micro_batch import MlxBatch
from .moe_layer import MlxMoELayer, Routed


class MlxNodeSide:
    """Runs the verbs that exist only where several nodes share a model's experts.

    Args:
        project_output: what comes before a layer's norm and router.
        sample: chooses a micro-batch's tokens, where the node attends.

    Attributes:
        verbs: what runs on the device's thread.
        exchanges: what runs where the network's lane does.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        batches: Sequence[MlxBatch],
        moe: MlxMoELayer,
        project_output: Callable[[Task], None] | None,
        sample: Callable[[Task], list[int]] | None,
    ) -> None:
        self._top_k = plan.layout.config.top_k
        self._dtype = ARRAY_DTYPES[plan.layout.dtype]
        self._batches = batches
        self._moe = moe
        self._project_output = project_output
        exchanges = NodeExchanges(plan, transport, [batch.told for batch in batches], np.asarray, sample)
        self.exchanges = exchanges.verbs
        self.verbs: dict[str, Callable[[Any], Any]] = {
            "partial_sum": self._partial_sum,
            "combine": self._add_residual,
            **exchanges.token_verbs,
        }
        if plan.nodes.centralised:
            self.verbs["route"] = self._route_for_all if plan.nodes.attends else self._take_rows

    def _partial_sum(self, task: Task) -> None:
        """The weighted sum (T, D) of what this node's own experts made, float32."""
        batch = self._batches[task.micro_batch]
        batch.told[SUM] = np.array(self._moe.partial_sum(batch))

    def _add_residual(self, task: Task) -> None:
        """The nodes' sum and the residual, rounded once, as one machine does."""
        batch = self._batches[task.micro_batch]
        batch.hidden_TD = (mx.array(batch.told.pop(SUM)) + batch.hidden_TD).astype(self._dtype)
        mx.eval(batch.hidden_TD)

    def _route_for_all(self, task: Task) -> dict[int, int]:
        assert self._project_output is not None, "the node attends"
        batch = self._batches[task.micro_batch]
        self._project_output(task)
        routed = self._moe.route(task)
        told_TX = mx.concatenate([each.astype(mx.float32) for each in routed], axis=-1)
        batch.told[ROWS] = np.array(told_TX)
        return self._moe.give_rows(batch, routed)

    def _take_rows(self, task: Task) -> dict[int, int]:
        batch, choices = self._batches[task.micro_batch], self._top_k
        told_TX = mx.array(batch.told.pop(ROWS))
        x_TD, experts_Tk, weights_Tk = (
            told_TX[:, : -2 * choices],
            told_TX[:, -2 * choices : -choices],
            told_TX[:, -choices:],
        )
        routed = Routed(x_TD.astype(self._dtype), experts_Tk.astype(mx.uint32), weights_Tk)
        return self._moe.give_rows(batch, routed)
