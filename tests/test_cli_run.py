"""`moesched run`: what it prints and writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

import moesched
from commands import RUN_KEYS, failed, refused
from moesched.cli.report_tables import print_report
from moesched.runs.process_bytes import ProcessBytes
from moesched.system.plain_text import plain_text
from moesched.trace import check_trace
from small_models import SMALL, small_model
from traces import largest_file

POLICIES = ("resident", "layer_streaming", "cgopipe", "adversarial")


def given(options: str, *more: object) -> tuple[object, ...]:
    """The words of options, and arguments that are no words."""
    return (*options.split(), *more)


def test_run_prints_one_json_object_with_what_was_promised(command: Any, model: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    said = command(
        "run", model, *given("--prompt abc --max-new-tokens 5 --policy resident --json"), "--report", report
    )
    assert said.code == 0
    assert said.json.keys() >= RUN_KEYS
    assert [len(tokens) for tokens in said.json["tokens"]] == [5]
    assert said.json["policy"] == "resident"
    assert said.json["lanes"].keys() == {"accelerator", "host", "disk->host"}
    assert all(lane.keys() == {"busy_seconds", "utilization"} for lane in said.json["lanes"].values())
    assert said.json["peak_bytes"]["host"] > 0
    assert said.json["interrupted"] is False
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert said.json["text"] == [tokenizer.decode(said.json["tokens"][0])]
    assert json.loads(report.read_text()) == said.json


def test_weights_may_be_read_through_the_page_cache(command: Any, model: Path) -> None:
    wanted = (
        "run",
        model,
        *given("--policy cgopipe --prompt-ids 1,2 --max-new-tokens 4 --json --device-set"),
    )
    past, through = (command(*wanted, f"direct={direct}") for direct in ("true", "false"))
    assert past.json["tokens"] == through.json["tokens"]
    refused(command(*wanted, "dilation=2"), "device torch has no setting 'dilation'")


def test_drawn_tokens_depend_on_neither_policy_nor_batches(command: Any, model: Path) -> None:
    drawn = given("--temperature 0.9 --top-k 50 --top-p 0.9 --seed 7 --max-new-tokens 6 --json")
    ways = (*POLICIES, "resident --batch-size 3 --micro-batch-size 2", "cgopipe --batch-size 1")
    wanted = ("run", model, "--prompt-ids", "1,2,3;4;5,6;4", *drawn, "--policy")
    tokens, *others = (command(*wanted, *given(way)).json["tokens"] for way in ways)
    assert all(each == tokens for each in others)
    assert tokens[1] != tokens[3], "each request draws for itself"


def test_more_prompts_than_a_batch_run_as_successive_batches(
    command: Any, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt_ids": [{i}]}}\n' for i in range(7)))
    options = given(
        "--policy resident --batch-size 3 --max-new-tokens 2 --json --trace", tmp_path / "trace.json.gz"
    )
    said = command("run", model, "--prompts", file, *options)
    assert [len(tokens) for tokens in said.json["tokens"]] == [2] * 7
    assert len(said.json["text"]) == 7
    assert said.json["batches"] == 3
    traces = ("trace.json.gz", "trace.batch2.json.gz", "trace.batch3.json.gz")
    assert [check_trace(tmp_path / name) for name in traces] == [[], [], []]


def test_a_line_that_is_no_prompt_is_told_and_costs_no_other(
    command: Any, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [1]}\n{"prompt_ids": [2}\n{"prompt_ids": [3]}\n')
    wanted = ("run", model, "--policy", "resident", "--max-new-tokens", 2, "--json")
    said = command(*wanted, "--prompts", file)
    assert said.json["tokens"] == command(*wanted, "--prompt-ids", "1;3").json["tokens"]
    assert re.fullmatch(r"moesched: .*prompts\.jsonl:2: [^\n]*skipped[^\n]*\n", said.err)
    assert said.code == 2
    file.write_text('{"prompt_ids": [2}\n')
    refused(command(*wanted, "--prompts", file), r"prompts\.jsonl:1: ")


def test_a_stop_token_ends_a_request_and_is_kept(command: Any, model: Path, tmp_path: Path) -> None:
    wanted = ("--policy", "resident", "--prompt-ids", "1;2", "--max-new-tokens", 20, "--json")
    free = command("run", model, *wanted).json["tokens"]
    stop = free[0][7]
    stopping = small_model(tmp_path / "stopping", config=SMALL, stop_tokens=(stop,))
    expected = [each[: each.index(stop) + 1] if stop in each else each for each in free]
    assert command("run", stopping, *wanted).json["tokens"] == expected


def test_a_budget_holds_and_is_reported(command: Any, model: Path) -> None:
    sizes = given("--batch-size 2 --micro-batch-size 2 --max-new-tokens 3 --json")
    wanted = ("run", model, "--prompt-ids", "1;2", *sizes, "--policy")
    peak = command(*wanted, "resident").json["peak_bytes"]["host"]
    assert command(*wanted, "resident", "--budget", f"host={peak}").code == 0
    refused(command(*wanted, "resident", "--budget", "host=400KB"), "bytes too few")
    tight = command(*wanted, "cgopipe", "--budget", "host=400KB").json
    assert tight["peak_bytes"]["host"] <= tight["budget_bytes"]["host"] == 400_000
    assert tight["plan"]["streamed_pages"] > 0


def test_prompts_are_printed_with_their_texts_and_the_figures(command: Any, model: Path) -> None:
    wanted = ("run", model, *given("--policy resident --max-new-tokens 8 --prompt"), "some words")
    text = command(*wanted, "--json").json["text"][0]
    said = command(*wanted)
    assert said.out.startswith(f"some words{text}\n")
    assert "tokens/s" in said.out
    assert re.search(r"accelerator +[\d.]+ \w?s +[\d.]+ %", said.out)
    assert re.search(r"host +[\d.]+ KB +[\d.]+ GB", said.out)
    more = (*wanted, "--prompt", "cd")
    shown = [plain_text(text) for text in command(*more, "--json").json["text"]]
    assert command(*more).out.startswith(f"[0] some words{shown[0]}\n[1] cd{shown[1]}\n")


def test_without_a_tokenizer_ids_are_printed_and_the_text_is_null(command: Any, no_text: Path) -> None:
    wanted = ("run", no_text, *given("--policy resident --prompt-ids 3,4 --max-new-tokens 3"))
    told = command(*wanted, "--json").json
    assert told["text"] is None
    assert command(*wanted).out.startswith("3,4 {} {} {}\n".format(*told["tokens"][0]))


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([[1] * 4, [2] * 4], "2 requests, .*, 4 new tokens;"),
        ([[1], [2] * 4], ", 5 new tokens, at most 4 a request;"),
    ],
)
def test_the_number_of_new_tokens_is_that_of_the_texts(
    tokens: list[list[int]], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = moesched.simulate_model(
        "mixtral-0.8b", machine="t4", policy="resident", workload="mtbench", batch_size=2, gen=4
    )
    print_report(msgspec.structs.replace(report, measured=True, tokens=tokens))
    assert re.search(words, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("peak", "said"),
    [
        (
            0,
            "process: 10 GB predicted at peak: 1 GB weights, KV cache and buffers, 9 GB Python and libraries\n",
        ),
        (
            12_000_000_000,
            "process: 12 GB predicted at peak, before the first batch; then 10 GB: "
            "1 GB weights, KV cache and buffers, 9 GB Python and libraries\n",
        ),
    ],
)
def test_the_parts_of_the_process_add_up_to_what_is_said_of_them(
    peak: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = moesched.simulate_model(
        "mixtral-0.8b", machine="t4", policy="resident", workload="mtbench", batch_size=2, gen=4
    )
    parts = ProcessBytes(
        predicted=max(10_000_000_000, peak), measured=None, limit=None,
        runtime=9_000_000_000, plan=1_000_000_000, allocator=0, kernels=0,
    )  # fmt: skip
    print_report(msgspec.structs.replace(report, process_bytes=parts))
    assert said in capsys.readouterr().out


def test_a_damaged_checkpoint_is_told_with_its_file(command: Any, tmp_path: Path) -> None:
    model = small_model(tmp_path / "damaged")
    shard = next(model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    said = command("run", model, "--policy", "resident", "--prompt-ids", "1", "--json")
    refused(said, rf"{shard.name} is truncated")


@pytest.mark.parametrize(("option", "name"), [("--trace", "trace.json"), ("--report", "report.html")])
def test_a_full_disk_costs_the_file_and_not_the_result(
    command: Any, no_text: Path, tmp_path: Path, option: str, name: str
) -> None:
    wanted = ("run", no_text, "--policy", "resident", "--prompt-ids", "1", "--max-new-tokens", 3, "--json")
    with largest_file(8192):
        said = command(*wanted, option, tmp_path / name)
    failed(said, rf"cannot write \w+ .*{name}: File too large: ")
    assert said.json["tokens"] == command(*wanted).json["tokens"]
    assert not (tmp_path / name).exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_device_that_takes_no_bytes_is_refused_before_anything_is_measured(command: Any) -> None:
    said = command("calibrate", "--out", "/dev/full")
    refused(said, "cannot write machine file /dev/full: No space left on device: free some space")
