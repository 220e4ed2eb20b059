"""Predictors of the experts that tokens will choose in later layers, from those layers' routers or past choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from moesched.dispatch.expert_placement import Routed
from moesched.errors import BadInput, PolicyError
from moesched.models.config import ModelConfig
from moesched.routing.files import read_routing_file
from moesched.routing.trace import RoutingTrace
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.steps.verbs.experts import note_forecast

Forecast = Mapping[int, Mapping[int, float]]
"""By micro-batch and expert: the number of the micro-batch's tokens that are expected to choose the expert."""


@runtime_checkable
class Predictor(Protocol):
    """Forecasts the experts that tokens will choose in later layers.

    Each policy object needs a predictor of its own.
    """

    def routed(self, layer: int, routed: Routed) -> None:
        """Record the experts that micro-batches chose in a layer. Layers come in ascending order, step after step.

        routed: for each micro-batch, the number of its tokens that chose each expert.
        """

    async def forecast(self, step: Step, layer: int, micro_batches: Sequence[int]) -> Forecast:
        """Forecast the experts that micro-batches will choose in a layer that they have not reached in this step.

        The method may await handles of `step`, as a policy does.

        Returns:
            For each micro-batch, the number of its tokens expected to choose each expert; what is left out counts as 0.
        """


class Forecasts:
    """A predictor whose forecasts are checked; a run's report compares the forecasts with the experts chosen later.

    Args:
        plan: passed to the predictor's constructor if that has a parameter `plan`.
        predictor: a predictor, or its class.

    Raises:
        PolicyError: the object is no predictor.
    """

    def __init__(self, plan: Plan, predictor: Predictor | type[Predictor]) -> None:
        if isinstance(predictor, type):
            make: Callable[..., Predictor] = predictor
            predictor = make(plan=plan) if "plan" in signature(make).parameters else make()
        if not isinstance(predictor, Predictor):
            raise PolicyError(
                f"{predictor!r} is no predictor: give a class or an object with the methods `routed` and `forecast` "
                "(moesched.dispatch.Predictor)"
            )
        self._experts = range(plan.layout.config.routed.experts)
        self._predictor = predictor

    def routed(self, layer: int, routed: Routed) -> None:
        """Pass the experts that micro-batches chose in a layer to the predictor."""
        self._predictor.routed(layer, routed)

    async def of(self, step: Step, layer: int, micro_batches: Sequence[int]) -> dict[int, float]:
        """Return how many tokens of the given micro-batches are expected to choose each expert of a layer, by expert.

        The expert with the highest number comes first; experts that the predictor leaves out are absent.

        Raises:
            PolicyError: the forecast is no mapping of mappings, or names an expert that does not exist or a micro-batch
                that is not in `micro_batches`.
        """
        tokens: dict[int, float] = {}
        answer = await self._predictor.forecast(step, layer, micro_batches)
        if not isinstance(answer, Mapping) or not all(isinstance(each, Mapping) for each in answer.values()):
            raise self._wrong(f"{answer!r}", layer, micro_batches)
        for j, expected in answer.items():
            for expert, share in expected.items():
                if expert not in self._experts or j not in micro_batches:
                    raise self._wrong(f"E{expert} of mb{j}", layer, micro_batches)
                tokens[expert] = tokens.get(expert, 0.0) + share
        note_forecast(step, type(self._predictor).__name__, layer, answer)
        return dict(sorted(tokens.items(), key=lambda each: (-each[1], each[0])))

    def _wrong(self, what: str, layer: int, micro_batches: Sequence[int]) -> PolicyError:
        return PolicyError(
            f"predictor {type(self._predictor).__name__} forecasts {what} in L{layer}: return {{micro-batch: {{expert: "
            f"tokens}}}} with experts 0 to {self._experts[-1]} and micro-batches among {list(micro_batches)}"
        )


class LaterRouters:
    """Predictor that applies a later layer's own router to the current hidden state (`Step.preview_route`).

    The later layer's dense weights must be on the accelerator. (Speculative expert loading, Eliseev and Mazur 2023;
    Fate, arXiv 2502.12224.)
    """

    def routed(self, layer: int, routed: Routed) -> None:
        """Do nothing, since this predictor keeps no history."""

    async def forecast(self, step: Step, layer: int, micro_batches: Sequence[int]) -> Forecast:
        """Forecast by applying the layer's router to the hidden states that the micro-batches have now."""
        previews = {j: step.preview_route(layer, j) for j in micro_batches}
        return {j: await preview for j, preview in previews.items()}


