"""Base of policies that route several micro-batches in a layer before any of the layer's experts runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from moesched.dispatch.expert_placement import Routed
from moesched.dispatch.kv_placement import attend
from moesched.steps.step import Step
from moesched.steps.verbs.experts import At


class LayerByLayer(ABC):
    """Base of policies that choose a processor for each expert.

    A group of micro-batches (or of chunks of a long prompt) is routed before the first expert runs. So each expert is
    fetched at most once per group, and its processor is chosen once.

    A policy defines `plan` and `run_experts`. It may override `route_and_run`, for instance to await forecasts between
    routing and experts. `run_expert`, `run_on_host` and `load_back` are for use in `run_experts`.
    """

    together: int | None = None
    """Number of micro-batches that are routed together in a layer; None for all."""

    async def prefill(self, step: Step) -> None:
        """Schedule a step, layer by layer; prefill and decode use this same method."""
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            for micro_batches in _cut(step.micro_batches, self.together):
                for j in micro_batches:
                    step.pre_attention(i, j)
                    attend(step, i, j)
                await self.route_and_run(step, i, micro_batches)
                for j in micro_batches:
                    step.combine(i, j)
        for j in step.micro_batches:
            step.sample(j)

    decode = prefill

    async def route_and_run(self, step: Step, i: int, micro_batches: Sequence[int]) -> None:
        """Route a group of micro-batches in layer `i`, and run the experts that they chose."""
        routing = {j: step.route(i, j) for j in micro_batches}
        self.run_experts(step, i, {j: await handle for j, handle in routing.items()})

    @abstractmethod
    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        """Run the experts of layer `i` that a group of micro-batches chose.

        routed: for each micro-batch, the number of its tokens that chose each expert.
        """

    def run_expert(
        self, step: Step, i: int, expert: int, users: Iterable[int], at: At = "accelerator"
    ) -> None:
        """Run an expert of layer `i` on processor `at`, in one task for each micro-batch in `users`, which chose it."""
        for j in users:
            step.run_expert(i, expert, j, at=at)

    def run_on_host(
        self, step: Step, i: int, experts: Sequence[int], users: Mapping[int, Sequence[int]]
    ) -> list[int]:
        """Run experts of layer `i` on the host, in order, for the micro-batches that chose them.

        users: for each expert, the micro-batches that chose the expert.

        Returns:
            The micro-batches whose expert outputs are then on the host; pass them to `load_back`.
        """
        back = sorted({j for expert in experts for j in users[expert]})
        for j in back:
            step.offload_routed(i, j)
        for expert in experts:
            self.run_expert(step, i, expert, users[expert], "host")
        return back

    def load_back(self, step: Step, i: int, micro_batches: Iterable[int]) -> None:
        """Copy the outputs of layer `i`'s experts on the host to the accelerator, for these micro-batches."""
        for j in micro_batches:
            step.load_routed(i, j)


def _cut(micro_batches: Sequence[int], size: int | None) -> list[Sequence[int]]:
    size = size or len(micro_batches)
    return [micro_batches[first : first + size] for first in range(0, len(micro_batches), size)]
