"""Prompts and workloads: their sources, their checks, and text that comes token by token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from moesched.errors import BadInput
from moesched.inputs.prompts import encode_prompts, parse_prompt_ids, read_prompts
from moesched.inputs.tokenizer import Decodes, TextStream, Tokenizer, find_tokenizer
from moesched.models.shapes import SHAPES
from moesched.requests.workloads import (
    PromptLengths,
    Workload,
    given_lengths,
    load_workload,
    spread,
    workload_names,
)
from small_models import byte_tokenizer
from tables import table

CONFIG = msgspec.structs.replace(SHAPES["mixtral-0.8b"], vocabulary=260, max_positions=50)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_ids_are_written_with_commas_and_prompts_with_semicolons() -> None:
    assert parse_prompt_ids("1,2,3;4,5") == [[1, 2, 3], [4, 5]]
    assert parse_prompt_ids(" 7 ; 8 , 9 ") == [[7], [8, 9]]
    assert parse_prompt_ids("1;;2") == [[1], [], [2]]  # the empty one is refused with its number, later


@pytest.mark.parametrize(
    ("text", "item"), [("1,x", "'x'"), ("1,-2", "'-2'"), ("1,,2", "''"), ("1.5", "'1.5'"), ("1,٢", "'٢'")]
)
def test_what_is_no_id_is_named(text: str, item: str) -> None:
    with pytest.raises(BadInput, match=f"prompt 0: {item} is not a token id: write ids with commas"):
        parse_prompt_ids(text)


def test_a_file_holds_one_prompt_a_line_as_text_or_ids(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a b", "id": 9}\n\n{"prompt_ids": [1, 2]}\n')
    assert read_prompts(file) == ["a b", [1, 2]]


@pytest.mark.parametrize("line", [row for (row,) in table("broken_files.md", "Prompts")])
def test_a_line_that_is_no_prompt_is_told_with_file_and_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(BadInput, match=r"prompts\.jsonl:2: .*(write|give)"):
        read_prompts(file)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("{\n{\n", r":2: .*; line 3 is not a prompt either; they are skipped, and the other prompts run$"),
        (
            '\n{"prompt": 3}\n{"prompt"\n{"prompt": ""}\n',
            ":3: .*; lines 4, 5 are not prompts either; they are",
        ),
        ("{\n" * 1000, r":2: .*lines 3, 4, .*22 and 979 more are not prompts either"),
    ],
    ids=["two", "three", "a thousand"],
)
def test_lines_that_are_no_prompts_are_left_out_where_somebody_is_told(
    tmp_path: Path, lines: str, says: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{lines}{{"prompt_ids": [1, 2]}}\n')
    told: list[str] = []
    assert read_prompts(file, told.append) == ["a", [1, 2]]
    (line,) = told
    assert re.search(rf"prompts\.jsonl{says}", line)
    assert len(line) < 400


def test_a_file_without_one_good_line_is_refused_whoever_is_told(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("{\n[]\n")
    told: list[str] = []
    with pytest.raises(BadInput, match=r"prompts\.jsonl:1: "):
        read_prompts(file, told.append)
    assert told == []


def test_a_file_without_prompts_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(BadInput, match="empty holds no prompts"):
        read_prompts(tmp_path / "empty")


def test_text_and_ids_may_be_mixed(tokenizer: Tokenizer) -> None:
    encoded = encode_prompts(["ab", [1, 2]], tokenizer, CONFIG, 1)
    assert encoded == [tokenizer.encode("ab"), [1, 2]]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "prompt 1 is empty: give at least one token"),
        ([], "prompt 1 is empty: give at least one token"),
        ([260], "prompt 1: token id 260 is outside the vocabulary of 260: use ids from 0 to 259"),
        ([-1], "prompt 1: token id -1 is outside the vocabulary"),
        (b"ab", r"prompt 1 is b'ab': give a text, or a list of token ids"),
        (np.array([1, 2]), r"prompt 1 is array\(\[1, 2\]\): give a text, or a list of token ids"),
        ([1] * 48, "prompt 1 has 48 tokens; with 3 new ones that is more than the model's context of 50"),
    ],
)
def test_a_prompt_that_cannot_run_is_told_with_its_number(
    tokenizer: Tokenizer, prompt: Any, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        encode_prompts([[1], prompt], tokenizer, CONFIG, 3)
    assert encode_prompts([[1] * 47], tokenizer, CONFIG, 3) == [[1] * 47]


@pytest.mark.parametrize("key", ["truncation", "padding"])
def test_truncation_and_padding_of_the_training_are_not_applied(tmp_path: Path, key: str) -> None:
    path = byte_tokenizer(tmp_path)
    plain = Tokenizer(path).encode("a long text")
    left = tokenizers.Tokenizer.from_file(str(path))
    if key == "truncation":
        left.enable_truncation(2)
    else:
        left.enable_padding(length=40)
    left.save(str(path))
    assert json.loads(path.read_text())[key]
    assert Tokenizer(path).encode("a long text") == plain


def test_a_tokenizer_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match=r"tokenizer\.json is not a tokenizer: .*copy it again"):
        find_tokenizer(tmp_path)


def stream(tokenizer: Decodes, ids: list[int], context: list[int]) -> list[str]:
    text = TextStream(tokenizer, context)
    return [*(text.push(token) for token in ids), text.finish()]


def test_a_character_of_several_tokens_is_held_back_until_it_is_whole(tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer, tokenizer.encode("aä€b"), [])
    assert pieces == ["a", "", "ä", "", "", "€", "b", ""]


def test_what_never_becomes_whole_comes_at_the_end(tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer, tokenizer.encode("a€")[:-1], [])
    assert pieces == ["a", "", "", "\ufffd"]


def decoder_of_bytes() -> tokenizers.Tokenizer:
    """A decoder whose tokens are the 256 bytes."""
    names = {f"<0x{byte:02X}>": byte for byte in range(256)}
    decoder = tokenizers.Tokenizer(tokenizers.models.BPE(names, [], byte_fallback=True))
    decoder.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    return decoder


def test_characters_in_bytes_follow_each_other() -> None:
    text = "漢字仮名交文日本語"
    streamed = TextStream(decoder_of_bytes(), list(text.encode()))
    assert [piece for byte in text.encode() if (piece := streamed.push(byte))] == list(text)


@pytest.mark.parametrize("cut", range(8))
def test_a_context_may_end_within_a_character_of_bytes(cut: int) -> None:
    ids = list("日🙂.".encode())
    pieces = stream(decoder_of_bytes(), ids[cut:], ids[:cut])
    whole = len(bytes(ids[:cut]).decode(errors="ignore"))
    assert "".join(pieces) == "日🙂."[whole:]


@given(text=st.text(max_size=60), cut=st.integers(0, 30))
def test_the_pieces_are_the_whole_text(tokenizer: Tokenizer, text: str, cut: int) -> None:
    cut = min(cut, len(text))
    context, ids = tokenizer.encode(text[:cut]), tokenizer.encode(text[cut:])
    assert "".join(stream(tokenizer, ids, context)) == text[cut:]


@given(ids=st.lists(st.integers(0, 255), max_size=60))
def test_tokens_that_are_no_text_come_out_as_they_do_at_once(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(tokenizer, ids, [])) == tokenizer.decode(ids)


# -- workloads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "average", "largest", "new_tokens"),
    [
        ("mtbench", 77, 418, (32, 64, 128, 256)),
        ("synthetic-reasoning", 242, 256, (50,)),
        ("summarization", 1693, 1984, (64,)),
    ],
)
def test_workloads_are_those_of_the_papers_table(
    name: str, average: int, largest: int, new_tokens: tuple[int, ...]
) -> None:
    workload = load_workload(name)
    assert workload.prompts is not None
    lengths = workload.lengths(workload.prompts.distinct, seed=7)
    assert sum(lengths) / len(lengths) == average
    assert max(lengths) == workload.longest == largest
    assert min(lengths) >= 1
    assert workload.new_tokens == new_tokens


def test_every_eighty_requests_of_mtbench_are_its_eighty_questions() -> None:
    lengths = load_workload("mtbench").lengths(240, seed=5)
    turns = [lengths[start : start + 80] for start in (0, 80, 160)]
    assert len({tuple(turn) for turn in turns}) == 3
    assert len({tuple(sorted(turn)) for turn in turns}) == 1


def test_a_seed_fixes_the_order_and_more_requests_begin_with_fewer() -> None:
    mtbench = load_workload("mtbench")
    assert mtbench.lengths(100, seed=3) == mtbench.lengths(200, seed=3)[:100]
    assert mtbench.lengths(100, seed=3) != mtbench.lengths(100, seed=4)


def test_uniform_prompts_have_one_length() -> None:
    assert set(load_workload("uniform").lengths(50, seed=9)) == {128}


def test_given_lengths_come_in_their_order_and_again_from_the_start() -> None:
    given = given_lengths([5, 7, 2], new_tokens=4)
    assert given.lengths(5) == [5, 7, 2, 5, 7]
    assert given.longest == 7


@given(distinct=st.integers(2, 200), largest=st.integers(2, 5000), share=st.floats(0, 1))
def test_any_possible_average_is_met_to_the_token(distinct: int, largest: int, share: float) -> None:
    least, most = distinct - 1 + largest, distinct * largest
    average = (least + share * (most - least)) / distinct
    lengths = spread(PromptLengths(average=average, largest=largest, distinct=distinct))
    assert len(lengths) == distinct
    assert sum(lengths) == round(average * distinct)
    assert list(lengths) == sorted(lengths)
    assert lengths[0] >= 1
    assert lengths[-1] == largest


def test_a_workload_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nnew_tokens = [8]\nprompt_tokens = [3, 4]\n')
    assert load_workload(str(file)) == Workload(name="mine", new_tokens=(8,), prompt_tokens=(3, 4))


@pytest.mark.parametrize(("text", "said"), table("broken_files.md", "Workloads"))
def test_a_file_that_is_no_workload_is_told_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=f"mine.toml: .*{said}"):
        load_workload(str(file))


def test_the_workloads_of_the_papers_ship() -> None:
    assert workload_names() == ["mtbench", "summarization", "synthetic-reasoning", "uniform"]
