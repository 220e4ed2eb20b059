"""Options: one field makes the keyword, the flag, the axis and the reference; bounds and repetition are refused."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import MISSING
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cyclopts.exceptions import CoercionError, RepeatArgumentError

import moesched
from command_options import app, call, commands, options_of
from doc_blocks import agrees
from moesched.analysis.latency_table import latencies_of
from moesched.analysis.options import LatencyOptions, RooflineOptions
from moesched.cli.check import CheckArguments
from moesched.cli.command import flat
from moesched.cli.main import COMMANDS, main
from moesched.cluster.cluster_jobs import ClusterFileOptions, LocalOptions
from moesched.inputs.options import PlanOptions, SizeOptions
from moesched.jobs.options import (
    LAST_HEADINGS,
    CallOptions,
    ProfilingOptions,
    RunOptions,
    SessionOptions,
    SimulationOptions,
    SparsityOptions,
)
from moesched.jobs.served_options import ServedOptions
from moesched.machines.toml_library import profile_text
from moesched.options import Described, Option, Options, described, flags_given, part_of, split
from moesched.requests.sampling import Sampling
from moesched.runs.listeners import Listener

SHAPE = "mixtral-0.8b"
FUNCTIONS: list[tuple[Callable[..., Any], type[Options]]] = [
    (moesched.Session.__init__, SessionOptions),
    (moesched.Session.run, CallOptions),
    (moesched.run_model, RunOptions),
    (moesched.simulate_model, SimulationOptions),
    (moesched.run_local, LocalOptions),
    (moesched.run_cluster, ClusterFileOptions),
    (moesched.plan_model, PlanOptions),
    (moesched.profile_routing, ProfilingOptions),
    (moesched.sparsity_of, SparsityOptions),
    (moesched.roofline_of, RooflineOptions),
    (latencies_of, LatencyOptions),
    (Sampling, Sampling),
]


def bounded() -> list[tuple[type[Options], Described]]:
    """The options with bounds."""
    kinds: list[type[Options]] = [CheckArguments, *(kind for _, kind in FUNCTIONS)]
    return [(kind, each) for kind in kinds for each in described(kind).values() if each.option.bounds]


def test_every_help_ends_with_the_same_headings_in_the_same_order() -> None:
    for command in chain(*COMMANDS.values()):
        marks = (
            each.annotation.__metadata__[0] for each in inspect.signature(flat(command)).parameters.values()
        )
        groups = {group for mark in marks for group in mark.group or ()}
        shown = [group.name for group in sorted(groups, key=lambda group: group.sort_key)]
        last = [name for name in LAST_HEADINGS if name in shown]
        assert shown[len(shown) - len(last) :] == last


USAGES = [
    ("compare", "[OPTIONS] A [B...]"),
    ("timeline", "--out OUT [OPTIONS] TRACE [TRACE...]"),
    ("sweep", "[OPTIONS] [FILE]"),
    ("list", "[OPTIONS] KIND [CONTAINING]"),
    ("simulate", "--model NAME|PATH --machine NAME|FILE [OPTIONS]"),
    ("prestack", "[OPTIONS] MODEL OUT"),
]


@pytest.mark.parametrize(("name", "usage"), USAGES)
def test_the_first_line_of_a_help_names_every_argument(
    name: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"Usage: moesched {name} {usage}\n")


def test_the_help_names_every_command_with_an_exit_code_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--help"])
    _, _, codes = capsys.readouterr().out.partition("Exit codes: ")
    functions = list(chain(*COMMANDS.values()))
    own = [each.__name__ for each in functions if re.search("xit code (is )?1 if", each.__doc__ or "")]
    assert own == ["sweep", "check", "doctor"]
    assert all(name in codes for name in own)


@pytest.mark.parametrize(("name", "page"), [("explain", True), ("compare", True), ("reproduce", False)])
def test_only_where_a_command_writes_a_page_its_help_offers_one(
    name: str, page: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    main([name, "--help"])
    assert (".html" in capsys.readouterr().out) is page


@pytest.mark.parametrize(
    ("kind", "cut"), [(RunOptions, False), (SimulationOptions, True), (ServedOptions, True)]
)
def test_only_where_requests_join_and_leave_a_help_says_how_prompts_are_cut(
    kind: type[Options], cut: bool
) -> None:
    assert ("over steps" in described(kind)["prefill_chunk"].option.help) == cut


@pytest.mark.parametrize(("function", "options"), FUNCTIONS)
def test_help_lists_every_option_with_its_default_and_its_meaning(
    function: Callable[..., Any], options: type[Options]
) -> None:
    parameters = inspect.signature(function).parameters
    documentation = inspect.getdoc(function) or ""
    for field in described(options).values():
        assert f"{field.name}: " in documentation
        default = parameters[field.name].default
        assert field.default == (MISSING if default is inspect.Parameter.empty else default)
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters.values())


def test_an_unknown_or_missing_keyword_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(
        TypeError, match=r"run_model\(\) got an unexpected keyword argument 'polcy'.*batch_size"
    ):
        moesched.run_model("nowhere", [[1]], polcy="resident")  # type: ignore[call-arg]  # what is tested
    with pytest.raises(
        TypeError, match=r"Session\(\) missing a required argument: 'model': it takes model, "
    ):
        moesched.Session()  # type: ignore[call-arg]  # what is tested


def test_a_part_of_the_options_is_what_they_say_of_it() -> None:
    given = RunOptions("nowhere", [[1]], batch_size=4)
    assert given.sizes == SizeOptions(batch_size=4)
    assert part_of(given, SizeOptions) == {"batch_size": 4, "micro_batch_size": None, "prefill_chunk": None}


def test_flags_that_were_given_are_named() -> None:
    given = PlanOptions("mixtral-8x7b", machine="t4", band=False, objective="latency")
    assert flags_given(given) == ["--model", "--machine", "--no-band", "--for"]


@pytest.mark.parametrize(("options", "field"), bounded(), ids=lambda each: getattr(each, "name", ""))
def test_a_number_out_of_bounds_is_refused_by_its_flag(options: type[Options], field: Described) -> None:
    low = field.option.ge if field.option.ge is not None else field.option.gt
    numbers = [-1 if low is None else low - 1, *([] if field.option.le is None else [field.option.le + 1])]
    required = {name: "word" for name, each in described(options).items() if each.default is MISSING}
    for number in numbers:
        with pytest.raises(moesched.BadInput, match=f"{field.flag or field.name} is {number:,}: give "):
            options(**required | {field.name: number})


api: Any = moesched
"""The package, to be called with values of wrong types."""


def ran(**given: Any) -> None:
    api.run_model(**{"model": "nowhere", "prompts": [[1]]} | given)


def simulated(**given: Any) -> None:
    options = {"machine": "t4", "policy": "layer_streaming", "workload": "mtbench"}
    api.simulate_model("mixtral-8x7b", **options | given)


def planned(**given: Any) -> None:
    api.plan_model("mixtral-8x7b", machine="t4", **given)


def served(**given: Any) -> None:
    api.simulate_arrivals(SHAPE, machine="t4", arrivals="poisson:1", **given)


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: ran(batch_size="8"), "--batch-size is '8', no whole number: give 1 to 65,536"),
        (lambda: ran(batch_size=8.0), "--batch-size is 8.0, no whole number: give 1 to 65,536"),
        (lambda: ran(batch_size=[8]), "--batch-size is [8], no whole number: give 1 to 65,536"),
        (lambda: ran(settings="ahead=2"), "settings is 'ahead=2': give a mapping of names to values, such as a dict"),
        (lambda: ran(budgets=["host"]), "budgets is ['host']: give a mapping of names to values, such as a dict"),
        (lambda: ran(trace=""), "trace is '', which is no path: name a file or a folder"),
        (lambda: ran(trace=True), "trace is True: give Path | str | None"),
        (lambda: ran(model=None), "model is None: give Path | str"),
        (lambda: ran(max_new_tokens=True), "--max-new-tokens is True, no whole number: give 1 or more"),
        (lambda: ran(max_new_tokens=None), "max_new_tokens is None: omit it for 64"),
        (lambda: ran(machine=None), "machine is None: omit it for 'auto'"),
        (lambda: ran(sampling={"temperature": 1}), "sampling is {'temperature': 1}: give Sampling | None"),
        (lambda: ran(explained="yes"), "explained is 'yes': give bool"),
        (lambda: simulated(seed="x"), "--seed is 'x', no whole number: give one"),
        (lambda: simulated(machine=3), "no machine 3: name a TOML file or one of a100-80g, …"),
        (lambda: simulated(network=3, nodes=2), "no network 3: name a TOML file or one of 10gbe, infiniband, rocev2"),
        (lambda: simulated(workload=3), "prompts are 3: give a list of texts, or of lists of token ids"),
        (lambda: simulated(workload={"a": 1}), "prompts are {'a': 1}: give a list of texts, or of lists of token ids"),
        (
            lambda: simulated(budgets={"gpu": None}),
            "None is not a size in bytes: write a number and a unit, such as 600MB or 1.5GiB",
        ),
        (
            lambda: simulated(listener=Listener),
            "listener is <class …Listener'>: give an object of a class derived from moesched.Listener",
        ),
        (lambda: planned(workload=["a"]), "no workload ['a']: name a TOML file or one of …"),
        (lambda: planned(on_progress=True), "on_progress is True: give Callable[[str], object] | None"),
        (lambda: served(admission=3), "admission is 3: give str"),
        (lambda: served(slo=3), "slo is 3: give str | None"),
        (lambda: api.given_lengths(5, 2), "prompt_tokens is 5: give a list of whole numbers"),
        (lambda: api.given_lengths([1.5], 2), "prompt_tokens is [1.5]: give a list of whole numbers"),
        (lambda: api.given_lengths([5], "2"), "new_tokens is ['2']: give a list of whole numbers"),
        (lambda: api.load_machine(None), "no machine None: name a TOML file or one of …"),
        (lambda: api.load_workload(["a"]), "no workload ['a']: name a TOML file or one of …"),
        (lambda: api.read_trace(None), "the path of a trace is None: give a text or a Path"),
        (lambda: api.check_trace(3), "the path of a trace is 3: give a text or a Path"),
        (lambda: api.compare_runs(3), "the path of a run is 3: give a text or a Path"),
        (lambda: api.compare_runs([{"ttft": 3}] * 2), "the path of a run is {'ttft': 3}: give a text or a Path"),
        (lambda: api.compare_runs(["a", "b"], trace=3), "trace is 3: give Path | str | None"),
        (lambda: api.read_routing_profile(b"a"), "the path of a routing profile is b'a': give a text or a Path"),
        (lambda: api.write_report(None, None), "the path of a report is None: give a text or a Path"),
        (lambda: api.write_report("a.json", {}), "report is {}: give the report of a run or of a prediction"),
        (lambda: api.write_random_model(3, "made"), "unknown model shape 3: choose one of …"),
        (lambda: api.write_random_model(SHAPE, 3), "directory is 3: give Path | str"),
        (lambda: api.write_random_model(SHAPE, "made", "x"), "--seed is 'x', no whole number: give one"),
        (lambda: api.write_random_model(SHAPE, "made", 0, 2.5), "--layers is 2.5, no whole number: give one"),
        (lambda: api.write_random_model(SHAPE, "made", 0, 1, None), "dtype is None: omit it for 'bfloat16'"),
        (lambda: api.write_random_model(SHAPE, "a", stored_as=["q8_0"]), "stored_as is ['q8_0']: give str | None"),
        (lambda: api.write_random_model(SHAPE, "made", progress=3), "progress is 3: give Progress | None"),
        (lambda: api.prestack_model(None, "made"), "model is None: give Path | str"),
        (lambda: api.prestack_model("model", "made", by="row"), "by is 'row': give one of expert, layer"),
        (lambda: api.reproduce_paper(None), "paper is None: give str"),
        (lambda: api.reproduce_paper("twiddler", "beams"), "only is 'beams': give Sequence[str]"),
        (lambda: api.reproduce_paper("twiddler", [3]), "no section 3: name one of …"),
        (lambda: api.calibrate_machine(3), "out is 3: give Path | str | None"),
        (lambda: api.draw_roofline(3, "a.svg"), "report is 3: give what roofline_of returns"),
        (lambda: api.roofline_of(SHAPE, "t4", kv_dtypes="int8"), "kv_dtypes is 'int8': give Sequence[str]"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_in_one_line(refused: Callable[[], object], said: str) -> None:
    with pytest.raises(moesched.BadInput) as refusal:
        refused()
    assert agrees(said, str(refusal.value))


def test_numbers_of_numpy_and_paths_predict_the_same_as_pythons_own(tmp_path: Path) -> None:
    machine: Any = tmp_path / "own.toml"
    machine.write_bytes(profile_text("moesched.machines", "machine", "t4"))
    lengths: Any = np.array([77, 88], "int16")
    numpys: dict[str, Any] = {
        "workload": moesched.given_lengths(lengths, 3),
        "gen": np.int32(2),
        "machine": machine,
    }
    numpys["budgets"] = {"gpu": np.int64(14_000_000_000)}
    own: dict[str, Any] = {"workload": moesched.given_lengths([77, 88], 3), "gen": 2, "machine": "t4"}
    own["budgets"] = {"gpu": 14_000_000_000}
    numpys["settings"], own["settings"] = {"ahead": np.int64(1)}, {"ahead": 1}
    reports = [
        moesched.simulate_model("mixtral-8x7b", policy="hybrimoe", band=False, **each)
        for each in (numpys, own)
    ]
    first, second = (each.as_dict() | {"wall_seconds": 0} for each in reports)
    assert first == second


def test_a_path_may_be_given_as_text_where_a_file_is_written(tmp_path: Path) -> None:
    report = moesched.simulate_model(
        "mixtral-8x7b",
        machine="t4",
        policy="layer_streaming",
        workload="mtbench",
        batch_size=8,
        gen=2,
        band=False,
    )
    moesched.write_report(str(tmp_path / "report.json"), report)
    assert json.loads((tmp_path / "report.json").read_text())["policy"] == "layer_streaming"


def test_an_empty_path_is_refused_by_every_option_that_takes_one() -> None:
    paths = [(name, option) for name in commands() for option in options_of(name) if option.path]
    assert len(paths) > 50
    for name, option in paths:
        with pytest.raises(CoercionError, match="'' is no path: name a file or a folder"):
            call(name, (option, ""))


def test_no_command_has_two_options_of_one_name() -> None:
    for name in commands():
        flags = [each.flag for each in options_of(name) if each.flag]
        assert len(flags) == len(set(flags)), name


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_bounds_admit_finite_numbers_only(number: float) -> None:
    assert not Option("Any number.", ge=0).admits(number)


def test_an_option_given_twice_is_refused_by_name() -> None:
    for name in commands():
        function = app()[name].default_command
        assert function is not None
        for parameter in inspect.signature(function).parameters.values():
            kind, option = split(parameter.annotation)
            if parameter.kind is parameter.KEYWORD_ONLY and option is not None and parameter.default != ():
                flag = option.flag or "--" + parameter.name.replace("_", "-")
                given = [flag] if kind is bool else [flag, "1"]
                with pytest.raises(RepeatArgumentError, match=flag):
                    app().parse_args([name, *given, *given], exit_on_error=False, print_error=False)
