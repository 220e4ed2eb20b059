"""Converts the log probabilities of tokens to the two forms that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.server.codec import Codec
from moesched.server.generation import Scored
from moesched.server.replies import ChatLogprobs, ChosenToken, CompletionLogprobs, LikelyToken

LOWEST = -9999.0
"""The log probability that stands for minus infinity, which JSON has not."""


def completion_logprobs(scored: Sequence[Scored], codec: Codec) -> CompletionLogprobs:
    """Return the log probabilities of a completion's tokens."""
    texts = [token_key(codec, each.token) for each in scored]
    return CompletionLogprobs(
        texts,
        [None if each.logprob is None else finite(each.logprob.logprob) for each in scored],
        [_likeliest(each, text, codec) for each, text in zip(scored, texts, strict=True)],
        [each.offset for each in scored],
    )


def _likeliest(scored: Scored, text: str, codec: Codec) -> dict[str, float] | None:
    """Return log probabilities of the likeliest tokens and of the chosen one, by text; None if the token has none."""
    if scored.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in scored.logprob.likeliest:
        found.setdefault(token_key(codec, token), finite(logprob))
    found.setdefault(text, finite(scored.logprob.logprob))
    return found


def chat_logprobs(scored: Sequence[Scored], codec: Codec) -> ChatLogprobs:
    """Return the log probabilities of a chat's tokens; the first token of a prompt, which has none, is left out."""
    chosen = []
    for token, logprob, _ in scored:
        if logprob is not None:
            likeliest = [
                LikelyToken(token_text(codec, each), finite(value), list(codec.bytes_of(each)))
                for each, value in logprob.likeliest
            ]
            own = list(codec.bytes_of(token))
            chosen.append(ChosenToken(token_text(codec, token), finite(logprob.logprob), own, likeliest))
    return ChatLogprobs(chosen)


def token_key(codec: Codec, token: int) -> str:
    r"""Return a token's text, or its bytes if they are no whole characters, in OpenAI's form `bytes:\xe2\x80`."""
    data = codec.bytes_of(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_text(codec: Codec, token: int) -> str:
    """Return the text of one token; bytes that are no whole character become U+FFFD."""
    return codec.bytes_of(token).decode(errors="replace")


def finite(logprob: float) -> float:
    """Return a log probability that JSON can represent: `LOWEST` in place of minus infinity."""
    return max(logprob, LOWEST)
