"""Policies with one mistake each (faulty/): each is told at its own line, in few lines, and none hangs."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.robustness._damage import Damage, Damaged, Kind
from benchmarks.robustness.damaged_policies import Bench
from commands import refused
from moesched.plugins import make_policy
from moesched.runs.policy_errors import policy_line

FAULTY = Path(__file__).parent / "faulty"
KINDS = ("sound", "plans", "schedules", "fetches", "errors")
MARK = "#!"
MOST_LINES = 8


class Faulty(NamedTuple):
    """A policy in a file, and its marked line with what must be said of it; no line where nothing is wrong."""

    file: Path
    name: str
    line: int
    said: str

    @property
    def policy(self) -> str:
        return f"{self.file}:{self.name}"


def faulty_policies() -> list[Faulty]:
    return [found for kind in KINDS for found in policies_in(FAULTY / f"{kind}.py")]


def policies_in(file: Path) -> Iterator[Faulty]:
    text = file.read_text()
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            numbers = range(node.lineno, (node.end_lineno or 0) + 1)
            marked = [number for number in numbers if MARK in lines[number - 1]]
            line = marked[0] if marked else 0
            said = lines[line - 1].partition(MARK)[2].strip() if line else ""
            yield Faulty(file, node.name, line, said)


def faulty_policy(name: str) -> str:
    """One of them, as commands take it."""
    return next(faulty.policy for faulty in faulty_policies() if faulty.name == name)


def line_of(text: str, name: str, mark: str) -> int:
    """The number of the first line with a mark in a class of a file."""
    lines = text.splitlines()
    begins = next(number for number, line in enumerate(lines) if line.startswith(f"class {name}("))
    return next(number for number, line in enumerate(lines, 1) if number > begins and mark in line)


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A simulation of two micro-batches, by faulty policies."""
    (tmp_path / "two.toml").write_text('name = "two"\nnew_tokens = [4]\nprompt_tokens = [3, 2]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(FAULTY)])
    for name in (*KINDS, "mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return ["simulate", "--machine", "t4", "--workload", "two.toml", "--micro-batch-size", 1, "--json"]


@pytest.mark.parametrize("faulty", faulty_policies(), ids=lambda faulty: faulty.name)
def test_a_mistake_is_told_at_its_line(
    command: Any, no_text: Path, simulated: list[Any], faulty: Faulty
) -> None:
    said = command(*simulated, "--model", no_text, "--policy", faulty.policy)
    if not faulty.line:
        assert said.code == 0
        return
    first, *others = said.err.splitlines()
    assert said.code in (1, 2)
    assert re.match(
        rf"moesched: .*{faulty.file.stem}\.py:{faulty.line}\b.*: {re.escape(faulty.said)}", first
    ), first
    assert all(line.startswith("  ") for line in others)
    assert len(others) < MOST_LINES


@pytest.mark.parametrize("name", ["Leaves", "Sleeps", "SetsATimeout", "SwapsArguments", "OmitsSample"])
def test_a_run_tells_a_mistake_at_its_line_too(
    command: Any, no_text: Path, simulated: list[Any], name: str
) -> None:
    [faulty] = (each for each in faulty_policies() if each.name == name)
    said = command(
        "run", no_text, "--prompt-ids", "1,2;3", "--policy", faulty.policy, "--trace", "trace.json"
    )
    assert (said.code, said.out) == (1, "")
    assert re.match(
        rf"moesched: .*{faulty.file.stem}\.py:{faulty.line}\b.*: {re.escape(faulty.said)}", said.err
    )
    assert not Path("trace.json").exists()


@pytest.mark.parametrize("name", ["SleepsInThePrefill", "WaitsForAnEventInThePrefill", "FailsInALaterStep"])
def test_a_prediction_that_could_be_replayed_tells_a_mistake_and_has_a_report(
    command: Any, simulated: list[Any], name: str
) -> None:
    faulty = next(each for each in faulty_policies() if each.name == name)
    sizes = ("--batch-size", 2, "--micro-batch-size", 1, "--gen", 4)
    large = ("simulate", "--model", "mixtral-8x7b", "--machine", "t4", "--workload", "mtbench", *sizes)
    said = command(*large, "--policy", faulty.policy, "--report", "report.json")
    assert said.code == 1
    assert re.match(rf"moesched: .*schedules\.py:{faulty.line}\b.*: {re.escape(faulty.said)}", said.err)
    failure = json.loads(Path("report.json").read_text())["failure"]
    assert failure.startswith(faulty.said.partition(": ")[2])


def test_a_mistake_deep_within_shows_the_policys_own_frames(
    command: Any, no_text: Path, simulated: list[Any]
) -> None:
    said = command(*simulated, "--model", no_text, "--policy", faulty_policy("StumblesDeepWithin"))
    shown = [line.split(":", 1)[1].split(" in ", 1)[1] for line in said.err.splitlines()[1:]]
    assert shown == [
        "decode: await self.first(step)",
        "first: self.second(step.layers)",
        "second: return layers[99]",
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ForgetsToAwaitTheRoutersItems", "await the handle that a verb returns"),
        ("CallsAVerbInThePlan", "a plan has no verbs: call them in prefill and decode"),
    ],
)
def test_a_hint_is_the_only_guess(
    command: Any, no_text: Path, simulated: list[Any], name: str, hint: str
) -> None:
    said = command(*simulated, "--model", no_text, "--policy", faulty_policy(name))
    assert said.err.endswith(f"  hint: {hint}\n")
    assert "did you mean" not in said.err


def test_each_error_of_a_group_is_told_at_its_line(command: Any, no_text: Path, simulated: list[Any]) -> None:
    said = command(*simulated, "--model", no_text, "--policy", faulty_policy("FailsTwiceInAGroup"))
    number = line_of((FAULTY / "errors.py").read_text(), "FailsTwiceInAGroup", "COPY[name]")
    shown = [line.rpartition("errors.py:")[2] for line in said.err.splitlines()[1:]]
    assert shown == [f"{number}: KeyError: 'experts'", f"{number}: KeyError: 'router'"]


def test_what_a_policy_prints_is_not_among_the_json(
    command: Any, no_text: Path, simulated: list[Any]
) -> None:
    said = command(*simulated, "--model", no_text, "--policy", faulty_policy("Prints"))
    assert said.json["policy"] == faulty_policy("Prints")
    assert "decoding 1" in said.err


def test_the_whole_traceback_is_shown_on_demand(command: Any, no_text: Path, simulated: list[Any]) -> None:
    said = command(*simulated, "--model", no_text, "--policy", faulty_policy("Stumbles"), "--traceback")
    assert "Traceback (most recent call last)" in said.err
    assert re.search(r"moesched: .*errors\.py:\d+: KeyError: 'experts'\n$", said.err)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("import numpy\nimport nump\n\nclass Mine: ...\n", 2, "No module named 'nump'"),
        ("class Mine:\n    def plan(self plan): ...\n", 2, "SyntaxError: "),
        ("table = {}\nfirst = table['first']\n", 2, "KeyError: 'first'"),
        ("def load():\n    raise ValueError('no table')\n\nload()\n", 2, "ValueError: no table"),
        ("raise SystemExit(0)", 1, "SystemExit: 0"),
        ("(", 1, "SyntaxError: "),
    ],
)
def test_a_file_that_cannot_be_imported_is_told_at_its_line(
    command: Any, simulated: list[Any], text: str, line: int, said: str
) -> None:
    Path("mine.py").write_text(text)
    told = command(*simulated, "--model", "mixtral-0.8b", "--policy", "mine.py:Mine")
    refused(told, rf"policy 'mine.py:Mine' cannot be loaded \(\S*mine\.py:{line}\): {said}")


