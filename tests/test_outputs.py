"""Outputs of commands: checked before the work, never an input or another output; results on standard output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import moesched
from clusters import cluster, host
from command_options import call, commands, options_of
from commands import refused
from every_command import COMMANDS, OTHERS, prepare
from forked_commands import ForkedCommand
from moesched.cli.files import require_files
from moesched.cluster.cluster_file import cluster_toml
from moesched.cluster.curve.keys import PUBLIC_NAME, SECRET_NAME, write_keys
from moesched.errors import BadInput
from moesched.jobs.report import write_report
from moesched.system.outputs import Output, numbered, require_outputs
from moesched.system.silence import silent
from moesched.system.standard_output import is_stdout
from moesched.system.whole_file import whole_file
from traces import largest_file

Link = Callable[[Path, Path], object]


@pytest.fixture
def model(no_text: Path, tmp_path: Path) -> Path:
    """A copy of a small model, which a failing test may damage."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in no_text.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


# ---------------------------------------------------------------- the check


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_an_output_that_is_an_input_by_a_link_is_refused(tmp_path: Path, link: Link) -> None:
    read, written = tmp_path / "read.toml", tmp_path / "written.json"
    read.write_text("input")
    link(written, read)
    with pytest.raises(
        BadInput, match=f"^cannot write trace {written}: it is {read}, which this command reads"
    ):
        require_outputs(Output("trace", written), inputs=[None, "t4", read])


def test_an_output_that_is_an_input_in_another_spelling_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "read.toml").write_text("input")
    with pytest.raises(BadInput, match="which this command reads"):
        require_outputs(Output("report", "folder/../read.toml"), inputs=[tmp_path / "read.toml"])


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("second", ["out.json", "folder/../out.json", "link.json"])
def test_two_outputs_in_one_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str, exists: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.json").symlink_to("out.json")
    if exists:
        (tmp_path / "out.json").write_text("old")
    with pytest.raises(BadInput, match=f"^cannot write report {second}: the trace goes there"):
        require_outputs(Output("trace", tmp_path / "out.json"), Output("report", second))


def test_the_traces_of_later_batches_count(tmp_path: Path) -> None:
    trace = Output("trace", tmp_path / "run.json.gz", numbered=True)
    assert numbered(tmp_path / "run.json.gz", 9).name == "run.batch10.json.gz"
    for name in ("run.batch2.json.gz", "run.batch10.json.gz"):
        report = Output("report", tmp_path / name)
        for outputs in ((trace, report), (report, trace)):
            with pytest.raises(BadInput, match="goes there"):
                require_outputs(*outputs)
    require_outputs(trace, Output("report", tmp_path / "run.batch.json.gz"))
    require_outputs(trace, Output("report", tmp_path / "other.batch2.json.gz"))
    prompts = tmp_path / "run.batch3.json.gz"
    prompts.write_text("input")
    with pytest.raises(BadInput, match=f"^cannot write trace {prompts}: it is {prompts}, which"):
        require_outputs(trace, inputs=[prompts])


def test_a_folder_where_the_trace_of_a_later_batch_goes_is_noticed_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "run.batch2.json").mkdir()
    with pytest.raises(BadInput, match=r"run\.batch2\.json: it is a folder"):
        require_outputs(Output("trace", tmp_path / "run.json", numbered=True))


@pytest.mark.parametrize("name", ["config.json", "new.json", "model.safetensors"])
def test_nothing_is_written_into_the_folder_of_the_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    for folder in ("model", "link", "model/../link"):
        with pytest.raises(BadInput, match="it is in the model's folder"):
            require_outputs(Output("report", tmp_path / folder / name), model=tmp_path / "model")


def test_a_link_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with (
        pytest.raises(BadInput, match=r"cannot write report .*symbolic links"),
        whole_file(tmp_path / "loop" / "x", "report"),
    ):
        pass
    with pytest.raises(BadInput, match=r"loop: it is a link that leads to itself"):
        require_outputs(Output("trace", tmp_path / "loop"))
    require_outputs(Output("trace", tmp_path / "trace.json"), inputs=[tmp_path / "loop"])


