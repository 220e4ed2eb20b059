"""The tasks of experts that run on the host, beside an accelerator with a memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moesched.models.config import ModelConfig
from moesched.steps.views import View
from moesched.tasks import HostKernel, Task

from ..kernels.layer_weights import Weights
from ..runner.micro_batch import MicroBatchState
from ..runner.observers import DeviceObservers
from .compute import Compute
from .exchange_rows import ExchangeRows
from .expert_parts import ExpertRunner
from .expert_rows import HostRows
from .experts import TorchExperts, activations


class HostExperts:
    """Runs experts on the host, and copies their input rows to the host and their output rows to the accelerator.

    Rows and weights of an expert have the same layout as on the accelerator, since the last bits of a product depend on
    the position of its operands in memory.

    Args:
        states: the state of each micro-batch, by the micro-batch's number.
        weights: a function that returns the weights of a task, given the task's operands.
        exchanged: the host's memory for the rows of all micro-batches.
        there: runs experts on the accelerator.
        observers: receive the activations of experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        states: Sequence[MicroBatchState],
        weights: Callable[[View[Any]], Weights],
        compute: Compute,
        exchanged: ExchangeRows,
        there: TorchExperts,
        observers: DeviceObservers,
    ) -> None:
        self._exchanged = exchanged
        self._states = states
        self._weights = weights
        self._experts = ExpertRunner(config, compute.kernels, compute.use_cores_for, on_host=True)
        self._there = there
        self._observers = observers

    def offload_routed(self, task: Task) -> None:
        """Copy the experts' input to the host: a row for each token, and the index of the token of each expert row."""
        rows = self._states[task.micro_batch].rows
        if not len(rows.x_nD):  # the layer has no experts
            return
        x_TD = rows.x_nD.index_select(0, rows.order.rows_Tk[:, 0])
        on_host = self._exchanged.routed(task.micro_batch, len(x_TD))
        on_host.x_TD.copy_(x_TD, non_blocking=True)
        on_host.tokens_n.copy_(rows.order.tokens_n, non_blocking=True)
        rows.on_host = HostRows(on_host)

    def run_expert(self, task: Task) -> Any:
        """Run an expert on its rows: on the host if the task is a `HostKernel`, otherwise on the accelerator.

        Returns the task's value, as `TorchExperts.run_expert` describes it; None on the host.
        """
        if not isinstance(task, HostKernel):
            return self._there.run_expert(task)
        weights, parts = self._weights(task.operands), []
        for micro_batch, start, stop in task.expert_rows:
            rows = self._states[micro_batch].rows
            assert rows.on_host is not None, "the step saw to it that the rows are there"
            part = rows.part(task.expert, start, stop)
            parts.append(part._replace(x_nD=rows.on_host.x_nD, y_nD=rows.on_host.y_nD))
        if self._observers.activations:
            activated = activations(parts, task.expert, weights)
            self._observers.activated(task.layer, (values_nI.numpy() for values_nI in activated))
        self._experts.apply(parts, task.expert, weights)
        return None

    def load_routed(self, task: Task) -> None:
        """Copy output rows of experts that ran on the host to the accelerator; adjacent rows are copied together."""
        rows = self._states[task.micro_batch].rows
        assert rows.on_host is not None, "the step saw to it that an expert ran here"
        y_nD = rows.on_host.y_nD
        for span in _joined([rows.of(expert)[ran.start : ran.stop] for expert, ran in task.operands]):
            rows.y_nD[span].copy_(y_nD[span], non_blocking=True)
        rows.on_host = None


def _joined(ranges: Sequence[range]) -> list[slice]:
    """Return ranges, which are in ascending order, as slices; adjacent ranges become one slice."""
    slices: list[slice] = []
    for each in ranges:
        if slices and slices[-1].stop == each.start:
            slices[-1] = slice(slices[-1].start, each.stop)
        else:
            slices.append(slice(each.start, each.stop))
    return slices
