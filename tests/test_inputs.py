"""Whatever a file from outside holds, it is accepted or refused with a message: soon, and in little memory."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesched.errors import BadInput
from moesched.machines import load_machine
from moesched.models.reading import read_config
from moesched.system.decoding import decode_json
from moesched.system.input_file import read_input
from mutations import mutated
from parsers import PARSERS, Bench
from stored_checkpoints import TINY, published, write

SECONDS = 2.0
"""Limit of the processor's time for any file."""


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bench]:
    return {name: Bench(name, tmp_path_factory.mktemp("parser")) for name in PARSERS}


@pytest.mark.parametrize("name", PARSERS)
def test_each_example_is_accepted(benches: dict[str, Bench], name: str) -> None:
    assert benches[name].accepts(benches[name].example)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=10)
@given(st.binary(max_size=300))
def test_any_bytes_are_accepted_or_refused(benches: dict[str, Bench], name: str, data: bytes) -> None:
    began = thread_time()
    benches[name].accepts(data)
    assert thread_time() - began < SECONDS


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=20)
@given(st.integers(0, 1 << 30))
def test_any_damage_is_accepted_or_refused(benches: dict[str, Bench], name: str, seed: int) -> None:
    bench = benches[name]
    began = thread_time()
    bench.accepts(mutated(bench.example, Random(seed)))
    assert thread_time() - began < SECONDS


# ---------------------------------------------------------------- files of any kind


FILES = [
    name for name, parser in PARSERS.items() if parser.refusal is BadInput and name != "results of a sweep"
]
GGUF = {"GGUF, byte pairs", "GGUF, SentencePiece", "GGUF, gpt-oss"}
BINARY = {"safetensors", "safetensors, codes and scales", "header of an absent file", "packed trace"}
TEXTS = sorted(set(FILES) - GGUF - BINARY - {"secret key"})
GIT_LFS = b"""version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 4976698672
"""


@pytest.mark.parametrize("name", FILES)
def test_a_pointer_of_git_lfs_is_called_by_its_name(benches: dict[str, Bench], name: str) -> None:
    bench = benches[name]
    bench.file.write_bytes(GIT_LFS)
    with pytest.raises(BadInput, match=r"is a pointer of git-lfs, not the file itself: run `git lfs pull`"):
        bench.parser.read(bench.file)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_may_begin_with_the_mark_of_its_encoding(benches: dict[str, Bench], name: str) -> None:
    assert benches[name].accepts(b"\xef\xbb\xbf" + benches[name].example)


def test_a_file_beyond_its_limit_a_device_a_folder_and_a_name_that_no_file_has_are_refused_unread(
    tmp_path: Path,
) -> None:
    file = tmp_path / "large"
    file.write_bytes(b"12345")
    assert read_input(file, "machine", 5) == b"12345"
    with pytest.raises(BadInput, match=r"machine .*large has more than 4 bytes.*; name another file"):
        read_input(file, "machine", 4)
    for path in (Path("/dev/zero"), tmp_path, Path("a\0b"), Path("x" * 5000)):
        with pytest.raises(BadInput, match=r"cannot read machine "):
            read_input(path, "machine", 100)


def test_a_pipe_is_read_to_its_end_and_one_without_a_writer_is_empty(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"all of it")
    os.close(writing)
    assert read_input(Path(f"/dev/fd/{reading}"), "machine", 100) == b"all of it"
    os.close(reading)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="missing required field"):
        load_machine(str(tmp_path / "pipe"))


# ---------------------------------------------------------------- sizes and counts


def test_json_with_more_values_than_its_limit_is_refused_before_it_is_decoded() -> None:
    assert decode_json(b"[1,2,3]", list[int], "a", "b", most=3) == [1, 2, 3]
    with pytest.raises(BadInput, match="it has about 4 values, and may have 3"):
        decode_json(b"[1,2,3,4]", list[int], "a", "b", most=3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": ["mixtral"]}, "Expected `str"),
        ({"model_type": {"a": 1}}, "Expected `str"),
        ({"num_hidden_layers": 100_000}, r"num_hidden_layers is 100,000, but it may be 10,000"),
        ({"num_local_experts": 10**7}, r"2 layers have 10,000,000 experts each, but there may be 100,000"),
        ({"vocab_size": 10**4000}, r"vocabulary is 1000+\.\.\.0+, but it may be 100,000,000"),
        ({"hidden_act": "x" * 100_000}, r"hidden_act is 'x+\.\.\.x+'"),
    ],
)
def test_a_configuration_that_no_model_has_is_refused_in_a_short_line(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    write(tmp_path, published(), **TINY | changes)
    with pytest.raises(BadInput, match=said) as error:
        read_config(tmp_path)
    assert len(str(error.value)) < 500
