"""Options: keywords and structs agree, defaults stand in one place, unknown names are refused, help lists them all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import pytest

import moesched
from moesched.inputs.options import SizeOptions, options_from, part_of
from moesched.jobs.options import (
    ClusterKeywords,
    ClusterOptions,
    RunKeywords,
    RunOptions,
    SimulationKeywords,
    SimulationOptions,
)
from moesched.planner.proposal import PlanKeywords, PlanOptions

PAIRS = [
    (RunKeywords, RunOptions),
    (SimulationKeywords, SimulationOptions),
    (ClusterKeywords, ClusterOptions),
    (PlanKeywords, PlanOptions),
]
FUNCTIONS = [
    (moesched.run_model, RunOptions),
    (moesched.simulate_model, SimulationOptions),
    (moesched.run_local, ClusterOptions),
    (moesched.run_cluster, ClusterOptions),
    (moesched.plan_model, PlanOptions),
]


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
            assert parameters[field.name].default == (
                "resident" if (function, field.name) == (moesched.run_model, "policy") else field.default
            )
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters.values())


def test_an_unknown_keyword_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(
        TypeError, match=r"run_model\(\) got an unexpected keyword argument 'polcy'.*batch_size"
    ):
        moesched.run_model("nowhere", [[1]], polcy="resident")  # type: ignore[call-arg]  # what is tested
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
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(moesched.BadInput, match=f"--{name.replace('_', '-')} is 0: give 1 or more"):
        SizeOptions(**{name: 0}).require_positive()
