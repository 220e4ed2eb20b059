"""The tasks that only tensor-parallel runs have: all-reduces, and logits from this rank's rows of the LM head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moesched.seams import Transport
from moesched.steps.rank_tasks import LOGITS
from moesched.tasks import Collective, Task

from ..products.linear import Tensor
from ..runner.micro_batch import MicroBatchState
from ..shared.node_exchanges import exchange_of, making_part


class RankSide:
    """Runs the tasks that exist only where a model is cut over several ranks.

    Args:
        rank: this device's rank, from 0.
        transport: carries exchanges between the ranks.
        vocabulary: number of tokens in the vocabulary.
        states: the state of each micro-batch, by the micro-batch's number.
        head: a function that computes a micro-batch's logits (sequences, vocabulary / ranks), float32, from this rank's
            rows of the LM head.
        draw: a function that chooses a micro-batch's next tokens, given a task `sample` and the logits (sequences,
            vocabulary).
    """

    def __init__(
        self,
        rank: int,
        transport: Transport,
        vocabulary: int,
        states: Sequence[MicroBatchState],
        head: Callable[[MicroBatchState], Tensor],
        draw: Callable[[Task, Tensor], Any],
    ) -> None:
        self._rank = rank
        self._transport = transport
        self._vocabulary = vocabulary
        self._states = states
        self._head = head
        self._draw = draw
        self._logits_SV: dict[int, Tensor] = {}

    def all_reduce(self, task: Collective) -> None:
        """Replace a micro-batch's hidden states (or logits), a partial sum on each rank, by the sum over all ranks."""
        if task.operands == LOGITS:
            self._logits_SV[task.micro_batch] = self._sum(task, self._logits_SV[task.micro_batch])
        else:
            state = self._states[task.micro_batch]
            state.hidden_TD = self._sum(task, state.hidden_TD)

    def logits(self, task: Task) -> None:
        """Compute a micro-batch's logits for this rank's part of the vocabulary, and set all other logits to 0."""
        part_SV = self._head(self._states[task.micro_batch])
        rows = part_SV.shape[1]
        logits_SV = part_SV.new_zeros(len(part_SV), self._vocabulary)
        logits_SV[:, self._rank * rows : (self._rank + 1) * rows] = part_SV
        self._logits_SV[task.micro_batch] = logits_SV

    def sample(self, task: Task) -> Any:
        """Choose the micro-batch's next tokens from its logits, which have been summed over all ranks."""
        return self._draw(task, self._logits_SV[task.micro_batch])

    def _sum(self, task: Collective, part: Tensor) -> Tensor:
        """Exchange the partial sums of all ranks through the host's memory; returns their sum, added up in float32.

        part: this rank's partial sum; the result has the same shape, dtype and device.
        """
        with making_part(self._transport, self._rank, task):
            mine = part.float().cpu().numpy()
        total = self._transport.all_reduce(self._rank, exchange_of(task), mine)
        return torch.from_numpy(total).to(part.device, part.dtype)
