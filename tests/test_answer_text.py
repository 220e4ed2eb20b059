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
def test_text_passes_up_to_the_first_stop_string_however_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    whole = "".join(pieces)
    passed, found = [], StopStrings(stops)
    for piece in pieces:
        passed.append(found.push(piece))
        if found.found:
            break
    if not found.found:
        passed.append(found.finish())
    first = min((where for where in map(whole.find, stops) if where >= 0), default=None)
    # A stop string that ends sooner is found first, even if a longer one begins before it.
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    assert found.found == (first is not None)
    if not ends:
        assert "".join(passed) == whole
    else:
        text = "".join(passed)
        assert whole.startswith(text)
        assert any(whole.startswith(stop, len(text)) for stop in stops)
        assert all(stop not in text for stop in stops)


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
