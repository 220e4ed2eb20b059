"""Router scores: each expert's probability, beside the number of tokens that chose it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from moesched.steps.read_only import ReadOnly


class ScoredTokens(ReadOnly, Mapping[int, int]):
    """The result of the verbs `route` and `preview_route` in plans that request scores (`Plan.request_scores`).

    As a mapping it has the number of tokens that chose each expert, by expert id, without zeros, as in other plans.

    Attributes:
        scores: the router's probability of each expert of the layer, by expert id: a softmax over all experts in
            float32, averaged over the tokens of the micro-batch. The scores sum to 1.
    """

    _remedy = "copy it first, with dict(...) or list(...)"

    def __init__(self, tokens: Mapping[int, int], scores: Sequence[float]) -> None:
        self._tokens = tokens
        self.scores = tuple(scores)
        self._seal()

    def __getitem__(self, expert: int) -> int:
        return self._tokens[expert]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        return f"ScoredTokens({dict(self._tokens)}, scores={self.scores})"


@runtime_checkable
class ScoresExperts(Protocol):
    """A `Routing` that knows the router's scores, beside its choices."""

    def scores(self, step: int, layer: int, micro_batch: int, tokens: int) -> Sequence[float]:
        """Return each expert's score in a layer for a micro-batch (see `ScoredTokens`), equal for equal arguments."""


def with_shares(tokens: Mapping[int, int], experts: int) -> ScoredTokens:
    """Add scores to the token counts of a simulation, in which no router runs.

    An expert's score is its share of all choices; all scores are equal if there are no choices.

    Args:
        tokens: number of tokens by expert id.
        experts: number of experts in the layer.
    """
    choices = sum(tokens.values())
    if not choices:
        return ScoredTokens(tokens, [1 / experts] * experts)
    return ScoredTokens(tokens, [tokens.get(expert, 0) / choices for expert in range(experts)])
