"""The server's API, asked by OpenAI's own client before an engine that says what it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from fronts import CHAT, HELLO, SAYS, Server, chat, front, tiny_tokenizer, tokenizer_of
from gguf_headers import TOKENS, mixtral, texts
from moesched.errors import BadInput
from moesched.server.codec import Numbers

JSON = {"content-type": "application/json"}


async def completion(server: Server, prompt: Any = "Return the", **more: Any) -> Any:
    """A completion."""
    return await server.openai.completions.create(model="fake", prompt=prompt, **more)


def tokens_of(text: str) -> int:
    """The number of tokens that say a text."""
    return len(tiny_tokenizer().encode(text, bare=True))


# ---------------------------------------------------------------- chats


async def test_a_chat_is_answered_with_the_tokens_of_the_engine(server: Server) -> None:
    answer = await chat(server, max_completion_tokens=tokens_of(SAYS))
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == SAYS
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == tokens_of(SAYS)
    assert answer.usage.prompt_tokens == len(server.engine.asked[0].ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_the_pieces_of_a_stream_make_the_answer(server: Server) -> None:
    stream = await chat(
        server, max_tokens=tokens_of(SAYS), stream=True, stream_options={"include_usage": True}
    )
    pieces = [piece async for piece in stream]
    *told, last = pieces
    assert "".join(piece.choices[0].delta.content or "" for piece in told) == SAYS
    assert [piece.choices[0].delta.role for piece in told] == ["assistant"] + [None] * (len(told) - 1)
    assert [piece.choices[0].finish_reason for piece in told] == [None] * (len(told) - 1) + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == tokens_of(SAYS)
    assert all(piece.usage is None for piece in told)
    assert len({piece.id for piece in pieces}) == 1


async def test_a_stream_never_has_half_a_character(server: Server) -> None:
    for length in range(1, tokens_of(SAYS) + 1):
        pieces = [
            piece.choices[0].delta.content or ""
            async for piece in await chat(server, max_tokens=length, stream=True)
        ]
        assert "\ufffd" not in "".join(pieces)
        assert SAYS.startswith("".join(pieces))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [", of", "answer", ["nothing", "é 🙂"], "forty-two."])
async def test_an_answer_ends_before_a_stop_string_and_the_engine_is_told(
    stop: Any, stream: bool, server: Server
) -> None:
    given = {"stop": stop, "max_tokens": 2 * tokens_of(SAYS), "stream": stream}
    answer = await chat(server, **given)
    if stream:
        pieces = [piece.choices[0] async for piece in answer]
        text, ending = "".join(piece.delta.content or "" for piece in pieces), pieces[-1].finish_reason
    else:
        text, ending = answer.choices[0].message.content, answer.choices[0].finish_reason
    last = stop if isinstance(stop, str) else stop[-1]
    assert text == SAYS.partition(last)[0]
    assert ending == "stop"
    assert server.engine.left == [0]


async def test_the_models_stop_token_ends_an_answer_and_is_no_text(server: Server) -> None:
    [comma] = tiny_tokenizer().encode(",", bare=True)
    server.engine.stop_token = comma
    answer = await chat(server, max_tokens=50)
    assert answer.choices[0].message.content == SAYS.partition(",")[0]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == tokens_of(SAYS.partition(",")[0]) + 1


async def test_settings_of_sampling_reach_the_engine(server: Server) -> None:
    given = {"temperature": 0.5, "top_p": 0.75, "seed": 7, "n": 3, "user": "ann"}
    answer = await chat(server, max_tokens=2, extra_body={"top_k": 5}, **given)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    asked = server.engine.asked
    assert [each.seed for each in asked] == [7, 8, 9], "each answer has random numbers of its own"
    assert {(each.temperature, each.top_p, each.top_k, each.user) for each in asked} == {
        (0.5, 0.75, 5, "ann")
    }
    assert answer.usage.completion_tokens == 6


async def test_without_settings_an_answer_is_sampled_anew_each_time(server: Server) -> None:
    await chat(server, max_tokens=1)
    await chat(server, max_tokens=1)
    first, second = server.engine.asked
    assert first.temperature == 1.0 and first.top_p == 1.0 and first.top_k is None
    assert first.seed != second.seed


async def test_a_chat_has_the_log_probabilities_of_its_tokens(server: Server) -> None:
    answer = await chat(server, max_tokens=4, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(each.token for each in content) == answer.choices[0].message.content
    assert [each.logprob for each in content] == [-0.5] * 4
    assert all(len(each.top_logprobs) == 3 for each in content)
    assert all(each.top_logprobs[0].token == each.token for each in content)


async def test_the_bytes_of_a_character_that_spans_tokens_are_told_token_by_token() -> None:
    async with front(says="🙂") as server:
        answer = await chat(server, max_tokens=tokens_of("🙂"), logprobs=True)
        content = answer.choices[0].logprobs.content
        assert b"".join(bytes(each.bytes) for each in content).decode() == "🙂"
        scored = (await completion(server, max_tokens=tokens_of("🙂"), logprobs=1)).choices[0].logprobs
        assert scored.tokens == [f"bytes:\\x{byte:02x}" for byte in "🙂".encode()]
        assert scored.top_logprobs == [{token: -0.5} for token in scored.tokens], "two bytes are two entries"


async def test_the_parts_of_a_message_and_an_answer_that_is_sent_back_are_text(server: Server) -> None:
    first = await chat(server, max_tokens=tokens_of(SAYS))
    parts: Any = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    messages: Any = [*HELLO, first.choices[0].message, parts]
    await server.openai.chat.completions.create(model="fake", messages=messages, max_tokens=1)
    assert tiny_tokenizer().decode(server.engine.asked[-1].ids) == f"Hello\n{SAYS}\nab"


# ---------------------------------------------------------------- completions


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [([3, 4, 5], [[3, 4, 5]]), ([[3, 4], [5]], [[3, 4], [5]])],
    ids=["ids", "lists of ids"],
)
async def test_prompts_are_given_as_ids(prompt: Any, asked: list[list[int]], server: Server) -> None:
    await completion(server, prompt, max_tokens=1)
    assert [each.ids for each in server.engine.asked] == asked


async def test_each_of_several_prompts_gets_as_many_answers_as_asked_for(server: Server) -> None:
    answer = await completion(server, ["one", "two two"], n=2, max_tokens=1, echo=True)
    texts = [choice.text for choice in answer.choices]
    said = tiny_tokenizer().decode(server.engine.says[:1])
    assert texts == [f"one{said}", f"one{said}", f"two two{said}", f"two two{said}"]
    ids = [each.ids for each in server.engine.asked]
    assert ids[0] == ids[1] == tiny_tokenizer().encode("one")
    assert answer.usage.prompt_tokens == len(ids[0]) + len(ids[2])


async def test_a_completion_has_sixteen_tokens_where_it_does_not_say(server: Server) -> None:
    answer = await completion(server)
    assert answer.usage.completion_tokens == 16


async def test_an_echo_has_the_log_probabilities_of_the_prompt(server: Server) -> None:
    answer = await completion(server, max_tokens=2, echo=True, logprobs=2)
    scored = answer.choices[0].logprobs
    prompt = tiny_tokenizer().encode("Return the")
    assert len(scored.tokens) == len(prompt) + 2
    assert scored.token_logprobs[0] is None and scored.top_logprobs[0] is None
    assert scored.token_logprobs[1:] == [-0.5] * (len(prompt) + 1)
    assert all(
        each[token] == -0.5 for token, each in zip(scored.tokens[1:], scored.top_logprobs[1:], strict=True)
    )
    assert answer.choices[0].text.startswith("Return the")
    assert scored.tokens[:3] == ["<s>", "Return", " the"]
    assert scored.text_offset[:4] == [0, 0, 6, 10], "the text leaves the first token out"


async def test_a_completion_has_the_log_probability_of_the_stop_token_too(server: Server) -> None:
    [server.engine.stop_token] = tiny_tokenizer().encode(",", bare=True)
    answer = await completion(server, max_tokens=50, logprobs=0)
    [choice] = answer.choices
    assert choice.finish_reason == "stop" and choice.logprobs.tokens[-1] == ","
    assert choice.logprobs.text_offset[-1] == len(choice.text)
    assert len(choice.logprobs.tokens) == answer.usage.completion_tokens


SENTENCE_PIECE = ["<unk>", "<s>", "</s>", "a", "▁", "▁a"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("vocabulary", "prompt", "offsets"),
    [
        pytest.param(None, "é🙂x", [0, 0, 0, 1, 1, 1, 1, 2, 3, 4], id="characters of several tokens"),
        pytest.param(None, [174, 255, 89], [0, 0, 1, 2, 3], id="a part of 🙂, then x"),
        pytest.param(SENTENCE_PIECE, "aa a", [0, 1, 2, 4, 6], id="a space that the tokenizer puts first"),
    ],
)
async def test_offsets_are_places_in_the_text(
    vocabulary: list[str] | None, prompt: str | list[int], offsets: list[int], stream: bool, tmp_path: Path
) -> None:
    codec = tiny_tokenizer()
    if vocabulary is not None:
        header = mixtral()
        header.set(TOKENS, texts(vocabulary))
        codec = tokenizer_of(header.write(tmp_path / "model.gguf"))

    async with front(says="aa", codec=codec) as server:
        answer = await completion(server, prompt, max_tokens=2, echo=True, logprobs=0, stream=stream)
        choices = [piece.choices[0] async for piece in answer] if stream else answer.choices
        scored = [offset for choice in choices for offset in choice.logprobs.text_offset]
        assert scored == offsets


async def test_an_answer_without_a_tokenizer_follows_its_prompt_in_an_echo() -> None:
    async with front(says="4 5", codec=Numbers()) as server:
        for prompt in ("1 2 3", [1, 2, 3]):
            answer = await completion(server, prompt, max_tokens=2, echo=True)
            assert answer.choices[0].text.split() == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("text", ["1 ٢", "1 -2", "1_0", "1 x"])
def test_only_digits_are_the_tokens_of_a_model_without_a_tokenizer(text: str) -> None:
    with pytest.raises(BadInput, match=f"'{text}' is text, and the model has no tokenizer"):
        Numbers().encode(text)


async def test_a_prompt_alone_is_scored_without_an_answer(server: Server) -> None:
    [server.engine.stop_token] = tiny_tokenizer().encode("The", bare=True)  # would be the answer
    answer = await completion(server, max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "Return the"
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.tokens) == len(tiny_tokenizer().encode("Return the"))
    assert answer.usage.completion_tokens == 0


async def test_a_streamed_completion_has_the_offsets_of_the_whole_one(server: Server) -> None:
    whole = await completion(server, max_tokens=6, logprobs=1)
    stream = await completion(server, max_tokens=6, logprobs=1, stream=True)
    pieces = [piece.choices[0] async for piece in stream]
    offsets = [offset for piece in pieces for offset in piece.logprobs.text_offset]
    assert offsets == whole.choices[0].logprobs.text_offset
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text


async def test_the_model_is_listed(server: Server) -> None:
    [model] = (await server.openai.models.list()).data
    assert model.id == "fake"
    assert (await server.openai.models.retrieve("fake")).id == "fake"
    with pytest.raises(openai.NotFoundError):
        await server.openai.models.retrieve("other")


# ---------------------------------------------------------------- bad requests

PLAIN = "/v1/completions"
BAD: Sequence[tuple[str, Any, str | None, str]] = [
    (PLAIN, {"prompt": "a"}, "model", "model is missing: ask for fake"),
    (PLAIN, {"model": "fake"}, "prompt", "prompt is missing: give it"),
    (PLAIN, {"model": "fake", "promt": "a"}, "promt", "did you mean prompt?"),
    (PLAIN, {"model": "fake", "prompt": 5}, "prompt", "prompt is 5: expected"),
    (PLAIN, {"model": "fake", "prompt": []}, "prompt", "give a text"),
    (PLAIN, {"model": "fake", "prompt": [1, "a"]}, "prompt", "prompt is [1, 'a']: give a text"),
    (PLAIN, {"model": "fake", "prompt": [[]]}, "prompt", "the prompt is empty"),
    (PLAIN, {"model": "fake", "prompt": [2048]}, "prompt", "token id 2048 is outside the vocabulary of 2048"),
    (PLAIN, {"model": "fake", "prompt": [-1]}, "prompt", "token id -1 is outside"),
    (PLAIN, {"model": "fake", "prompt": [1] * 256}, "prompt", "the prompt has 256 tokens, and may have 255"),
    (PLAIN, {"model": "fake", "prompt": [1] * 250, "max_tokens": 7}, "prompt", "more than the 256"),
    (PLAIN, {"model": "fake", "prompt": "a", "max_tokens": -1}, "max_tokens", "max_tokens is -1"),
    (PLAIN, {"model": "fake", "prompt": "a", "max_tokens": 0}, "max_tokens", "give 1 or more"),
    (PLAIN, {"model": "fake", "prompt": "a", "temperature": 2.5}, "temperature", "temperature is 2.5"),
    (PLAIN, {"model": "fake", "prompt": "a", "temperature": "hot"}, "temperature", "temperature is 'hot'"),
    (PLAIN, {"model": "fake", "prompt": "a", "top_p": 0}, "top_p", "top_p is 0"),
    (PLAIN, {"model": "fake", "prompt": "a", "n": 0}, "n", "n is 0"),
    (PLAIN, {"model": "fake", "prompt": "a", "n": 9}, "n", "at most 8"),
    (PLAIN, {"model": "fake", "prompt": "a", "stop": ["", "b"]}, "stop", "stop is ['', 'b'], with an empty"),
    (
        PLAIN,
        {"model": "fake", "prompt": "a", "stop": ["b"] * 17},
        "stop",
        "stop has 17 texts, and may have 16",
    ),
    (PLAIN, {"model": "fake", "prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty", "omit it"),
    (PLAIN, {"model": "fake", "prompt": "a", "logit_bias": {"3": 1}}, "logit_bias", "omit it"),
    (PLAIN, {"model": "fake", "prompt": "a", "best_of": 2}, "best_of", "omit it"),
    (PLAIN, {"model": "fake", "prompt": "a", "verbosity": "low"}, "verbosity", "does not have it: omit it"),
    (CHAT, {"model": "fake", "messages": []}, "messages", "messages is []"),
    (
        CHAT,
        {"model": "fake", "messages": [{"role": "robot", "content": "a"}]},
        "messages[0].role",
        "is 'robot': give system or",
    ),
    (
        CHAT,
        {"model": "fake", "messages": [{"role": "user", "content": 5}]},
        "messages[0].content",
        "is 5: expected",
    ),
    (CHAT, {"model": "fake", "messages": [{"role": "user"}]}, "messages[0].content", "is missing: give it"),
    (CHAT, {"model": "fake", "messages": HELLO, "tools": [{"type": "function"}]}, "tools", "omit it"),
    (CHAT, {"model": "fake", "messages": HELLO, "top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
    (
        CHAT,
        {"model": "fake", "messages": HELLO, "stream_options": {"include_usage": True}},
        "stream_options",
        "needs stream: true",
    ),
    (CHAT, {"model": "fake", "messages": HELLO, "max_tokens": 0}, "max_tokens", "max_tokens is 0"),
    (
        CHAT,
        {"model": "fake", "messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6},
        "max_tokens",
        "max_tokens is 5, and max_completion_tokens 6: give one of them",
    ),
    (
        CHAT,
        {"model": "fake", "messages": [{"role": "user", "content": "a " * 300}]},
        "messages",
        "the prompt",
    ),
    (PLAIN, {"model": "fake", "prompt": "a", "top_k": 2**64}, "top_k", "top_k is 1844"),
    (PLAIN, {"model": "fake", "prompt": "a", "user": "u" * 257}, "user", "length <= 256"),
    (PLAIN, {"model": "fake", "prompt": ["a"] * 100_000}, "prompt", "100000 answers at once"),
    (
        PLAIN,
        {"model": "fake", "prompt": [[1]] * 20_000},
        None,
        "the body has 20,002 lists and objects, and may have 20,000: send fewer",
    ),
    (PLAIN, {"model": "fake", "prompt": "a", "seed": [["y" * 100] * 9] * 9}, "seed", "seed is [['yyy"),
    (
        CHAT,
        {"model": "fake", "messages": [{"role": "tool", "content": "a"}]},
        "messages[0].role",
        "assistant",
    ),
    (CHAT, [1, 2], None, "expected `object`"),
]


@pytest.mark.parametrize(("path", "body", "param", "says"), BAD, ids=[str(each[1])[:60] for each in BAD])
async def test_a_bad_request_is_refused_in_openais_form(
    path: str, body: Any, param: str | None, says: str, server: Server
) -> None:
    response = await server.http.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says.lower() in error["message"].lower()
    assert "\n" not in error["message"] and len(error["message"]) <= 1000
    assert server.front.gate.inside == 0 and server.engine.asked == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "fake", "temperature": NaN}',
        b'{"n": 1e999}',
        b"[" * 100_000,
        b'"\xff"',
        b'{"user": "\\ud800"}',
    ],
    ids=["empty", "cut", "NaN", "infinite", "deep", "not UTF-8", "half a character"],
)
async def test_what_is_no_json_is_refused(body: bytes, server: Server) -> None:
    response = await server.http.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_fields_that_change_no_answer_are_taken(server: Server) -> None:
    harmless = {
        "store": False,
        "metadata": {"a": "b"},
        "frequency_penalty": 0,
        "logit_bias": {},
        "tools": None,
        "reasoning_effort": None,
        "stream_options": {"include_usage": None},
    }
    answer = await chat(server, max_tokens=1, extra_body=harmless)
    assert answer.usage.completion_tokens == 1


async def test_an_unknown_model_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt' here: ask for fake") as caught:
        await server.openai.chat.completions.create(model="gpt", messages=HELLO)
    assert caught.value.code == "model_not_found"


async def test_unknown_paths_and_methods_have_openais_form_too(server: Server) -> None:
    for path, status, remedy in [("/v2", 404, f"there is {CHAT}, "), (CHAT, 405, "use POST")]:
        response = await server.http.get(path)
        assert response.status_code == status
        assert remedy in response.json()["error"]["message"]
    assert len((await server.http.get("/" + "x" * 9_999)).content) < 1000


async def test_a_request_that_the_engine_refuses_is_a_bad_one(server: Server) -> None:
    server.engine.refuses = "the cache has no room: ask for fewer"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="the cache has no room"):
            await chat(server, stream=stream)
    assert server.front.gate.inside == 0
