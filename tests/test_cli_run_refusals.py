"""`moesched run` on what cannot be used: one clear line, and no result is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commands import failed, refused
from small_models import small_model


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt-ids", ""), "prompt 0 is empty: give at least one token"),
        (("--prompt-ids", "1;;2"), "prompt 1 is empty"),
        (
            ("--prompt-ids", "1,256"),
            "prompt 0: token id 256 is outside the vocabulary of 256: use ids from 0",
        ),
        (("--prompt-ids", "1,x"), "prompt 0: 'x' is not a token id"),
        (("--prompt", "words"), r"no tokenizer\.json: add it, or give ids"),
        ((), "give prompts in one way: --prompt, --prompts or --prompt-ids"),
        (("--prompt", "a", "--prompt-ids", "1"), "give prompts in one way"),
        (("--prompts", "missing.jsonl"), r"cannot read prompts missing\.jsonl: No such file"),
        (
            ("--prompt-ids", "1", "--max-new-tokens", "100"),
            "more than the model's context of 100: shorten it",
        ),
        (("--prompt-ids", "1", "--max-new-tokens", "many"), "--max-new-tokens: 'many' is not a whole number"),
        (("--prompt-ids", "1", "--dtype", "int4"), 'Invalid value "int4" for --dtype.*"bfloat16"'),
        (
            ("--prompt-ids", "1", "--budget", "host=1KB"),
            "does not fit: .* needs .* bytes of host.*raise --budget",
        ),
        (
            ("--prompt-ids", "1", "--budget", "gpu=1GB"),
            "--budget names 'gpu', .* its memories are host, disk",
        ),
        (("--prompt-ids", "1", "--budget", "host=some"), "'some' is not a size in bytes: write a number"),
        (("--prompt-ids", "1", "--budget", "1GB"), "--budget '1GB': write MEM=BYTES"),
        (("--prompt-ids", "1", "--device", "abacus"), "unknown device 'abacus': choose cuda, .*torch"),
        (("--prompt-ids", "1", "--threads", "5000"), "threads is 5000: give 1 to"),
        (("--prompt-ids", "1", "--set", "ahead"), "--set 'ahead': write KEY=VALUE"),
        (
            ("--prompt-ids", "1", "--set", "behind=1"),
            "policy resident has no setting 'behind': it takes none",
        ),
        (
            ("--prompt-ids", "1", "--trace", "missing/t.json"),
            "cannot write trace missing/t.json: No such file",
        ),
        (("--prompt-ids", "1", "--report", "."), "cannot write report .: it is a folder"),
        (("--prompt-ids", "1", "--frobnicate"), "Unknown option: --frobnicate"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(
    command: Any, no_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(command("run", no_text, "--policy", "resident", *arguments, "--json"), said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            "residant",
            "unknown policy 'residant': did you mean resident[?] Otherwise choose .*, or write module:Class or file",
        ),
        ("no_such_module:Mine", "'no_such_module:Mine' cannot be loaded: No module named 'no_such_module'"),
        ("json:JSONDecoder", r"json:JSONDecoder is not a policy: it has no plan\(\)"),
    ],
)
def test_a_policy_that_is_none_is_told(command: Any, no_text: Path, policy: str, said: str) -> None:
    refused(command("run", no_text, "--policy", policy, "--prompt-ids", "1", "--json"), said)


def test_a_setting_of_the_wrong_kind_is_told(command: Any, no_text: Path) -> None:
    said = command("run", no_text, "--policy", "cgopipe", "--set", "ahead=far", "--prompt-ids", "1", "--json")
    refused(said, "policy cgopipe: ahead is 'far': give a whole number")


def test_a_folder_that_is_no_model_is_told(command: Any, tmp_path: Path) -> None:
    wanted = ("--policy", "resident", "--prompt-ids", "1", "--json")
    refused(command("run", tmp_path, *wanted), r"config\.json")
    refused(command("run", tmp_path / "missing", *wanted), "missing")
    refused(command("run"), "requires an argument")


def test_a_damaged_checkpoint_is_told_with_its_file(command: Any, tmp_path: Path) -> None:
    model = small_model(tmp_path / "damaged")
    shard = next(model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    said = command("run", model, "--policy", "resident", "--prompt-ids", "1", "--json")
    refused(said, rf"{shard.name} is truncated")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
@pytest.mark.parametrize("option", ["--trace", "--report"])
def test_a_full_disk_costs_the_file_and_not_the_result(command: Any, no_text: Path, option: str) -> None:
    wanted = ("run", no_text, "--policy", "resident", "--prompt-ids", "1", "--max-new-tokens", 3, "--json")
    said = command(*wanted, option, "/dev/full")
    failed(said, r"cannot write \w+ /dev/full: No space left on device: ")
    assert said.json["tokens"] == command(*wanted).json["tokens"]
