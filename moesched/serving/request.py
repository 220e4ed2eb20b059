"""A request to a model that serves many: its prompt, and what is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moesched.models.kv_blocks import cached_tokens
from moesched.requests.logprobs import WantedLogprobs
from moesched.requests.sampling import Sampling


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        number: a number that no other request has.
        prompt: the number of its prompt's tokens.
        new_tokens: the most tokens to generate.
        arrives: its arrival, in nanoseconds on the run's clock.
        ids: the ids of its prompt's tokens; None where nothing is computed.
        sampling: the way that its tokens are chosen.
        logprobs: the log probabilities that it asks for; None for none.
        user: whose request it is, for admission.
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
        """The most tokens that it may have, prompt and answer together."""
        return self.prompt + self.new_tokens

    @property
    def blocks_tokens(self) -> int:
        """Tokens that it takes in the KV cache at the end, in whole blocks."""
        return cached_tokens(self.most_tokens)

    @property
    def scores_prompt(self) -> bool:
        """Whether it asks for log probabilities of its prompt."""
        return self.logprobs is not None and self.logprobs.prompt