@pytest.mark.parametrize("file", ["uvloop/loop.pyx", "zmq/backend/cython/_zmq.py"])
def test_compiled_code_of_a_library_is_no_policys(file: str) -> None:
    compiled: dict[str, Any] = {}
    exec(compile("def call(): return 1 / 0", file, "exec"), compiled)
    with pytest.raises(ZeroDivisionError) as raised:
        compiled["call"]()
    assert policy_line(raised.value).startswith(f"{__file__}:")


def test_a_plug_in_that_ends_the_program_while_it_is_made_is_told_at_its_line(
    command: Any, no_text: Path, simulated: list[Any]
) -> None:
    methods = "    def order(self, waiting): ...\n    def entered(self, request): ...\n"
    Path("mine.py").write_text(
        f"class Mine:\n    def __init__(self):\n        raise SystemExit(0)\n{methods}"
    )
    rule = ("--policy", "resident", "--arrivals", "poisson:1", "--admission", "mine.py:Mine")
    said = command("simulate", "--model", no_text, "--machine", "t4", "--workload", "two.toml", *rule)
    assert (said.code, said.out) == (1, "")
    assert re.search(r"^moesched: \S*mine\.py:3: SystemExit: 0$", said.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Yours: ...\n", r"cannot be loaded: mine\.py has no Mine, only Yours$"),
        ("Mine = 3\n", "should be a class"),
        ("class Mine:\n    def plan(self, plan): ...\n", "it has no prefill"),
        (None, "cannot be loaded: .*No such file"),
    ],
)
def test_what_is_no_policy_is_refused(
    command: Any, simulated: list[Any], text: str | None, said: str
) -> None:
    if text is not None:
        Path("mine.py").write_text(text)
    refused(command(*simulated, "--model", "mixtral-0.8b", "--policy", "mine.py:Mine"), said)