class FollowingExperts:
    """Predictor that counts, during the run, which experts follow the experts that were chosen in an earlier layer.

    It forecasts the experts that followed most often: for each micro-batch, at most as many as the micro-batch chose in
    the last layer in which it was routed. Experts that were never counted are not forecast. (ProMoE, arXiv 2410.22134,
    learns such a relation with small networks.)

    Args:
        ahead: the largest number of layers from the last routed layer to the forecast one.
        trace: path of a routing trace whose counts the predictor starts with; "" for none.

    Raises:
        BadInput: `ahead` is below 1, or the file cannot be read, is no trace, or is of another model.
    """

    def __init__(self, plan: Plan, ahead: int = 1, trace: str = "") -> None:
        config = plan.layout.config
        if ahead < 1:
            raise BadInput(f"ahead is {ahead}: give 1 or more")
        distances = range(1, ahead + 1)
        self._counts = {
            each: TransitionCounts(config.layers, config.routed.experts, each) for each in distances
        }
        self._chosen: dict[int, dict[int, Mapping[int, int]]] = {}
        """Experts that each micro-batch has chosen in this step, by layer."""
        if trace:
            known = _trace(trace, config)
            for counts in self._counts.values():
                counts.add_trace(known)

    def routed(self, layer: int, routed: Routed) -> None:
        """Count which experts of this layer followed the experts that the micro-batches chose in earlier layers.

        routed: for each micro-batch, the number of its tokens that chose each expert.
        """
        for j, chosen in routed.items():
            before = self._chosen.setdefault(j, {})
            if before and layer <= max(before):
                before.clear()  # another step
            for distance, counts in self._counts.items():
                if layer - distance in before:
                    counts.add(layer - distance, before[layer - distance], chosen)
            before[layer] = chosen

    async def forecast(self, step: Step, layer: int, micro_batches: Sequence[int]) -> Forecast:
        """Forecast the experts that most often followed the experts chosen in each micro-batch's last routed layer."""
        return {j: self._expected(layer, self._chosen.get(j, {})) for j in micro_batches}

    def _expected(self, layer: int, before: Mapping[int, Mapping[int, int]]) -> dict[int, float]:
        last = max(before, default=layer)
        counts = self._counts.get(layer - last)
        if counts is None:
            return {}
        tokens = counts.expected(last, before[last]).tolist()
        ranked = sorted(range(len(tokens)), key=lambda expert: -tokens[expert])
        return {expert: tokens[expert] for expert in ranked[: len(before[last])] if tokens[expert]}


def _trace(path: str, config: ModelConfig) -> RoutingTrace:
    found = read_routing_file(path, config)
    if not isinstance(found, RoutingTrace):
        raise BadInput(f"{path} is a routing profile, which has counts and no tokens: give a routing trace")
    return found


class TransitionCounts:
    """Numbers of tokens that chose expert a in one layer and expert b `distance` layers later, by layer, a and b.

    Args:
        layers: number of layers of the model.
        experts: number of experts in a layer.
        distance: number of layers from the earlier to the later layer of a pair.
    """

    def __init__(self, layers: int, experts: int, distance: int) -> None:
        self._distance = distance
        self._counts_LEE = np.zeros((max(0, layers - distance), experts, experts))

    def add_trace(self, trace: RoutingTrace) -> None:
        """Add 1 / top-k for each pair of experts that a token chose: one in a layer, one `distance` layers later."""
        for layer, counts_EE in enumerate(self._counts_LEE):
            earlier_Tk, later_Tk = trace.chosen[:, layer], trace.chosen[:, layer + self._distance]
            share = 1 / later_Tk.shape[1]  # as `add` divides a token
            np.add.at(counts_EE, (earlier_Tk[:, :, None], later_Tk[:, None, :]), share)

    def add(self, layer: int, earlier: Mapping[int, int], later: Mapping[int, int]) -> None:
        """Add estimated counts of pairs for a micro-batch of which only each expert's number of tokens is known.

        It is not known which token chose which expert. So each token of an expert in `layer` is divided among the later
        layer's experts, in proportion to their numbers of tokens.

        Args:
            layer: number of the earlier layer.
            earlier: number of tokens by expert id in `layer`.
            later: number of tokens by expert id `distance` layers later.
        """
        weight = np.fromiter(later.values(), float) / max(1, sum(later.values()))
        more = np.multiply.outer(np.fromiter(earlier.values(), float), weight)
        self._counts_LEE[layer][np.ix_(list(earlier), list(later))] += more

    def expected(self, layer: int, chosen: Mapping[int, int]) -> npt.NDArray[np.float64]:
        """Return the expected number of tokens of each expert (experts,) in the layer `distance` layers after `layer`.

        All numbers are 0 if no pair with one of the chosen experts was counted.

        chosen: number of tokens by expert id in `layer`.
        """
        rows = self._counts_LEE[layer][list(chosen)]
        totals = rows.sum(axis=1)
        weights = np.fromiter(chosen.values(), float) / np.where(totals > 0, totals, 1)
        expected_E: npt.NDArray[np.float64] = weights @ rows
        return expected_E
