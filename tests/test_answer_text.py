"""The text of answers: stop strings across pieces, and whole characters."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fronts import tiny_tokenizer
from moesched.server.text import AnswerText, StopStrings

LETTERS = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@settings(max_examples=50)
@given(st.lists(LETTERS, max_size=6), STOPS)
def test_text_passes_up_to_a_stop_string_however_it_is_cut(pieces: list[str], stops: list[str]) -> None:
    whole, text, passing = "".join(pieces), "", StopStrings(stops)
    for piece in pieces:
        if not passing.found:
            text += passing.push(piece)
    text += passing.finish()
    assert passing.found == any(stop in whole for stop in stops)
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    assert any(whole.startswith(stop, len(text)) for stop in stops) if passing.found else text == whole


@settings(max_examples=50)
@given(st.lists(LETTERS, min_size=1, max_size=6), STOPS)
def test_what_is_held_back_may_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    found, passed = StopStrings(stops), ""
    for number, piece in enumerate(pieces):
        passed += found.push(piece)
        if found.found:
            return
        held = "".join(pieces[: number + 1])[len(passed) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@settings(max_examples=50)
@given(st.text(max_size=20))
def test_the_pieces_of_an_answer_are_its_text(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text, bare=True)
    answer = AnswerText(tokenizer, tokenizer.encode("before"), ())
    pieces = [answer.push(token) for token in ids]
    assert "".join(pieces) + answer.finish() == text.rstrip("\ufffd")


def test_an_answer_that_ends_within_a_character_ends_before_it() -> None:
    tokenizer = tiny_tokenizer()
    *most, _ = tokenizer.encode("so 🙂", bare=True)
    answer = AnswerText(tokenizer, (), ())
    assert "".join(map(answer.push, most)) + answer.finish() == "so "


def test_an_answer_to_a_prompt_that_ends_within_a_character_begins_with_that_character() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("so 🙂Hi", bare=True)
    for cut in (-3, -4, -5):  # within the four bytes before "H" and "i"
        answer = AnswerText(tokenizer, ids[:cut], ())
        assert "".join(map(answer.push, ids[cut:])) + answer.finish() == "🙂Hi"


def test_bytes_that_are_no_character_do_not_hold_back_what_follows() -> None:
    tokenizer = tiny_tokenizer()
    [byte] = {token for token in range(2048) if tokenizer.bytes_of(token) == b"\xff"}
    answer = AnswerText(tokenizer, (), ())
    pieces = [answer.push(byte) for _ in range(20)]
    assert sum(map(len, pieces)) >= 12
    assert max(len(piece) for piece in pieces) < 12, "they come as they are made"
