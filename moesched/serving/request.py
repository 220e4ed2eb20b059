"""A request to a served model: its prompt, and the tokens and log probabilities that it asks for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moesched.models.kv_blocks import cached_tokens
from moesched.requests.logprobs import WantedLogprobs
from moesched.requests.sampling import Sampling


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to generate an answer to a prompt.

    Attributes:
        number: a number that no other request has.
        prompt: length of the prompt in tokens.
        new_tokens: the largest number of tokens to generate.
        arrives: time of arrival, in nanoseconds since the run had loaded the weights.
        ids: token ids of the prompt; None in simulations.
        sampling: the settings for choosing tokens.
        logprobs: the log probabilities to return; None for none.
        user: name of the user, for admission rules that share among users.
    """

    number: int
    prompt: int
    new_tokens: int
    arrives: int = 0
    ids: Sequence[int] | None = None
    sampling: Sampling = Sampling()
    logprobs: WantedLogprobs | None = None
    user: str = ""

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of the request, prompt and answer together."""
        return self.prompt + self.new_tokens

    @property
    def blocks_tokens(self) -> int:
        """Number of tokens that the request's blocks of the KV cache have room for: `most_tokens`, in whole blocks."""
        return cached_tokens(self.most_tokens)

    @property
    def scores_prompt(self) -> bool:
        """True if the request asks for log probabilities of its prompt's tokens."""
        return self.logprobs is not None and self.logprobs.prompt
