"""Options: keywords and structs agree, defaults stand in one place, unknown names are refused, help lists them all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import pytest

import moesched
from moesched.analysis.roofline import roofline_of
from moesched.cli import cluster, roofline
from moesched.cli.generation_options import GenerationArguments
from moesched.cli.plan import PlanArguments
from moesched.cli.profile_routing import ProfileArguments, SparsityArguments
from moesched.cli.simulate import SimulationArguments
from moesched.cluster.node import run_node
from moesched.inputs.options import SizeOptions, options_from, part_of
from moesched.jobs.options import (
    CallKeywords,
    CallOptions,
    ClusterKeywords,
    ClusterOptions,
    ProfilingKeywords,
    ProfilingOptions,
    RunKeywords,
    RunOptions,
    SessionKeywords,
    SessionOptions,
    SimulationKeywords,
    SimulationOptions,
)
from moesched.planner.proposal import PlanKeywords, PlanOptions

PAIRS = [
    (SessionKeywords, SessionOptions),
    (CallKeywords, CallOptions),
    (RunKeywords, RunOptions),
    (SimulationKeywords, SimulationOptions),
    (ClusterKeywords, ClusterOptions),
    (PlanKeywords, PlanOptions),
    (ProfilingKeywords, ProfilingOptions),
]
FUNCTIONS = [
    (moesched.Session.__init__, SessionOptions),
    (moesched.Session.run, CallOptions),
    (moesched.run_model, RunOptions),
    (moesched.simulate_model, SimulationOptions),
    (moesched.run_local, ClusterOptions),
    (moesched.run_cluster, ClusterOptions),
    (moesched.plan_model, PlanOptions),
    (moesched.profile_routing, ProfilingOptions),
    (moesched.sparsity_of, ProfilingOptions),
]
COMMANDS: list[tuple[Callable[..., Any], Callable[..., Any], set[str]]] = [
    (GenerationArguments, moesched.run_model, {"device", "dtype", "machine", "max_new_tokens"}),
    (GenerationArguments, moesched.run_local, {"device", "dtype", "machine", "max_new_tokens"}),
    (GenerationArguments, moesched.Sampling, {"beams", "length_penalty", "seed", "temperature", "top_p"}),
    (SimulationArguments, moesched.simulate_model, {"beams", "gen", "preview_accuracy", "seed"}),
    (PlanArguments, moesched.plan_model, {"dtype", "gen", "policy", "seed", "tensor_parallel"}),
    (ProfileArguments, moesched.profile_routing, {"device", "dtype", "machine", "max_new_tokens", "policy"}),
    (SparsityArguments, moesched.sparsity_of, {"device", "dtype", "machine", "policy", "seed"}),
    (roofline.roofline, roofline_of, {"batch_size", "context", "micro_batch_size"}),
    (cluster.node, run_node, {"patience"}),
]
"""A command's options, the function that it calls, and some of the options that both have."""

TOLD_APART = {"workload"}
"""Options for which a command tells the default from the same value given."""


@pytest.mark.parametrize(("keywords", "options"), PAIRS)
def test_the_keywords_are_the_fields_that_have_a_default(keywords: Any, options: Any) -> None:
    hints = get_type_hints(options)
    optional = {field.name: hints[field.name] for field in fields(options) if field.default is not MISSING}
    assert get_type_hints(keywords) == optional


@pytest.mark.parametrize(("function", "options"), FUNCTIONS)
def test_help_lists_every_option_with_its_default_and_its_meaning(
    function: Callable[..., Any], options: Any
) -> None:
    parameters = inspect.signature(function).parameters
    documentation = inspect.getdoc(function) or ""
    for field in fields(options):
        assert f"{field.name}: " in documentation
        if field.default is not MISSING:
            assert parameters[field.name].default == field.default
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters.values())


@pytest.mark.parametrize(("command", "function", "some"), COMMANDS)
def test_an_option_has_one_default_on_the_command_line_and_in_python(
    command: Callable[..., Any], function: Callable[..., Any], some: set[str]
) -> None:
    on_command_line, in_python = (
        {
            name: each.default
            for name, each in inspect.signature(kind).parameters.items()
            if each.default not in (each.empty, ())
        }
        for kind in (command, function)
    )
    in_both = on_command_line.keys() & in_python.keys() - TOLD_APART
    assert some <= in_both
    assert {name: on_command_line[name] for name in in_both} == {name: in_python[name] for name in in_both}


def test_an_unknown_keyword_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(
        TypeError, match=r"run_model\(\) got an unexpected keyword argument 'polcy'.*batch_size"
    ):
        moesched.run_model("nowhere", [[1]], polcy="resident")  # type: ignore[call-arg]  # what is tested
    with pytest.raises(TypeError, match=r"profile_routing\(\) got an unexpected keyword argument 'trace'"):
        moesched.profile_routing("nowhere", [[1]], trace="out.json")  # type: ignore[call-arg]  # what is tested
    with pytest.raises(TypeError, match=r"simulate_model\(\) got an unexpected keyword argument 'batch'"):
        moesched.simulate_model(  # type: ignore[call-arg]  # what is tested
            "mixtral-8x7b", machine="t4", policy="cgopipe", workload="mtbench", batch=3
        )


def test_a_part_of_the_options_is_what_they_say_of_it() -> None:
    given = options_from(RunOptions, "run_model", {"batch_size": 4}, policy="resident", machine="auto")
    assert given.sizes == SizeOptions(batch_size=4)
    assert part_of(given, SizeOptions) == {
        "batch_size": 4,
        "micro_batch_size": None,
        "prefill_chunk": None,
    }


@pytest.mark.parametrize("name", ["batch_size", "micro_batch_size", "prefill_chunk"])
@pytest.mark.parametrize("size", [0, 10**9])
def test_sizes_that_nothing_has_are_refused(name: str, size: int) -> None:
    with pytest.raises(moesched.BadInput, match=f"--{name.replace('_', '-')} is {size:,}: give 1 to "):
        SizeOptions(**{name: size}).require_sensible()
