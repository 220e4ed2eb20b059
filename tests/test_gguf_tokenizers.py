"""Tokenizers of GGUF files: text is what their tokens say, and one that cannot be made is refused in one line."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_headers import TOKENS, Change, Header, byte_pairs, key, mixtral, number, numbers, string, texts
from moesched.errors import BadInput
from moesched.inputs.gguf_tokenizer import gguf_tokenizer
from moesched.inputs.tokenizer import find_tokenizer
from moesched.models.gguf.vocabulary import Vocabulary
from moesched.models.reading import read_config


def test_control_tokens_that_end_a_text_are_stop_tokens(tmp_path: Path) -> None:
    header = mixtral()
    header.set(TOKENS, texts(["<unk>", "<|im_end|>", "</s>", "<|eot_id|>", "a", "b"]))
    header.set("tokenizer.ggml.eot_token_id", number(4))
    config = read_config(header.write(tmp_path / "model.gguf"))
    assert config.stop_tokens == (2, 4, 1)  # "<|eot_id|>" is an ordinary token there


def test_the_end_of_a_message_ends_no_text_where_another_token_ends_the_turn(tmp_path: Path) -> None:
    header = mixtral()
    header.set(TOKENS, texts(["<unk>", "<|end|>", "<|return|>", "<|call|>", "a", "b"]))
    header.set("tokenizer.ggml.token_type", numbers([2, 3, 3, 3, 1, 1]))
    assert read_config(header.write(tmp_path / "model.gguf")).stop_tokens == (2, 3)


@pytest.mark.parametrize("make", [mixtral, byte_pairs])
def test_text_is_what_its_tokens_say(make: Callable[[], Header], tmp_path: Path) -> None:
    header = make()
    header.set("tokenizer.ggml.add_space_prefix", struct.pack("<IB", 7, 0))
    header.set("tokenizer.ggml.add_bos_token", struct.pack("<IB", 7, 1))
    header.set("tokenizer.ggml.bos_token_id", number(1))
    tokenizer = find_tokenizer(header.write(tmp_path / "model.gguf"))
    assert tokenizer is not None
    assert tokenizer.encode("abba</s>") == [1, 5, 4, 3, 2]
    assert tokenizer.decode([1, 5, 4, 3, 2]) == "abba"


WORDS = {
    "gpt-2": ["HelloWorld", " I", "'ve", " 12345", " x", "/", "y", "\n"],
    "llama-bpe": ["HelloWorld", " I", "'ve", " ", "123", "45", " x", "/y", "\n"],
    "glm4": ["HelloWorld", " I", "'ve", " ", "123", "45", " x", "/y", "\n"],
    "qwen2": ["HelloWorld", " I", "'ve", " ", "1", "2", "3", "4", "5", " x", "/y", "\n"],
    "gpt-4o": ["Hello", "World", " I've", " ", "123", "45", " x", "/y", "\n"],
    "minimax-m2": ["Hello", "World", " I've", " ", "123", "45", " x", "/y", "\n"],
}
"""The words of one text by rules that real files name."""


@pytest.mark.parametrize("rule", WORDS)
def test_no_token_joins_bytes_of_two_words_of_the_files_rule(rule: str) -> None:
    made = gguf_tokenizer(Path("model.gguf"), Vocabulary(model="gpt2", pre=rule, tokens=("a",)))
    text = "".join(WORDS[rule])
    assert text == "HelloWorld I've 12345 x/y\n"
    assert made.pre_tokenizer is not None
    found = made.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == WORDS[rule]


@pytest.mark.parametrize(
    ("rule", "composes"), [("olmo", True), ("mpt", True), ("qwen2", True), ("gpt-4o", False)]
)
def test_an_accent_is_joined_to_its_letter_where_the_published_tokenizer_does_so(
    rule: str, composes: bool
) -> None:
    accented = ("e", "Ì", "ģ", "Ã", "©", "Ã©")  # bytes as characters; the last is one accented letter
    vocabulary = Vocabulary(model="gpt2", pre=rule, tokens=accented, merges=("Ã ©",))
    made = gguf_tokenizer(Path("model.gguf"), vocabulary)
    assert made.encode("\u00e9").ids == [5]
    assert made.encode("e\u0301").ids == ([5] if composes else [0, 1, 2])


UNUSABLE: dict[str, tuple[Change, str]] = {
    "an unknown kind": (
        key("tokenizer.ggml.model", string("gpt3")),
        "model is 'gpt3', .*: did you mean gpt2",
    ),
    "an unknown rule": (key("tokenizer.ggml.pre", string("qwen")), "pre is 'qwen', .*: did you mean qwen2"),
    "no rule": (key("tokenizer.ggml.pre", None), "pre is None, which is not supported: give ids"),
    "a token twice": (key(TOKENS, texts(["a", "b", "a", "d", "e", "f"])), "tokens has 'a' twice"),
    "a merge of an unknown token": (
        key("tokenizer.ggml.merges", texts(["a b", "a z"])),
        "merges has 'a z', which is not of tokens of the vocabulary",
    ),
    "a merge to an unknown token": (
        key("tokenizer.ggml.merges", texts(["b a"])),
        "merges has 'b a', which is not of",
    ),
    "an empty merge": (key("tokenizer.ggml.merges", texts([""])), "merges has '', which is not of"),
}


def test_a_piece_that_is_longer_than_any_real_one_is_refused(tmp_path: Path) -> None:
    header = mixtral()
    header.set(TOKENS, texts(["<unk>", "<s>", "</s>", "a", "b", "a" * 100_000]))
    with pytest.raises(
        BadInput, match=r"of 100,000 characters, and no real vocabulary of SentencePiece has one"
    ):
        find_tokenizer(header.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("broken", UNUSABLE.values(), ids=UNUSABLE)
def test_a_tokenizer_that_cannot_be_made_is_refused_in_one_line(
    broken: tuple[Change, str], tmp_path: Path
) -> None:
    change, said = broken
    header = byte_pairs()
    change(header)
    with pytest.raises(BadInput, match=said) as error:
        find_tokenizer(header.write(tmp_path / "model.gguf"))
    assert "\n" not in str(error.value)