CONSTRUCTED = """
from sound import Streams

class Mine(Streams):
    def __init__(self, ahead{default}):
        self.ahead = 1 // ahead
"""


def test_a_constructor_without_defaults_is_told_with_its_remedy(command: Any, simulated: list[Any]) -> None:
    Path("mine.py").write_text(CONSTRUCTED.format(default=""))
    mine = (*simulated, "--model", "mixtral-0.8b", "--policy", "mine.py:Mine")
    refused(command(*mine), "policy mine.py:Mine: its constructor has no default for ahead: give one; --set")


def test_an_error_in_a_constructor_is_told_at_its_line(command: Any, simulated: list[Any]) -> None:
    Path("mine.py").write_text(CONSTRUCTED.format(default="=0"))
    said = command(*simulated, "--model", "mixtral-0.8b", "--policy", "mine.py:Mine")
    assert said.code == 1
    assert re.match(r"moesched: \S*mine\.py:6: ZeroDivisionError: ", said.err)


# -- one wrong verb call: refused at its own line, or harmless -------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize("real", [True, False], ids=["real threads", "virtual clock"])
@pytest.mark.parametrize("first", range(0, 30, 10))
def test_a_damaged_policy_is_refused_or_does_no_harm(bench: Bench, real: bool, first: int) -> None:
    """A few of them; benchmarks/robustness/damaged_policies.py runs thousands."""
    for seed in range(first, first + 10):
        name, damaged, end = bench.end(seed, real=real)
        assert end.well, f"{name}, {damaged.damage} of {damaged.struck}: {end}"


REFUSED: list[tuple[str, Kind, str, str]] = [
    ("cgopipe", "drop", "fetch", "fetch it before the kernel that reads it"),
    ("cgopipe", "repeat", "fetch", "fetch it once, or evict it first"),
    ("cgopipe", "repeat", "copy_to_pinned", "fetch it once, or evict it first"),
    ("cgopipe", "drop", "copy_to_pinned", "bring it there first"),
    ("cgopipe", "drop", "offload_kv", "its keys and values not saved: offload_kv them"),
    ("cgopipe", "repeat", "offload_kv", "has no keys and values to save"),
    ("cgopipe", "exchange", "cpu_attention", "needs mb1 at step 1 L0 qkv on the host"),
    ("cgopipe", "drop", "load_hidden", "post_attention.* at step 1 L0 attended on the host"),
    ("flexgen", "drop", "load_kv", "load_kv before, or use cpu_attention"),
    ("flexgen", "repeat", "load_kv", "load_kv: .* were loaded already"),
    ("flexgen", "drop", "offload_kv", "its keys and values not saved: offload_kv them"),
    ("twiddler", "drop", "offload_routed", "is not on the host: call offload_routed before"),
    ("twiddler", "drop", "load_routed", "on the host: call load_routed first"),
    ("prefetch_gate", "drop", "fetch", "bring it there first|fetch it before the kernel"),
    ("resident", "repeat", "pre_attention", "pre_attention.* but it is at step 0 L0 qkv"),
    ("resident", "drop", "sample", "ended before mb0 was sampled"),
    ("adversarial", "drop", "run_expert", "was routed to E[0-9]+, which did not run"),
    ("adversarial", "repeat", "run_expert", "or it has run already"),
    ("adversarial", "repeat", "evict", "evict: page .* is not in pool adversary"),
    ("adversarial", "drop", "route", "run_expert|combine"),
    ("adversarial", "repeat", "combine", "combine"),
]


@pytest.mark.parametrize(
    ("name", "kind", "verb", "says"), REFUSED, ids=[f"{k} {v} of {n}" for n, k, v, _ in REFUSED]
)
def test_the_refusal_says_what_is_wrong(bench: Bench, name: str, kind: Kind, verb: str, says: str) -> None:
    calls = bench.calls(name, {}, 1, real=False)
    damaged = Damaged(make_policy(name), Damage(kind, calls.index(verb)))
    end = bench.run(damaged, 1, real=False)
    assert end.how in ("raised", "raised at the end")
    assert damaged.struck == verb
    assert re.search(says, end.what), end.what
