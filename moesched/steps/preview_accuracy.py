"""The accuracy of previews: the experts that `preview_route` forecast, beside those that `route` then chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moesched.tasks import DONE, Preview, Task


class Compared(NamedTuple):
    """Forecasts from one distance, compared with the routings that they were of.

    An expert counts once for each micro-batch and layer, however many tokens choose it.

    Attributes:
        forecasts: number of previews.
        chosen: experts that the router then chose.
        found: those of them that had been forecast.
    """

    forecasts: int = 0
    chosen: int = 0
    found: int = 0


class PreviewAccuracy:
    """Compares the previews of a run with its routings, step by step.

    A preview counts if its layer is then routed by `route`; not before `post_attention`, nor if either task failed.

    Attributes:
        ahead: the comparisons so far, by the number of layers that the previews looked ahead.
        waiting: previews whose layer has not been routed in this step, by layer and micro-batch.
    """

    __slots__ = ("_pairs", "ahead", "waiting")

    def __init__(self) -> None:
        self.ahead: dict[int, Compared] = {}
        self.waiting: dict[tuple[int, int], list[Preview]] = {}
        self._pairs: list[tuple[Preview, Task]] = []

    def expect(self, preview: Preview) -> None:
        """Keep a preview until its layer is routed."""
        self.waiting.setdefault((preview.layer, preview.micro_batch), []).append(preview)

    def pair(self, route: Task) -> None:
        """Keep a routing beside the previews of it."""
        previews = self.waiting.pop((route.layer, route.micro_batch), ())
        self._pairs += [(preview, route) for preview in previews]

    def end_step(self) -> None:
        """Compare a step's pairs, and drop its tasks; also at the end of a run, perhaps within a step.

        At the end of a step all pairs are known: experts cannot run before their routing is, and a routing overwrites
        what its previews read.
        """
        for preview, route in self._pairs:
            if preview.state == route.state == DONE:
                self._compare(preview.ahead, preview.value, route.value)
        self._pairs.clear()
        self.waiting.clear()

    def _compare(self, ahead: int, forecast: Mapping[int, int], chosen: Mapping[int, int]) -> None:
        before = self.ahead.get(ahead, Compared())
        self.ahead[ahead] = Compared(
            before.forecasts + 1,
            before.chosen + len(chosen),
            before.found + len(chosen.keys() & forecast.keys()),
        )
