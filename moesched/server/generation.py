"""Makes the answers to one request of the API: asks the engine for tokens, and turns them into pieces of text."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

import msgspec

from moesched.server.codec import Codec
from moesched.server.errors import ClientLeft, bad_request, server_error
from moesched.server.link import Arrived, EngineLink
from moesched.server.messages import Ask, Broken, Ending, Logprob, Refused, Token
from moesched.server.text import AnswerText, CharacterCount

MOST_SEED = 2**63


class Prompt(NamedTuple):
    """A prompt as it was given, and its tokens."""

    text: str
    ids: list[int]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the answers to each prompt of a request.

    Attributes:
        new_tokens: the largest number of tokens of an answer.
        answers: number of answers to each prompt.
        stops: texts that end an answer.
        scores_stop_token: whether the scored tokens of an answer include the stop token that ended it.
        seed: seed of the sampling; None for a random one.
        logprobs: the number of likeliest tokens to name with each token; None for no log probabilities.
        echo: whether to give the log probabilities of the prompt's tokens as well.
        prompt_only: whether to return only the prompt, without an answer.
        user: name of the user who sent the request, for the admission rule.
    """

    new_tokens: int
    answers: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    scores_stop_token: bool = False
    echo: bool = False
    prompt_only: bool = False
    user: str = ""


class Scored(NamedTuple):
    """A token with its log probability.

    Attributes:
        logprob: the token's log probability; None for a prompt's first token.
        offset: the number of complete characters of the answer's text before the token.
    """

    token: int
    logprob: Logprob | None
    offset: int


class AnswerPiece(NamedTuple):
    """The next piece of an answer.

    Attributes:
        answer: the answer's index; all answers to the first prompt come first.
        text: the text that the piece adds; may be empty.
        tokens: the tokens that the piece adds, with log probabilities; empty if none are wanted.
        ending: the reason why the answer ended; None if more pieces follow.
    """

    answer: int
    text: str
    tokens: list[Scored]
    ending: Ending | None


class _Answer:
    """One answer while the engine generates it: turns the arriving tokens into pieces of text."""

    def __init__(self, index: int, prompt: Prompt, wanted: Wanted, codec: Codec) -> None:
        self._index = index
        self._prompt = prompt
        self._wanted = wanted
        self._text = AnswerText(codec, prompt.ids, wanted.stops)
        self._codec = codec
        self._characters = CharacterCount(codec, len(prompt.text) if wanted.echo else 0)
        self.over = False
        self.count = 0

    def take(self, tokens: Sequence[Token]) -> AnswerPiece:
        """Make one piece of the tokens that arrived together."""
        text: list[str] = []
        scored: list[Scored] = []
        ending: Ending | None = None
        wanted = self._wanted
        if wanted.echo and not self.count:
            text.append(self._prompt.text)
            scored += self._of_prompt(tokens[0])
        for token in tokens:
            ending = "length" if wanted.prompt_only else token.ending
            if not wanted.prompt_only:
                self.count += 1
                if ending != "stop":
                    text.append(self._text.push(token.token))
                if wanted.logprobs is not None and (ending != "stop" or wanted.scores_stop_token):
                    scored.append(Scored(token.token, token.logprob, self._characters.before(token.token)))
            if self._text.stopped:
                ending = "stop"
            if ending is not None:
                self.over = True
                break
        if self.over and not self._text.stopped:
            text.append(self._text.finish())
            ending = "stop" if self._text.stopped else ending
        return AnswerPiece(self._index, "".join(text), scored, ending)

    def _of_prompt(self, first: Token) -> list[Scored]:
        if first.prompt is None:
            return []
        ids, characters = self._prompt.ids, CharacterCount(self._codec)
        offsets = [characters.before(token) for token in ids]
        # SentencePiece puts a space before a text, which the text does not have.
        more = max(0, characters.count - len(self._prompt.text))
        return [
            Scored(token, logprob, max(0, offset - more))
            for token, logprob, offset in zip(ids, first.prompt, offsets, strict=True)
        ]


class AnswersInProgress:
    """All answers to one request, while the engine generates them."""

    def __init__(self, link: EngineLink, codec: Codec, prompts: Sequence[Prompt], wanted: Wanted) -> None:
        """Ask the engine, over `link`, for the wanted answers to each prompt.

        Raises:
            EngineFailed: the engine has ended.
        """
        each = [prompt for prompt in prompts for _ in range(wanted.answers)]
        first_seed = secrets.randbelow(MOST_SEED) if wanted.seed is None else wanted.seed
        asks = [
            ask_for(prompt, wanted, (first_seed + number % wanted.answers) % MOST_SEED)
            for number, prompt in enumerate(each)
        ]
        self._link = link
        self._answers = [_Answer(index, prompt, wanted, codec) for index, prompt in enumerate(each)]
        self._prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self._box, self._numbers = link.ask(asks)

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts, with each prompt counted once."""
        return self._prompt_tokens

    @property
    def answers(self) -> int:
        """The number of answers."""
        return len(self._answers)

    @property
    def answer_tokens(self) -> int:
        """The number of tokens of all answers so far."""
        return sum(answer.count for answer in self._answers)

    async def pieces(self) -> AsyncGenerator[list[AnswerPiece]]:
        """Yield pieces as tokens come, until all answers have ended.

        Raises:
            ApiError: the engine refused the request, broke it off, or has ended.
            ClientLeft: `leave` was called.
        """
        waiting = len(self._answers)
        while waiting:
            pieces = []
            for index, tokens in _by_answer(await self._box.take()):
                answer = self._answers[index]
                if answer.over:
                    continue
                piece = answer.take(tokens)
                pieces.append(piece)
                if piece.ending is not None:
                    waiting -= 1
                    self._link.leave([self._numbers[index]])
            yield pieces

    def leave(self) -> None:
        """Stop waiting for the answers, and tell the engine so; further calls do nothing."""
        self._link.leave(self._numbers)
        self._box.end(ClientLeft())


def ask_for(prompt: Prompt, wanted: Wanted, seed: int) -> Ask:
    """Make the message that asks the engine for one answer, sampled with `seed`; the link sets `Ask.number` later."""
    return Ask(
        number=0,
        ids=prompt.ids,
        new_tokens=wanted.new_tokens,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        seed=seed,
        logprobs=wanted.logprobs,
        echo=wanted.echo and wanted.logprobs is not None,
        user=wanted.user,
    )


def _by_answer(arrived: Sequence[Arrived]) -> list[tuple[int, list[Token]]]:
    """Group tokens by the index of their answer, and return pairs of index and tokens.

    Raises:
        ApiError: the engine refused one of the answers, or broke it off.
    """
    tokens: dict[int, list[Token]] = {}
    for answer, message in arrived:
        if isinstance(message, Refused):
            raise bad_request(message.why)
        if isinstance(message, Broken):
            raise server_error(message.why)
        tokens.setdefault(answer, []).append(message)
    return list(tokens.items())
