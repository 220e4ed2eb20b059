"""Log probabilities of tokens, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class WantedLogprobs(NamedTuple):
    """The log probabilities that a request asks for.

    Attributes:
        likeliest: the number of most likely tokens to return at each position, in addition to the actual token.
        prompt: whether to return log probabilities of the prompt's tokens, too.
    """

    likeliest: int
    prompt: bool = False


class Logprob(NamedTuple):
    """The natural log probability of a token, and those of the likeliest tokens at its position.

    Attributes:
        likeliest: (token, log probability) of each of the likeliest tokens, the best first.
    """

    logprob: float
    likeliest: Sequence[tuple[int, float]]


class ScoredToken(int):
    """A token with its log probability.

    Attributes:
        logprob: the token's log probability, given the tokens before it.
        prompt: log probabilities of the prompt's tokens, if the step that sampled the token also ran the prompt; else
            None.
    """

    logprob: Logprob
    prompt: list[Logprob | None] | None

    def __new__(cls, token: int, logprob: Logprob, prompt: list[Logprob | None] | None = None) -> ScoredToken:
        made = super().__new__(cls, token)
        made.logprob, made.prompt = logprob, prompt
        return made
