"""The command line: what it prints, what it writes, and one clear line for everything that cannot be."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer

from moesched.cli.main import main
from moesched.trace import check_trace
from small_models import SMALL, small_model

RUN_KEYS = {
    "tokens",
    "text",
    "prefill_seconds",
    "decode_tokens_per_second",
    "throughput_tokens_per_second",
    "peak_bytes",
    "lanes",
    "policy",
    "plan",
}
POLICIES = ("resident", "layer_streaming", "cgopipe", "adversarial")


class Said(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value on standard output."""
        return json.loads(self.out)


@pytest.fixture
def moesched(capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process."""

    def command(*arguments: object) -> Said:
        capfd.readouterr()
        code = main([str(each) for each in arguments])
        return Said(code, *capfd.readouterr())

    return command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose tokens are bytes."""
    return small_model(tmp_path_factory.mktemp("models") / "small", text=True)


@pytest.fixture(scope="module")
def no_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model without a tokenizer, with a context of 100 tokens."""
    return small_model(tmp_path_factory.mktemp("models") / "no-text", max_positions=100)


def refused(said: Said, pattern: str) -> None:
    """Bad input: exit code 2, one line that says what, and nothing on standard output."""
    assert said.code == 2
    assert said.out == ""
    assert re.fullmatch(r"moesched: [^\n]+\n", said.err), said.err
    assert re.search(pattern, said.err), said.err


# -- run ---------------------------------------------------------------------------------------------------------------


def test_run_prints_one_json_object_with_what_was_promised(moesched: Any, model: Path) -> None:
    said = moesched("run", model, "--policy", "resident", "--prompt", "abc", "--max-new-tokens", 5, "--json")
    assert said.code == 0
    assert said.json.keys() >= RUN_KEYS
    assert [len(tokens) for tokens in said.json["tokens"]] == [5]
    assert said.json["policy"] == "resident"
    assert said.json["lanes"].keys() == {"accelerator", "host", "disk->host"}
    assert all(lane.keys() == {"busy_seconds", "utilization"} for lane in said.json["lanes"].values())
    assert said.json["peak_bytes"]["host"] > 0
    assert said.json["interrupted"] is False


def test_text_is_what_the_tokens_spell_and_null_without_a_tokenizer(
    moesched: Any, model: Path, no_text: Path
) -> None:
    said = moesched("run", model, "--policy", "resident", "--prompt", "abc", "--max-new-tokens", 9, "--json")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert said.json["text"] == [tokenizer.decode(said.json["tokens"][0])]
    said = moesched(
        "run", no_text, "--policy", "resident", "--prompt-ids", "1", "--max-new-tokens", 2, "--json"
    )
    assert said.json["text"] is None


def test_weights_may_be_read_through_the_page_cache(moesched: Any, model: Path) -> None:
    wanted = ("run", model, "--policy", "cgopipe", "--prompt-ids", "1,2", "--max-new-tokens", 4, "--json")
    past, through = moesched(*wanted), moesched(*wanted, "--device-set", "direct=false")
    assert past.json["tokens"] == through.json["tokens"]
    refused(moesched(*wanted, "--device-set", "dilation=2"), "device torch has no setting 'dilation'")


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.9, "--top-k", 50, "--top-p", 0.9, "--seed", 7)])
def test_tokens_depend_on_neither_policy_nor_batches(moesched: Any, model: Path, sampling: Any) -> None:
    wanted = ("run", model, "--prompt-ids", "1,2,3;4;5,6;4", "--max-new-tokens", 6, "--json", *sampling)
    tokens = [moesched(*wanted, "--policy", policy).json["tokens"] for policy in POLICIES]
    tokens.append(
        moesched(*wanted, "--policy", "resident", "--batch-size", 3, "--micro-batch-size", 2).json["tokens"]
    )
    tokens.append(moesched(*wanted, "--policy", "cgopipe", "--batch-size", 1).json["tokens"])
    assert all(each == tokens[0] for each in tokens)
    assert (tokens[0][1] == tokens[0][3]) == (not sampling)


def test_more_prompts_than_a_batch_run_as_successive_batches(
    moesched: Any, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt_ids": [{i}]}}\n' for i in range(7)))
    said = moesched(
        "run", model, "--policy", "resident", "--prompts", file, "--batch-size", 3,
        "--max-new-tokens", 2, "--trace", tmp_path / "trace.json.gz", "--json",
    )  # fmt: skip
    assert [len(tokens) for tokens in said.json["tokens"]] == [2] * 7
    assert len(said.json["text"]) == 7
    assert said.json["batches"] == 3
    traces = ("trace.json.gz", "trace.batch2.json.gz", "trace.batch3.json.gz")
    assert [check_trace(tmp_path / name) for name in traces] == [[], [], []]


def test_a_line_that_is_no_prompt_is_told_and_costs_no_other(
    moesched: Any, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [1]}\n{"prompt_ids": [2}\n{"prompt_ids": [3]}\n')
    wanted = ("run", model, "--policy", "resident", "--max-new-tokens", 2, "--json")
    said = moesched(*wanted, "--prompts", file)
    assert said.json["tokens"] == moesched(*wanted, "--prompt-ids", "1;3").json["tokens"]
    assert re.fullmatch(r"moesched: .*prompts\.jsonl:2: [^\n]*left out[^\n]*\n", said.err)
    assert said.code == 2
    file.write_text('{"prompt_ids": [2}\n')
    refused(moesched(*wanted, "--prompts", file), r"prompts\.jsonl:1: ")


def test_a_stop_token_ends_a_request_and_is_kept(moesched: Any, model: Path, tmp_path: Path) -> None:
    wanted = ("--policy", "resident", "--prompt-ids", "1;2", "--max-new-tokens", 20, "--json")
    free = moesched("run", model, *wanted).json["tokens"]
    stop = free[0][7]
    stopping = small_model(tmp_path / "stopping", config=SMALL, stop_tokens=(stop,))
    expected = [each[: each.index(stop) + 1] if stop in each else each for each in free]
    assert moesched("run", stopping, *wanted).json["tokens"] == expected


def test_a_budget_holds_and_is_reported(moesched: Any, model: Path) -> None:
    wanted = (
        "run",
        model,
        "--prompt-ids",
        "1;2",
        "--batch-size",
        2,
        "--micro-batch-size",
        2,
        "--max-new-tokens",
        3,
        "--json",
    )
    peak = moesched(*wanted, "--policy", "resident").json["peak_bytes"]["host"]
    assert moesched(*wanted, "--policy", "resident", "--budget", f"host={peak}").code == 0
    refused(moesched(*wanted, "--policy", "resident", "--budget", "host=400KB"), "bytes too few")
    tight = moesched(*wanted, "--policy", "cgopipe", "--budget", "host=400KB").json
    assert tight["peak_bytes"]["host"] <= tight["budget_bytes"]["host"] == 400_000
    assert tight["plan"]["streamed_pages"] > 0


def test_one_prompt_is_printed_with_its_text_and_the_figures(moesched: Any, model: Path) -> None:
    wanted = ("run", model, "--policy", "resident", "--prompt", "some words", "--max-new-tokens", 8)
    text = moesched(*wanted, "--json").json["text"][0]
    said = moesched(*wanted)
    assert said.out.startswith(f"some words{text}\n")
    assert "tokens/s" in said.out
    assert re.search(r"accelerator +[\d.]+ \w?s +[\d.]+ %", said.out)
    assert re.search(r"host +[\d.]+ KB +[\d.]+ GB", said.out)


def test_several_prompts_are_printed_one_after_another(moesched: Any, model: Path) -> None:
    wanted = ("run", model, "--policy", "resident", "--prompt", "ab", "--prompt", "cd", "--max-new-tokens", 4)
    texts = moesched(*wanted, "--json").json["text"]
    assert moesched(*wanted).out.startswith(f"[0] ab{texts[0]}\n[1] cd{texts[1]}\n")


def test_without_a_tokenizer_ids_are_printed(moesched: Any, no_text: Path) -> None:
    wanted = ("run", no_text, "--policy", "resident", "--prompt-ids", "3,4", "--max-new-tokens", 3)
    ids = moesched(*wanted, "--json").json["tokens"][0]
    assert moesched(*wanted).out.startswith(f"3,4 {ids[0]} {ids[1]} {ids[2]}\n")


def test_the_report_is_what_json_prints(moesched: Any, model: Path, tmp_path: Path) -> None:
    said = moesched(
        "run", model, "--policy", "cgopipe", "--prompt", "a", "--max-new-tokens", 2, "--json",
        "--report", tmp_path / "report.json",
    )  # fmt: skip
    assert json.loads((tmp_path / "report.json").read_text()) == said.json


def test_a_policys_settings_reach_it(moesched: Any, model: Path) -> None:
    wanted = ("run", model, "--policy", "cgopipe", "--prompt-ids", "1;2;3", "--max-new-tokens", 3, "--json")
    assert moesched(*wanted, "--set", "ahead=1").json["tokens"] == moesched(*wanted).json["tokens"]


# -- run: bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt-ids", ""), "prompt 0 is empty: give at least one token"),
        (("--prompt-ids", "1;;2"), "prompt 1 is empty"),
        (
            ("--prompt-ids", "1,256"),
            "prompt 0: token id 256 is outside the vocabulary of 256: use ids from 0",
        ),
        (("--prompt-ids", "1,x"), "prompt 0: 'x' is no token id"),
        (("--prompt", "words"), r"no tokenizer\.json: add it, or give ids"),
        ((), "give prompts in one way: --prompt, --prompts or --prompt-ids"),
        (("--prompt", "a", "--prompt-ids", "1"), "give prompts in one way"),
        (("--prompts", "missing.jsonl"), r"cannot read prompts missing\.jsonl: No such file"),
        (
            ("--prompt-ids", "1", "--max-new-tokens", "100"),
            "more than the model's context of 100: shorten it",
        ),
        (("--prompt-ids", "1", "--max-new-tokens", "0"), "--max-new-tokens is 0: ask for at least 1"),
        (("--prompt-ids", "1", "--max-new-tokens", "many"), '--max-new-tokens: unable to convert "many"'),
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
        (("--prompt-ids", "1", "--budget", "1GB"), "--budget '1GB': write MEM=BYTES, such as host=600MB"),
        (("--prompt-ids", "1", "--budget", "host=1GB", "--budget", "host=2GB"), "--budget gives host twice"),
        (("--prompt-ids", "1", "--machine", "t5"), "no machine 't5': name a TOML file or one of .*t4"),
        (("--prompt-ids", "1", "--device", "abacus"), "unknown device 'abacus': choose cuda, .*torch"),
        (("--prompt-ids", "1", "--set", "ahead"), "--set 'ahead': write KEY=VALUE"),
        (("--prompt-ids", "1", "--set", "ahead=1", "--set", "ahead=2"), "--set gives ahead twice"),
        (
            ("--prompt-ids", "1", "--set", "behind=1"),
            "policy resident has no setting 'behind': it takes none",
        ),
        (("--prompt-ids", "1", "--temperature", "-1"), "temperature is -1.0; give 0"),
        (("--prompt-ids", "1", "--batch-size", "0"), "--batch-size is 0: give 1 or more"),
        (
            ("--prompt-ids", "1", "--trace", "missing/t.json"),
            "cannot write trace missing/t.json: No such file",
        ),
        (("--prompt-ids", "1", "--report", "."), "cannot write report .: it is a folder"),
        (("--prompt-ids", "1", "--frobnicate"), "Unknown option: --frobnicate"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(
    moesched: Any, no_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(moesched("run", no_text, "--policy", "resident", *arguments, "--json"), said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("residant", "unknown policy 'residant': choose .*resident.*, or write package.module:Class"),
        ("no_such_module:Mine", "'no_such_module:Mine' cannot be loaded: No module named 'no_such_module'"),
        ("json:JSONDecoder", r"json:JSONDecoder is no policy: it has no plan\(\)"),
    ],
)
def test_a_policy_that_is_none_is_told(moesched: Any, no_text: Path, policy: str, said: str) -> None:
    refused(moesched("run", no_text, "--policy", policy, "--prompt-ids", "1", "--json"), said)


def test_a_setting_of_the_wrong_kind_is_told(moesched: Any, no_text: Path) -> None:
    said = moesched(
        "run", no_text, "--policy", "cgopipe", "--set", "ahead=far", "--prompt-ids", "1", "--json"
    )
    refused(said, "policy cgopipe: ahead is 'far': give a whole number")


def test_a_folder_that_is_no_model_is_told(moesched: Any, tmp_path: Path) -> None:
    wanted = ("--policy", "resident", "--prompt-ids", "1", "--json")
    refused(moesched("run", tmp_path, *wanted), r"config\.json")
    refused(moesched("run", tmp_path / "missing", *wanted), "missing")
    refused(moesched("run"), "requires an argument")


def test_a_damaged_checkpoint_is_told_with_its_file(moesched: Any, tmp_path: Path) -> None:
    model = small_model(tmp_path / "damaged")
    shard = next(model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    said = moesched("run", model, "--policy", "resident", "--prompt-ids", "1", "--json")
    refused(said, rf"{shard.name} is truncated")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
@pytest.mark.parametrize("option", ["--trace", "--report"])
def test_a_full_disk_costs_the_file_and_not_the_result(moesched: Any, no_text: Path, option: str) -> None:
    wanted = ("run", no_text, "--policy", "resident", "--prompt-ids", "1", "--max-new-tokens", 3, "--json")
    said = moesched(*wanted, option, "/dev/full")
    assert said.code == 2
    assert re.fullmatch(r"moesched: cannot write \w+ /dev/full: No space left on device: [^\n]+\n", said.err)
    assert said.json["tokens"] == moesched(*wanted).json["tokens"]


# -- policies that err -------------------------------------------------------------------------------------------------

ERRING_POLICY = """
class Resident:
    def plan(self, plan):
        plan.place_kv("accelerator")
        plan.keep([page for i in plan.layers for page in plan.layout.layer(i)])

    async def prefill(self, step):
        for j in step.micro_batches:
            self.micro_batch(step, j)

    async def decode(self, step):
        await self.prefill(step)

    def micro_batch(self, step, j):
        step.embed(j)
        for i in step.layers:
            step.pre_attention(i, j)
            step.attention(i, j)
            step.post_attention(i, j)
        step.sample(j)


class Swaps(Resident):
    def micro_batch(self, step, j):
        step.embed(j)
        step.attention(0, j)  # before pre_attention


class Forgets(Resident):
    async def decode(self, step):
        pass


class Sleeps(Resident):
    async def decode(self, step):
        import asyncio
        await asyncio.sleep(0)  # asleep
        await asyncio.sleep(1)  # asleep


class Stumbles(Resident):
    async def decode(self, step):
        raise KeyError("what nobody foresaw")
"""


@pytest.fixture(params=["run", "simulate"])
def job(
    request: pytest.FixtureRequest, no_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Either command, in a folder with policies that err."""
    (tmp_path / "erring.py").write_text(ERRING_POLICY)
    (tmp_path / "two.toml").write_text('name = "two"\nnew_tokens = [4]\nprompt_tokens = [3, 2]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "erring", raising=False)
    if request.param == "run":
        return ["run", no_text, "--prompt-ids", "1,2;3", "--max-new-tokens", 4]
    return ["simulate", "--model", no_text, "--machine", "t4", "--workload", "two.toml"]


def line_of(marker: str) -> int:
    """The line of the erring policies in which a text stands first."""
    return next(number for number, line in enumerate(ERRING_POLICY.splitlines(), 1) if marker in line)


def test_a_policy_of_ones_own_runs_by_module_and_class(moesched: Any, job: list[Any]) -> None:
    assert moesched(*job, "--policy", "erring:Resident", "--json").code == 0


@pytest.mark.parametrize(
    ("policy", "marker", "said"),
    [
        ("Swaps", "# before pre_attention", r"OutOfOrder: attention\(L0, mb0\) needs mb0 at .*"),
        ("Sleeps", "# asleep", "PolicyError: a policy may await the handles of its tasks only"),
    ],
)
def test_an_illegal_policy_is_told_at_its_own_line(
    moesched: Any, job: list[Any], policy: str, marker: str, said: str
) -> None:
    said_all = moesched(*job, "--policy", f"erring:{policy}", "--json", "--trace", "trace.json")
    refused(said_all, rf"erring\.py:{line_of(marker)}: {said}")
    assert not Path("trace.json").exists()


def test_a_policy_that_leaves_a_step_unfinished_is_told_by_its_name(moesched: Any, job: list[Any]) -> None:
    said = moesched(*job, "--policy", "erring:Forgets", "--json")
    line = line_of("class Forgets") + 1
    refused(
        said,
        rf"erring\.py:{line} \(Forgets\.decode\): OutOfOrder: decode step 1 ended before mb0 was sampled",
    )


def test_what_nobody_foresaw_keeps_its_traceback(moesched: Any, job: list[Any]) -> None:
    said = moesched(*job, "--policy", "erring:Stumbles", "--json")
    assert said.code == 1
    assert "Traceback" in said.err
    assert "KeyError: 'what nobody foresaw'" in said.err


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def interrupt(arguments: list[Any], *, after: str) -> Said:
    """Run a command in a process of its own and send it Ctrl-C as soon as `after` stands in its output."""
    command = [sys.executable, "-m", "moesched", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        source = process.stderr if after in LOGGED else process.stdout
        begun = ""
        while after not in begun:
            begun += source.read(1) or pytest.fail(f"ended before it said {after!r}: {process.communicate()}")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        if source is process.stderr:
            err = begun + err
        else:
            out = begun + out
        return Said(process.returncode, out, err)


LOGGED = ("first token",)
ENDLESS = ("--max-new-tokens", 150_000)


def test_ctrl_c_keeps_the_text_so_far(model: Path) -> None:
    said = interrupt(["run", model, "--policy", "cgopipe", "--prompt", "abc", *ENDLESS], after="abc")
    assert said.code == 130
    assert said.out.startswith("abc")
    assert "tokens/s" in said.out
    assert re.search(r"^moesched: interrupted after \d+ tokens$", said.err, re.MULTILINE)
    assert "Traceback" not in said.err


def test_ctrl_c_keeps_tokens_and_trace(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESCHED_LOG", "info")
    trace = tmp_path / "trace.json"
    arguments = ["run", model, "--policy", "cgopipe", "--prompt-ids", "1,2;3;4", "--batch-size", 2, *ENDLESS]
    said = interrupt([*arguments, "--json", "--trace", trace], after="first token")
    assert said.code == 130
    assert "Traceback" not in said.err
    assert said.json["interrupted"] is True
    assert [len(tokens) < 150_000 for tokens in said.json["tokens"]] == [True] * 3
    assert said.json["tokens"][2] == []
    assert check_trace(trace) == []
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


# -- simulate ----------------------------------------------------------------------------------------------------------

SIMULATE = ("simulate", "--model", "mixtral-0.8b", "--machine", "t4", "--workload", "mtbench")


def test_simulate_prints_one_json_object_with_what_was_promised(moesched: Any) -> None:
    said = moesched(*SIMULATE, "--policy", "cgopipe", "--batch-size", 8, "--gen", 3, "--json")
    assert said.code == 0
    assert said.json.keys() >= RUN_KEYS - {"tokens", "text"} | {"tasks", "simulated_seconds", "wall_seconds"}
    assert not said.json.keys() & {"tokens", "text"}
    assert said.json["plan"]["batch_size"] == 8
    assert said.json["plan"]["new_tokens"] == 3
    assert len(said.json["step_seconds"]) == 3
    assert said.json["simulated_seconds"] > 0


def test_the_same_seed_predicts_the_same(moesched: Any) -> None:
    wanted = (*SIMULATE, "--policy", "adversarial", "--batch-size", 4, "--gen", 2, "--json")
    first, again, other = (moesched(*wanted, "--seed", seed).json for seed in (1, 1, 2))
    assert first["simulated_seconds"] == again["simulated_seconds"] != other["simulated_seconds"]


def test_sizes_that_are_not_given_fit(moesched: Any) -> None:
    said = moesched(*SIMULATE, "--policy", "layer_streaming", "--gen", 2, "--budget", "gpu=900MB", "--json")
    assert said.json["peak_bytes"]["gpu"] <= 900_000_000
    assert 1 < said.json["plan"]["batch_size"] < 1024
    refused(
        moesched(*SIMULATE, "--policy", "layer_streaming", "--budget", "gpu=200MB", "--json"), "does not fit"
    )


def test_a_folder_needs_no_weights_to_be_simulated(moesched: Any, no_text: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((no_text / "config.json").read_text())
    wanted = ("simulate", "--model", tmp_path, "--machine", "t4", "--policy", "resident", "--workload")
    (tmp_path / "short.toml").write_text('name = "short"\nnew_tokens = [4]\nprompt_tokens = [3, 9]\n')
    assert moesched(*wanted, tmp_path / "short.toml", "--json").json["plan"]["batch_size"] == 2
    refused(moesched(*wanted, "uniform"), "a prompt of 128 tokens and 32 new ones are more than the context")


def test_a_file_of_prompts_is_a_workload(moesched: Any, no_text: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [1, 2]}\n{"prompt_ids": [3]}\n')
    wanted = ("simulate", "--model", no_text, "--machine", "t4", "--policy", "cgopipe", "--workload", file)
    whole = moesched(*wanted, "--gen", 2, "--json")
    assert (whole.code, whole.json["plan"]["batch_size"]) == (0, 2)
    file.write_text(file.read_text() + "{\n")
    partly = moesched(*wanted, "--gen", 2, "--json")
    assert (partly.code, partly.json["step_seconds"]) == (2, whole.json["step_seconds"])
    assert re.fullmatch(r"moesched: .*prompts\.jsonl:3: [^\n]*left out[^\n]*\n", partly.err)


def test_padded_requests_of_several_batches_are_traced_and_printed(moesched: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    said = moesched(
        *SIMULATE, "--policy", "flexgen", "--gen", 2, "--requests", 5, "--batch-size", 3, "--padded",
        "--trace", trace,
    )  # fmt: skip
    assert "2 new tokens, padded, 2 batches" in said.out
    assert [check_trace(trace), check_trace(tmp_path / "trace.batch2.json")] == [[], []]


def test_a_prediction_is_traced_and_compared_with_itself(moesched: Any, tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.json", tmp_path / "report.json"
    wanted = (*SIMULATE, "--policy", "cgopipe", "--batch-size", 4, "--gen", 2)
    said = moesched(*wanted, "--trace", trace, "--report", report)
    assert "predicted on t4" in said.out
    assert str(trace) in said.out
    assert check_trace(trace) == []
    side_by_side = moesched("compare", report, trace, "--json").json
    assert [run["figures"] for run in side_by_side["runs"]] == ["predicted", "predicted"]
    steps = next(row for row in side_by_side["rows"] if row["name"] == "decode step")
    assert steps["values"][0] == pytest.approx(steps["values"][1])
    assert "decode step" in moesched("compare", report, trace).out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "gpt-5"), "no model 'gpt-5': name a folder with a config.json, or one of mixtral-0.8b"),
        (("--machine", "t5"), "no machine 't5'"),
        (("--workload", "chat"), "no workload 'chat': name a TOML file or one of mtbench, "),
        (("--policy", "magic"), "unknown policy 'magic'"),
        (("--workload", "no.jsonl"), r"cannot read prompts no\.jsonl: No such file"),
        (("--requests", "0"), "--requests is 0: ask for at least 1"),
        (("--gen", "0"), "--gen is 0: ask for at least 1 token"),
        (("--gen", "40000"), "40000 new ones are more than the context of mixtral-0.8b, 32768"),
    ],
)
def test_what_cannot_be_simulated_is_told_in_one_line(moesched: Any, arguments: Any, said: str) -> None:
    given = dict(zip(SIMULATE[1::2], SIMULATE[2::2], strict=True)) | {"--policy": "resident"}
    given |= dict([arguments])
    refused(moesched("simulate", *(each for pair in given.items() for each in pair), "--json"), said)


def test_compare_says_why_and_shows_a_run_beside_its_replay(moesched: Any, tmp_path: Path) -> None:
    trace, both = tmp_path / "trace.json", tmp_path / "both.json"
    moesched(*SIMULATE, "--policy", "cgopipe", "--batch-size", 4, "--gen", 3, "--trace", trace)
    said = moesched("compare", trace, "--replayed", "--trace", both)
    assert "trace.json replayed (predicted)" in said.out
    assert "explain" in said.out
    assert check_trace(both) == []
    told = moesched("compare", trace, "--replayed", "--json").json["difference"]
    assert told["run_seconds"][0] == pytest.approx(told["run_seconds"][1])


def test_compare_wants_two_files_of_ours(moesched: Any, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    refused(moesched("compare", tmp_path / "other.json"), "1 run given: name two")
    refused(
        moesched("compare", tmp_path / "other.json", tmp_path / "other.json"),
        r"other\.json is no run's report",
    )


# -- the others --------------------------------------------------------------------------------------------------------


def test_random_model_writes_a_model_that_runs(moesched: Any, tmp_path: Path) -> None:
    said = moesched("random-model", "mixtral-0.8b", tmp_path / "m", "--layers", 1, "--seed", 3, "--json")
    assert said.json["directory"] == str(tmp_path / "m")
    assert said.json["layers"] == 1
    said = moesched(
        "run", tmp_path / "m", "--policy", "cgopipe", "--prompt-ids", "1", "--max-new-tokens", 1, "--json"
    )
    assert len(said.json["tokens"][0]) == 1
    refused(moesched("random-model", "mixtral-0.8b", tmp_path / "m"), "exists already; remove it")
    refused(
        moesched("random-model", "mixtral-1b", tmp_path / "n"),
        "unknown model shape 'mixtral-1b'; choose one of",
    )


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("policies", {"adversarial", "cgopipe", "layer_streaming", "resident"}),
        ("devices", {"torch"}),
        ("transports", {"inproc"}),
        ("models", {"mixtral-0.8b", "mixtral-8x7b", "mixtral-8x22b", "dbrx", "qwen3-30b-a3b", "olmoe-1b-7b"}),
        ("machines", {"auto", "t4"}),
        ("workloads", {"mtbench", "synthetic-reasoning", "summarization", "uniform"}),
    ],
)
def test_list_shows_what_is_there_in_a_word_and_a_line(moesched: Any, kind: str, names: set[str]) -> None:
    entries = moesched("list", kind, "--json").json[kind]
    assert names <= {entry["name"] for entry in entries}
    assert all(entry["description"] for entry in entries if entry["name"] in names)
    said = moesched("list", kind)
    assert said.code == 0
    assert all(name in said.out for name in names)


def test_list_shows_plugins_of_others_and_why_one_cannot_load(
    moesched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[moesched.policies]\ntheirs = theirs_is_not_installed:Theirs\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entries = {entry["name"]: entry for entry in moesched("list", "policies", "--json").json["policies"]}
    assert "No module named 'theirs_is_not_installed'" in entries["theirs"]["problem"]
    assert entries["resident"]["problem"] is None
    assert re.search(r"theirs +cannot load: .*theirs_is_not_installed", moesched("list", "policies").out)


@pytest.mark.parametrize(
    "command", ["run", "simulate", "random-model", "list", "compare", "calibrate", "roofline", "reproduce"]
)
def test_each_command_explains_itself_with_an_example(moesched: Any, command: str) -> None:
    said = moesched(command, "--help")
    assert said.code == 0
    assert re.search(rf"Examples?:\s+moesched {command}", said.out)
    assert command in moesched("--help").out


def test_an_unknown_command_is_told(moesched: Any) -> None:
    refused(moesched("runn"), 'Unknown command "runn"')


def test_the_version_is_printed(moesched: Any) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", moesched("--version").out)
