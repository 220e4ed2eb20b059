"""Accuracy of router forecasts: counts the experts chosen by `route` that a preview or predictor had named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moesched.tasks import DONE, Preview, Task


class Compared(NamedTuple):
    """Counts from comparing forecasts of a router's choices with the experts that the router chose.

    An expert counts once for each micro-batch and layer, however many tokens choose it.

    Attributes:
        forecasts: number of forecasts.
        chosen: number of experts that the router then chose.
        found: number of those experts that had been forecast.
    """

    forecasts: int = 0
    chosen: int = 0
    found: int = 0

    def plus(self, forecast: Mapping[int, float], chosen: Mapping[int, int]) -> Compared:
        """Return the counts after one more comparison of a forecast with the experts that the router then chose.

        Args:
            forecast: the forecast experts, each with its expected tokens.
            chosen: the chosen experts, each with its tokens.
        """
        found = len(chosen.keys() & forecast.keys())
        return Compared(self.forecasts + 1, self.chosen + len(chosen), self.found + found)


class PredictorAnswer(NamedTuple):
    """The answer of a predictor about a later layer's router.

    Attributes:
        predictor: name of the predictor's class.
        ahead: number of layers from the micro-batch's last routed layer to the layer that the answer is about.
        tokens: the expected number of tokens of each expert.
    """

    predictor: str
    ahead: int
    tokens: Mapping[int, float]

    def most_expected(self, count: int) -> dict[int, float]:
        """Return the `count` experts with the most expected tokens, each with that number."""
        ranked = sorted(self.tokens.items(), key=lambda each: (-each[1], each[0]))
        return dict(ranked[:count])


class PreviewAccuracy:
    """Compares the forecasts of a run with its routings, step by step.

    A forecast counts if `route` then routes its layer. It does not count if `post_attention` computes the layer's
    experts instead, or if a task failed.

    Attributes:
        ahead: the comparisons of previews so far, by the number of layers that they looked ahead.
        by_predictor: the comparisons of predictors' answers so far, by (predictor, number of layers ahead). If the
            router chose n experts, only the n experts with the most expected tokens in the answer are compared.
        waiting: forecasts whose layer has not been routed in this step, by (layer, micro-batch).
    """

    __slots__ = ("_pairs", "ahead", "by_predictor", "waiting")

    def __init__(self) -> None:
        self.ahead: dict[int, Compared] = {}
        self.by_predictor: dict[tuple[str, int], Compared] = {}
        self.waiting: dict[tuple[int, int], list[Preview | PredictorAnswer]] = {}
        self._pairs: list[tuple[Preview | PredictorAnswer, Task]] = []

    def expect(self, layer: int, micro_batch: int, forecast: Preview | PredictorAnswer) -> None:
        """Keep a forecast for a layer of a micro-batch until that layer is routed."""
        self.waiting.setdefault((layer, micro_batch), []).append(forecast)

    def pair(self, route: Task) -> None:
        """Pair a layer's `route` task with the forecasts of its choices, to compare them at the end of the step."""
        forecasts = self.waiting.pop((route.layer, route.micro_batch), ())
        self._pairs += [(forecast, route) for forecast in forecasts]

    def end_step(self) -> None:
        """Compare a step's pairs of forecast and routing, and drop their tasks; also called if a run ends in a step.

        At the end of a step all routings are known, since no expert runs before its layer's routing is known. The
        forecasts are known, too: a layer's previews run before its `route`, as `route` overwrites data that they read.
        """
        for forecast, route in self._pairs:
            if route.state == DONE:
                self._compare(forecast, route.value)
        self._pairs.clear()
        self.waiting.clear()

    def _compare(self, forecast: Preview | PredictorAnswer, chosen: Mapping[int, int]) -> None:
        if isinstance(forecast, PredictorAnswer):
            key = forecast.predictor, forecast.ahead
            named = forecast.most_expected(len(chosen))
            self.by_predictor[key] = self.by_predictor.get(key, Compared()).plus(named, chosen)
        elif forecast.state == DONE:
            before = self.ahead.get(forecast.ahead, Compared())
            self.ahead[forecast.ahead] = before.plus(forecast.value, chosen)
