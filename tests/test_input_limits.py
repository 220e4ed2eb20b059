"""Numbers beyond sense, text that is none, names that act on the terminal, and modules lying about."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from commands import SIMULATE, refused
from moesched import plugins
from moesched.cli.main import main
from moesched.errors import BadInput
from moesched.inputs.prompts import encode_prompts
from moesched.inputs.tokenizer import PIECE, Tokenizer
from moesched.machines import load_machine
from moesched.machines.toml_library import profile_text
from moesched.requests.workloads import load_workload
from moesched.system.cache import cache_folder
from moesched.system.decoding import decode_json
from moesched.system.plain_text import plain_text, shown
from moesched.system.whole_file import write_json
from moesched.units import parse_bytes
from small_models import SMALL, byte_tokenizer


class _Size(msgspec.Struct):
    rows: Annotated[int, Meta(ge=1)]


class _Described(msgspec.Struct):
    sizes: list[_Size]
    pair: tuple[int, int] = (0, 0)
    named: dict[str, int] = {}


MODULE = (sys.executable, "-m", "moesched")


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("bandwidth = 320e9", "bandwidth = 1e-320"),
        ("bandwidth = 320e9", "bandwidth = 1e400"),
        ("float32 = 8.1e12", "float32 = 1e-320"),
        ("float32 = 8.1e12", "float32 = inf"),
        ('capacity = "15360MiB"', 'capacity = "1e309GB"'),
        ('capacity = "15360MiB"', f"capacity = {'9' * 5000}"),
        ('capacity = "15360MiB"', f"capacity = 0x{'f' * 20000}"),
        ("[roles]", "[accelerator_group]\ncount = 1000000000\n[roles]"),
        ("[roles]", f"{'a.' * 50_000}a = 1\n[roles]"),
        ("[roles]", "'a' . " * 17 + "a = 1\n[roles]"),
        ("[roles]", f"deep = {'[' * 5000}{']' * 5000}\n[roles]"),
    ],
)
def test_a_figure_that_no_machine_has_is_refused(tmp_path: Path, good: str, bad: str) -> None:
    text = profile_text("moesched.machines", "machine", "t4").decode()
    assert good in text
    file = tmp_path / "mine.toml"
    file.write_text(text.replace(good, bad, 1))
    with pytest.raises(BadInput, match=r"mine\.toml: "):
        load_machine(str(file))


@pytest.mark.parametrize(
    "prompts",
    [
        "largest = 100, distinct = 1000000000000",
        f"largest = 1{'0' * 400}",
        "largest = 1000000000",
        "largest = 16000001",
    ],
)
def test_a_workload_of_lengths_that_no_model_has_is_refused(tmp_path: Path, prompts: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'name = "x"\nnew_tokens = [1]\nprompts = {{average = 50, {prompts}}}\n')
    with pytest.raises(BadInput, match=r"mine\.toml: "):
        load_workload(str(file))


def test_sizes_up_to_an_exabyte_are_sizes() -> None:
    assert parse_bytes("1000000TB") == 10**18
    for size in ("1.1e18", 10**400, float("nan"), float("inf")):
        with pytest.raises(BadInput, match="is not a size in bytes"):
            parse_bytes(size)


# ---------------------------------------------------------------- prompts


def test_a_prompt_far_beyond_the_context_is_refused_by_its_first_pieces(tmp_path: Path) -> None:
    config = msgspec.structs.replace(SMALL, max_positions=1000)
    tokenizer = _Counting(byte_tokenizer(tmp_path))
    with pytest.raises(
        BadInput, match=r"prompt 0: it has 50,000,000 characters, and the context ends at 990 tok"
    ):
        encode_prompts(["x" * 50_000_000], tokenizer, config, 10)
    assert tokenizer.characters <= PIECE


def test_a_prompt_whose_last_piece_is_too_long_is_refused_before_it_is_encoded_whole(tmp_path: Path) -> None:
    tokenizer = _Counting(byte_tokenizer(tmp_path))
    text = "x" * (PIECE + PIECE // 2)
    with pytest.raises(BadInput, match=r"it has 300,000 characters, and the context ends at 120,000 tokens"):
        tokenizer.encode(text, 120_000)
    assert tokenizer.characters == len(text)


def test_a_long_prompt_that_fits_has_the_tokens_of_its_whole_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path))
    text = "ab" * (PIECE // 2 + 10)
    assert tokenizer.encode(text, len(text)) == tokenizer.encode(text)


def test_text_that_is_not_unicode_is_told_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="prompt 0: its character 2 is not valid Unicode: write it in UTF-8"):
        encode_prompts(["ab\udcff"], Tokenizer(byte_tokenizer(tmp_path)), SMALL, 1)


def test_an_expression_that_backtracks_is_one_line(command: Any, model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).symlink_to(file)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer | {"pre_tokenizer": pattern}))
    said = command("run", copy, "--policy", "resident", "--prompt", "a" * 40 + "b")
    refused(said, r"prompt 0: .*tokenizer\.json cannot encode the text: .*retry-limit")


class _Counting(Tokenizer):
    """Counts the characters that it encodes."""

    characters = 0

    def _encode(self, text: str, *, bare: bool = False) -> list[int]:
        self.characters += len(text)
        return super()._encode(text)


# ---------------------------------------------------------------- terminals


def test_control_characters_are_shown_as_escapes_and_all_others_stay() -> None:
    assert plain_text("a\x1b[2J\r\x9b\u202e\udcff") == r"a\x1b[2J\r\x9b\u202e\udcff"
    assert plain_text("line\n\té 👩‍👧 中") == "line\n\té 👩‍👧 中"
    assert len(shown("x" * 10**6)) < 200


def test_names_in_files_cannot_act_on_the_terminal(command: Any, tmp_path: Path) -> None:
    file = tmp_path / "\x1b]0;title\x07.toml"
    text = profile_text("moesched.machines", "machine", "t4").decode()
    file.write_text(text.replace('name = "t4"', r'name = "\u001b[2J"', 1))
    said = command("roofline", "--model", "mixtral-8x7b", "--machine", file)
    assert said.code == 0
    assert r"\x1b[2J" in said.out
    assert "\x1b" not in said.out
    file.write_text("")
    said = command("roofline", "--model", "mixtral-8x7b", "--machine", file)
    assert "\x1b" not in said.err
    refused(said, r"\\x1b\]0;title\\x07\.toml")


def test_a_level_of_logs_that_is_none_is_told(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESCHED_LOG", "bogus")
    refused(command("list", "networks"), "MOESCHED_LOG is 'bogus' in the environment: set debug, info, ")


def test_closed_output_and_a_removed_folder_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *MODULE, "list", "networks"], stderr=subprocess.PIPE, text=True
    )
    assert closed.returncode == 2
    assert closed.stderr == "moesched: standard output is closed; redirect it to a file, or to /dev/null\n"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["list", "networks"]) == 2


# ---------------------------------------------------------------- imports


@pytest.mark.parametrize("name", ["mine", "mine.py"])
def test_a_policys_file_without_its_class_is_refused_with_the_way_to_write_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=rf"policy '{name}' names a file and no class: write mine\.py:CLASS"):
        plugins.find("policies", name)


def test_a_module_of_the_current_folder_comes_last_and_one_line_says_that_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    said = r"policy 'failing_module:X' cannot be loaded \(\S*failing_module.py:1\): "
    with pytest.raises(BadInput, match=said):
        plugins.find("policies", "failing_module:X")
    assert sys.path[-1] == str(tmp_path)


def test_a_library_s_name_in_the_current_folder_is_never_imported(tmp_path: Path) -> None:
    for name in ("numpy", "torch", "msgspec", "rich", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    said = subprocess.run([*MODULE, "list", "policies"], cwd=tmp_path, capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (0, "")


# ---------------------------------------------------------------- names of files

LONG = "x" * 300
RUN = ("run", "examples/tiny-mixtral", "--policy", "resident", "--prompt-ids", "1", "--max-new-tokens", 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", LONG, "--policy", "resident", "--prompt-ids", "1"),
        ("run", "examples/tiny-mixtral", "--policy", "resident", "--prompts", LONG),
        (*RUN, "--trace", LONG),
        (*RUN, "--report", f"{LONG}.html"),
        (*SIMULATE, "--policy", "resident", "--routing", f"./{LONG}.csv"),
        (*SIMULATE, "--policy", "resident", "--trace", LONG),
        ("roofline", "--model", "mixtral-0.8b", "--machine", f"{LONG}.toml"),
        ("sweep", f"{LONG}.toml"),
        ("explain", LONG),
        ("machine", "--gpu", "L4", "--cpu", "EPYC 9654", "--out", LONG),
        ("random-model", "mixtral-0.8b", LONG),
        ("prestack", "examples/tiny-mixtral", LONG),
        ("keygen", "--out", LONG),
        ("new-policy", LONG),
        ("launch", "examples/tiny-mixtral", "--hosts", LONG, "--key", LONG, "--policy", "ep_naive"),
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-2] if len(arguments) > 2 else ''}",
)
def test_a_name_that_no_file_can_have_is_refused_in_one_line(
    command: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    refused(command(*arguments), "File name too long")


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "a number in a list of objects": (
            '{"sizes": [{"rows": 0}]}',
            "Expected `int` >= 1, got 0 - at `$.sizes[0].rows`",
        ),
        "a text in place of a list": ('{"sizes": "all"}', "Expected `array`, got 'all' - at `$.sizes`"),
        "a whole file that is a list": ("[1, 2]", "Expected `object`, got [1, 2]"),
        "a list that is too short": (
            '{"sizes": [], "pair": [1]}',
            "Expected `array` of length 2, got [1] - at `$.pair`",
        ),
        "a value under some key": (
            '{"sizes": [], "named": {"a": "b"}}',
            "Expected `int`, got `str` - at `$.named[...]`",
        ),
        "a key that is missing": ("{}", "Object missing required field `sizes`"),
        "a wrong value before the file breaks off": (
            '{"sizes": 3, ',
            "Expected `array`, got `int` - at `$.sizes`",
        ),
    }.values(),
)
def test_a_value_of_a_wrong_type_is_shown_where_the_decoder_tells_its_place(text: str, said: str) -> None:
    with pytest.raises(BadInput) as refusal:
        decode_json(text.encode(), _Described, "the file", "mend it")
    assert str(refusal.value) == f"the file: {said}; mend it"


def test_a_long_value_of_a_wrong_type_is_shortened() -> None:
    with pytest.raises(BadInput) as refusal:
        decode_json(json.dumps({"sizes": [["word" * 30] * 30]}).encode(), _Described, "the file", "mend it")
    assert "got ['wordword" in str(refusal.value)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("name", ["MOESCHED_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_that_no_folder_can_have_the_name_of_is_refused_in_one_line(
    command: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("MOESCHED_CACHE", raising=False)
    monkeypatch.setenv(name, f"/tmp/{LONG}")
    refused(
        command("simulate", "--help-me"), "cannot use the cache .*: File name too long: set MOESCHED_CACHE"
    )


@pytest.mark.parametrize("given", ["cache", "./cache", "~/cache"])
def test_a_cache_that_would_move_with_the_current_folder_is_refused_in_one_line(
    command: Any, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("MOESCHED_CACHE", given)
    refused(
        command("simulate", "--help-me"),
        f"MOESCHED_CACHE is '{given}', no absolute path: give one that begins with /",
    )


@pytest.mark.parametrize("given", ["cache", "./cache", ""])
def test_a_relative_folder_of_xdg_is_ignored_and_the_cache_is_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    monkeypatch.delenv("MOESCHED_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert cache_folder() == tmp_path / ".cache" / "moesched"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_folder() == tmp_path / "elsewhere" / "moesched"


def test_a_file_may_have_the_longest_name_that_the_system_allows(tmp_path: Path) -> None:
    file = tmp_path / ("é" * 125 + ".json")
    write_json(file, "report", {"a": 1})
    assert json.loads(file.read_text()) == {"a": 1}
    with pytest.raises(BadInput, match=r"cannot write report .*: File name too long: give a shorter name"):
        write_json(tmp_path / ("é" * 126 + ".json"), "report", {})
