"""Router scores: each expert's probability, beside the number of tokens that chose it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from moesched.steps.read_only import ReadOnly


class ScoredTokens(ReadOnly, Mapping[int, int]):
    """The value of `route` and `preview_route` if the plan requests scores (`Plan.request_scores`).

    As a mapping, it gives the number of tokens of each expert that has any, as without scores.

    Attributes:
        scores: for each expert of the layer, its probability by the router: a softmax over all experts in float32,
            averaged over the tokens of the micro-batch. They sum to 1.
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
        """Return the scores of all experts of a layer, as in `ScoredTokens`; pure, like `choose`."""


def with_shares(tokens: Mapping[int, int], experts: int) -> ScoredTokens:
    """Make scores where no router runs: each expert's share of the choices; equal scores if there are no choices."""
    choices = sum(tokens.values())
    if not choices:
        return ScoredTokens(tokens, [1 / experts] * experts)
    return ScoredTokens(tokens, [tokens.get(expert, 0) / choices for expert in range(experts)])