def test_a_file_that_the_models_folder_links_to_is_one_of_the_models(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blob").write_text("weights")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(BadInput, match="it is in the model's folder"):
        require_outputs(Output("trace", tmp_path / "blob"), model=tmp_path / "snapshot")


def test_outputs_beside_the_model_in_its_subfolders_and_on_devices_are_fine(tmp_path: Path) -> None:
    (tmp_path / "model" / "out").mkdir(parents=True)
    trace, report = Output("trace", "/dev/null", numbered=True), Output("report", "/dev/null")
    require_outputs(trace, report, model=tmp_path / "model", inputs=["/dev/null"])
    require_outputs(
        Output("trace", tmp_path / "run.json"),
        Output("report", tmp_path / "model" / "out" / "report.json"),
        model=tmp_path / "model",
    )
    require_outputs(Output("trace", None, numbered=True), Output("report", None), model="mixtral-8x7b")
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


# ---------------------------------------------------------------- commands


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder with inputs; but for the cluster file, contents are never read."""
    for name in ("prompts.jsonl", "machine.toml", "mine.py"):
        (tmp_path / name).write_text("input")
    (tmp_path / "cluster.toml").write_text(cluster_toml(cluster(host(0), host(1))))
    return tmp_path


RUN = "run model --policy resident --prompts prompts.jsonl --machine machine.toml"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{RUN} --trace model/config.json", "in the model's folder"),
        (f"{RUN} --report model/model-00001-of-00001.safetensors", "in the model's folder"),
        (f"{RUN} --trace t.json --report t.json", "the trace goes there"),
        (f"{RUN} --local 2 --report prompts.jsonl", "is prompts.jsonl, which"),
        (
            "launch model --policy resident --prompt-ids 1 --hosts cluster.toml --trace cluster.toml",
            "is cluster.toml, which",
        ),
        ("profile-routing mixtral-8x7b --routing zipf --out x.csv --out ./x.csv", "the routing goes there"),
        ("sweep --policy resident,mine.py:Mine --machine t4 --out mine.py", "is mine.py, which"),
        ("sweep --policy resident --machine t4 --model dbrx,model --plot model/x.svg", "in the model's folder"),
        ("calibrate --out model", "cannot write machine file model: it is a folder"),
    ],
)  # fmt: skip
def test_a_command_refuses_to_replace_what_it_reads(
    command: Any, inputs: Path, model: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    monkeypatch.chdir(inputs)
    before = contents(inputs)
    refused(command(*line.split()), said)
    assert contents(inputs) == before


WRITING = [name for name in commands() if any(option.writes for option in options_of(name))]


@pytest.mark.parametrize("name", WRITING)
def test_no_option_of_a_command_writes_to_what_another_option_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "read.svg").write_text("input")
    (tmp_path / "linked.svg").hardlink_to("read.svg")
    written = [option for option in options_of(name) if option.writes]
    reads = [option for option in options_of(name) if option.names and not option.writes]
    for out, read in [*product(written, reads[:1]), *product(written[:1], reads)]:
        with pytest.raises(BadInput, match=r"linked\.svg: it is read\.svg, which this command reads"):
            require_files(*call(name, (out, "linked.svg"), (read, "read.svg")))
    assert (tmp_path / "read.svg").read_text() == "input"


@pytest.mark.parametrize("name", WRITING)
def test_no_option_of_a_command_writes_to_standard_output(name: str) -> None:
    for option in options_of(name):
        if option.writes:
            with pytest.raises(BadInput, match="/dev/stdout: standard output has the command's results"):
                require_files(*call(name, (option, "/dev/stdout")))


@pytest.mark.parametrize("path", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link", "folder/link"])
def test_standard_output_is_known_by_every_name(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/stdout")
    (tmp_path / "folder" / "link").symlink_to("../link")
    assert is_stdout(Path(path))
    assert not any(map(is_stdout, [Path("/dev/null"), Path("/dev/stderr"), tmp_path, Path("1"), Path("new")]))


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to, "/proc/self/fd"])
def test_a_sweep_keeps_off_its_own_file_by_every_name(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: Link | str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.toml").write_text('policy = ["resident"]\nmachine = ["t4"]\n')
    with (tmp_path / "sweep.toml").open("rb") as held:
        name = f"/proc/self/fd/{held.fileno()}" if isinstance(link, str) else "other"
        if not isinstance(link, str):
            link(tmp_path / name, tmp_path / "sweep.toml")
        for file, out in (("sweep.toml", name), (name, "sweep.toml")):
            refused(command("sweep", file, "--out", out), f"cannot write results {out}: it is {file}, which")
    assert (tmp_path / "sweep.toml").read_text().startswith("policy")


def test_options_for_output_say_that_they_write() -> None:
    unmarked = {
        (name, option.flag)
        for name in commands()
        for option in options_of(name)
        if option.output and option.names and not option.writes
    }
    assert unmarked == {("reproduce", "--out")}, "it is a folder"


def test_a_file_that_standard_output_goes_to_is_not_written_by_an_option(tmp_path: Path) -> None:
    line = "simulate --model mixtral-0.8b --policy resident --machine t4 --workload mtbench --json --report"
    said = ForkedCommand(tmp_path, [*line.split(), tmp_path / "out"]).end()
    refused(said, "out: standard output has the command's results: name a file")


def test_a_report_does_not_replace_a_picture_of_a_reproduction(command: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = tmp_path / "twiddler-beams.svg"
    arguments = ("--only", "beams", "--out", tmp_path, "--report", report)
    refused(command("reproduce", "twiddler", *arguments), "the picture goes there")
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_runs_a_model_is_told_as_well(model: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"policy": "resident", "trace": model / "config.json"}
    with pytest.raises(BadInput, match="in the model's folder"):
        moesched.run_model(model, [[1]], **given)
    with pytest.raises(BadInput, match="in the model's folder"):
        moesched.simulate_model(model, machine="t4", workload="mtbench", **given)


@pytest.mark.parametrize("out", ["trace", "html"])
def test_a_program_does_not_replace_the_file_of_its_policy(model: Path, tmp_path: Path, out: str) -> None:
    file = tmp_path / "own.py"
    file.write_text("from moesched.policies.ep_naive import EpNaive as Own\n")
    given: dict[str, Any] = {"policy": f"{file}:Own", out: file}
    calls: list[Callable[[], object]] = [
        lambda: moesched.run_model(model, [[1]], **given),
        lambda: moesched.simulate_model(model, machine="t4", workload="mtbench", **given),
        lambda: moesched.run_local(model, [[1]], nodes=2, **given),
    ]
    for each in calls:
        with pytest.raises(BadInput, match=r"own\.py, which this command reads"):
            each()
    assert file.read_text().endswith("as Own\n")


# ---------------------------------------------------------------- full disks


def test_a_report_on_a_full_disk_is_an_error_and_keeps_the_former_one(tmp_path: Path) -> None:
    report = moesched.simulate_model(
        "mixtral-0.8b", machine="t4", policy="cgopipe", workload="mtbench", batch_size=2, gen=2
    )
    file = tmp_path / "report.json"
    file.write_text("former")
    with largest_file(100), pytest.raises(BadInput, match=f"^cannot write report {file}: File too large"):
        write_report(file, report)
    assert file.read_text() == "former"
    assert list(tmp_path.iterdir()) == [file]


def test_keys_on_a_full_disk_leave_nothing_behind(tmp_path: Path) -> None:
    with largest_file(0), pytest.raises(BadInput, match=r"cannot write keys to .*File too large"):
        write_keys(tmp_path / "new" / "keys")
    assert list(tmp_path.iterdir()) == []


def test_keys_that_cannot_be_written_leave_what_was_there(tmp_path: Path) -> None:
    (tmp_path / PUBLIC_NAME).write_text("in use")
    with pytest.raises(BadInput, match="exists already"):
        write_keys(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [PUBLIC_NAME]
    assert (tmp_path / PUBLIC_NAME).read_text() == "in use"
    (tmp_path / PUBLIC_NAME).unlink()
    write_keys(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {PUBLIC_NAME, SECRET_NAME}


# -- standard output -------------------------------------------------------------------------------

TESTS = Path(__file__).parent
POLICY = f"""
import sys
from moesched.policies.resident import Resident

sys.path.append({str(TESTS)!r})
from every_command import print_in_every_way

print_in_every_way()

class Noisy(Resident):
    pass
"""
SIMULATE = (
    "simulate --model mixtral-0.8b --machine t4 --workload mtbench --gen 2 --batch-size 2 "
    "--policy noisy.py:Noisy"
)


@pytest.mark.slow
def test_each_command_prints_one_json_object_whatever_libraries_print(tmp_path: Path) -> None:
    prepare(tmp_path)
    command = [sys.executable, str(TESTS / "every_command.py")]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    codes = [line for line in said.stderr.splitlines() if line.startswith("exit code ")]
    done = [line for line in codes if not line.endswith(": doctor")]  # it has code 1 where it finds troubles
    assert done == [f"exit code 0: {name}" for name in COMMANDS if name != "doctor"], said.stderr
    objects = said.stdout.splitlines()
    assert len(objects) == len(COMMANDS)
    assert all(isinstance(json.loads(each), dict) for each in objects)
    assert said.stderr.split().count("puts") == len(COMMANDS)


def test_commands_need_no_docstrings(tmp_path: Path) -> None:
    command = [sys.executable, "-OO", "-m", "moesched", *COMMANDS[0].split(), "--json"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(said.stdout)["policy"] == "cgopipe"


def test_no_command_is_left_out() -> None:
    called = {command.split()[0] for command in COMMANDS}
    assert not called & OTHERS.keys()
    assert called | OTHERS.keys() == set(commands())


def test_every_command_that_has_a_result_prints_it_as_json() -> None:
    assert {name for name in commands() if "--json" not in {each.flag for each in options_of(name)}} == {
        "chat",
        "node",
        "serve",
    }


def test_what_a_policys_module_prints_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(POLICY)
    command = [sys.executable, "-m", "moesched", *SIMULATE.split()]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(said.stderr.split()) == {"print", "write", "puts", "echo"}
    assert not {"print", "write", "puts", "echo"} & set(said.stdout.split())
    assert "noisy.py:Noisy" in said.stdout


def test_results_arrive_where_standard_error_is_closed(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(POLICY)
    command = ["sh", "-c", '"$@" 2>&-', "sh", sys.executable, "-m", "moesched", *SIMULATE.split(), "--json"]
    said = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, check=True, env=os.environ)
    assert json.loads(said.stdout)["policy"] == "noisy.py:Noisy"


def test_threads_that_are_silent_at_once_leave_the_descriptor_as_it_was(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+b") as file:
        descriptor = file.fileno()
        first, second = silent(descriptor), silent(descriptor)
        first.__enter__()
        second.__enter__()
        os.write(descriptor, b"dropped")
        first.__exit__(None, None, None)
        os.write(descriptor, b"dropped, too")
        second.__exit__(None, None, None)
        os.write(descriptor, b"kept")
    assert (tmp_path / "out").read_bytes() == b"kept"
