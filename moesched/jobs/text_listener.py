"""Decodes a batch's tokens to text as they are generated, for a listener."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moesched.inputs.tokenizer import TextStream, Tokenizer
from moesched.runs.listeners import Listener


class TextListener:
    """Decodes a batch's tokens to text; passes tokens and text to a listener, with each request's index in the run.

    Args:
        tokenizer: decodes tokens; None to pass the tokens' numbers as text.
        prompts: token ids of each prompt of the batch.
        first: index of the batch's first request in the run.
        stop_tokens: ids of tokens, each of which ends its request.
        new_tokens: the largest number of tokens of a request.

    Attributes:
        texts: the text of each request so far; None without a tokenizer.
    """

    def __init__(
        self,
        listener: Listener,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Sequence[int]],
        first: int,
        stop_tokens: Sequence[int],
        new_tokens: int,
    ) -> None:
        self.listener = listener
        self.texts = None if tokenizer is None else [""] * len(prompts)
        self._streams = None if tokenizer is None else [TextStream(tokenizer, prompt) for prompt in prompts]
        self._counts = [0] * len(prompts)
        self._open = dict.fromkeys(range(len(prompts)))
        self._first = first
        self._stop_tokens = frozenset(stop_tokens)
        self._new_tokens = new_tokens

    def tell(self, fresh: dict[int, int]) -> None:
        """Pass new tokens on to the listener; `fresh` has the token of each request, by its index in the batch."""
        for request, token in fresh.items():
            self._counts[request] += 1
            self.listener.generated(self._first + request, token, self._text(request, token))
            if token in self._stop_tokens or self._counts[request] == self._new_tokens:
                self._finish(request)

    def tell_all(self, fresh: Mapping[int, Sequence[int]]) -> None:
        """Pass new tokens on to the listener; `fresh` has several tokens of each request, by its index in the batch."""
        for request, tokens in fresh.items():
            for token in tokens:
                self.tell({request: token})

    def finish_all(self) -> None:
        """Pass the held-back text of all requests on to the listener; call this at the end of the batch."""
        for request in list(self._open):
            self._finish(request)

    def _finish(self, request: int) -> None:
        if request in self._open:
            del self._open[request]
            self.listener.finished(self._first + request, self._text(request, None))

    def _text(self, request: int, token: int | None) -> str:
        """Return the text that a token adds.

        Without a tokenizer the text is the token's number. If `token` is None, the text that was held back is returned.
        """
        if self._streams is None or self.texts is None:
            return "" if token is None else f" {token}"
        stream = self._streams[request]
        piece = stream.finish() if token is None else stream.push(token)
        self.texts[request] += piece
        return piece
