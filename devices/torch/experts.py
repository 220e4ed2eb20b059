"""Implements the runner's interface `Experts` on torch: sorts rows by expert, and runs experts on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt
import torch

from moesched.models.config import ModelConfig
from moesched.steps.views import View
from moesched.tasks import Task

from ..kernels import expert_functions
from ..kernels.layer_weights import Weights
from ..kernels.seam import RouterOutput
from ..products.linear import Tensor, gated
from ..runner.micro_batch import MicroBatchState
from ..runner.observers import DeviceObservers
from ..shared.coded import plain_block
from .at_once import AtOnce
from .compute import Compute
from .expert_parts import ExpertPart, ExpertRunner, tiles_of
from .expert_rows import ExpertRows


class TorchExperts:
    """Runs experts on the accelerator.

    Args:
        states: the state of each micro-batch, by the micro-batch's number.
        weights: a function that returns the weights of a task, given the task's operands.
        library: copies results to the host and reads the values of tasks.
        observers: get the activations of experts, if anyone observes them.
    """

    def __init__(
        self,
        config: ModelConfig,
        states: Sequence[MicroBatchState],
        weights: Callable[[View[Any]], Weights],
        compute: Compute,
        library: AtOnce,
        observers: DeviceObservers,
    ) -> None:
        self._config = config
        self._states = states
        self._weights = weights
        self._library = library
        self._use_cores_for = compute.use_cores_for
        self._kernels = compute.kernels
        self._team = compute.kernels.team
        self._runner = ExpertRunner(config, compute.kernels, compute.use_cores_for)
        self._observers = observers

    def group(self, task: Task, routed: RouterOutput, read: Callable[..., Any], *tensors: Tensor) -> Any:
        """Sort a micro-batch's rows by expert, and keep them in the micro-batch's state.

        Args:
            routed: the router's result for the micro-batch's tokens.
            read: a function that makes the task's value: the number of rows of each expert that has any. Its arguments
                are numpy arrays: the experts of each token, and then `tensors`.
            tensors: further results of the router, such as its scores.

        Returns:
            the task's value, in the form that `Library.value` returns.
        """
        network = self._config.layer(task.layer).feed_forward
        rows = ExpertRows(routed, network)
        self._states[task.micro_batch].rows = rows
        return self._library.value(task, partial(_counting, rows, read), routed.experts_Tk, *tensors)

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the probability that the router gives each of E experts, averaged over the tokens: (E), float32.

        logits_TE: the router's logits for T tokens.
        """
        return expert_functions.scores(logits_TE)

    def before_preview(self, task: Task) -> None:
        """Set torch's number of cores for a task `preview_route`, which runs a later layer's router ahead of time."""
        weights = self._weights(task.operands)
        assert weights.layer is not None, "a view shows a layer"
        tokens = len(self._states[task.micro_batch].hidden_TD)
        self._use_cores_for(tokens, self._config.hidden * weights.layer.feed_forward.experts)

    def run_all(self, task: Task, counts: Mapping[int, int], weights: Weights) -> None:
        """Run all experts that have rows, and write their outputs to the micro-batch's rows.

        Experts that torch's kernels compute run side by side, each on one core; the others run one after the other.

        Args:
            counts: number of rows of each expert that has any.
            weights: the weights of the layer.
        """
        rows: ExpertRows = self._states[task.micro_batch].rows
        activated: list[Tensor] = []
        if self._observers.activations:
            for expert in counts:
                activated += activations([rows.part(expert)], expert, weights)
        shared = [expert for expert in counts if self._is_shared_out(weights, expert, counts[expert])]
        for expert in counts.keys() - shared:
            self._runner.apply([rows.part(expert)], expert, weights)
        if self._team is not None and shared:
            shared.sort(key=counts.__getitem__, reverse=True)
            self._team.run(
                [partial(self._runner.apply_part, rows.part(expert), expert, weights) for expert in shared]
            )
        if activated:
            self._library.settled(self._library.value(task, self._reader(task.layer), *activated))

    def run_shared(self, task: Task, weights: Weights) -> None:
        """Run the layer's shared expert, if it has one."""
        rows: ExpertRows = self._states[task.micro_batch].rows
        if rows.shared is not None:
            self._runner.apply([rows.shared], None, weights)

    def run_expert(self, task: Task) -> Any:
        """Run one expert on its rows of one or several micro-batches.

        A micro-batch's results have the same bits as if the task were for this micro-batch alone.

        Returns:
            None or, if activations are observed, the task's value in the form that `Library.value` returns; reading
            this value reports the activations to the observer.
        """
        weights = self._weights(task.operands)
        parts: list[ExpertPart] = [
            self._states[micro_batch].rows.part(task.expert, start, stop)
            for micro_batch, start, stop in task.expert_rows
        ]
        self._runner.apply(parts, task.expert, weights)
        if self._observers.activations:
            activated = activations(parts, task.expert, weights)
            return self._library.value(task, self._reader(task.layer), *activated)
        return None

    def _reader(self, layer: int) -> Callable[..., None]:
        """Return a function that takes a layer's activations as numpy arrays, and reports them to the observer."""

        def read(*activated: npt.NDArray[Any]) -> None:
            self._observers.activated(layer, (values_nI.copy() for values_nI in activated))

        return read

    def warm_expert(self, task: Task) -> None:
        """Run one expert on a row of zeros, only to read its weights; the outputs are not used."""
        x_1D = torch.zeros_like(self._states[task.micro_batch].rows.x_nD[:1])
        part = ExpertPart(x_1D, torch.empty_like(x_1D), range(1), range(1))
        self._runner.apply([part], task.expert, self._weights(task.operands))

    def _is_shared_out(self, weights: Weights, expert: int, rows: int) -> bool:
        """Test whether an expert runs on one core beside other experts; False if its kernel has threads of its own.

        Args:
            weights: the weights of the layer.
            rows: the expert's number of rows.
        """
        return self._team is not None and not self._kernels.expert(weights, expert, rows)[0].has_threads


def _counting(rows: ExpertRows, read: Callable[..., Mapping[int, int]], *arrays: Any) -> Mapping[int, int]:
    """Count the rows of each expert with `read`, and store the numbers in `rows`; returns the numbers.

    Args:
        rows: the rows of the micro-batch, sorted by expert.
        read: computes the numbers from `arrays`.
        arrays: the router's results on the host.
    """
    counts = read(*arrays)
    rows.count(counts)
    return counts


def activations(parts: Iterable[ExpertPart], expert: int, weights: Weights) -> list[Tensor]:
    """Compute an expert's activations SiLU(gate x) for an observer, on the rows that a task has of each micro-batch.

    Returns:
        a float32 tensor (rows, inner size of the expert) for each tile, without the tile's rows of other tasks.
    """
    found = []
    for part in parts:
        gate = [plain_block(block, part.x_nD.dtype) for block in weights[f"experts.{expert}.gate"]]
        for tile, kept in tiles_of(part.rows, part.wanted):
            values_nI = gated(part.x_nD[tile], gate)
            found.append((values_nI if kept is None else values_nI[kept]).float())
    return found
