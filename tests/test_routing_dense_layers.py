"""Routing traces of models that have layers without experts, which a trace may hold or leave out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moesched.models.config import ModelConfig
from moesched.routing.checks import layers_without_experts, routed_layers
from moesched.routing.profile import write_profile
from moesched.routing.sources import find_choices
from moesched.routing.statistics import statistics_of
from moesched.routing.trace import RoutingTrace
from routing_traces import (
    read_trace,
    records_of,
    refusal,
    routed,
    write_npy,
    write_npz,
    write_own,
    write_records,
    write_rows,
)
from small_shapes import small

Write = Callable[[RoutingTrace, Path], Path]
DENSE_FIRST = small("deepseek-v2-lite", 3)
INTERLEAVED = small("llama-4-maverick", 4)


def of_model(config: ModelConfig, tokens: int = 5) -> RoutingTrace:
    """A trace with zeros in the layers without experts."""
    trace = routed([tokens], layers=config.layers, experts=config.routed.experts, top_k=config.routed.top_k)
    chosen = trace.chosen.copy()
    chosen[:, layers_without_experts(config)] = 0
    return trace._replace(chosen=chosen)


def only_routed(trace: RoutingTrace, config: ModelConfig) -> RoutingTrace:
    """The layers with experts alone."""
    return trace._replace(chosen=trace.chosen[:, routed_layers(config)])


def rows_without_dense(trace: RoutingTrace, folder: Path, config: ModelConfig) -> Path:
    file = write_rows(trace, folder)
    header, *rows = file.read_text().splitlines()
    dense = layers_without_experts(config)
    file.write_text("\n".join([header, *(row for row in rows if int(row.split(",")[1]) not in dense)]))
    return file


def megatron_without_dense(trace: RoutingTrace, folder: Path, config: ModelConfig) -> Path:
    dense = layers_without_experts(config)
    return write_records([each for each in records_of(trace) if each["layer"] not in dense], folder)


@pytest.mark.parametrize("config", [DENSE_FIRST, INTERLEAVED], ids=["dense first", "interleaved"])
@pytest.mark.parametrize("write", [write_npy, write_npz, write_rows, write_own])
def test_a_trace_may_have_all_layers_or_those_with_experts(
    tmp_path: Path, write: Write, config: ModelConfig
) -> None:
    trace = of_model(config)
    assert layers_without_experts(config)
    assert (read_trace(write(trace, tmp_path), config).chosen == trace.chosen).all()
    if write is not write_own:
        assert (read_trace(write(only_routed(trace, config), tmp_path), config).chosen == trace.chosen).all()


@pytest.mark.parametrize("config", [DENSE_FIRST, INTERLEAVED], ids=["dense first", "interleaved"])
@pytest.mark.parametrize("write", [rows_without_dense, megatron_without_dense])
def test_numbers_of_layers_may_have_gaps_where_there_are_no_experts(
    tmp_path: Path, write: Callable[[RoutingTrace, Path, ModelConfig], Path], config: ModelConfig
) -> None:
    trace = of_model(config)
    assert (read_trace(write(trace, tmp_path, config), config).chosen == trace.chosen).all()


@pytest.mark.parametrize("write", [write_npy, write_rows])
def test_experts_in_a_layer_that_has_none_are_refused(tmp_path: Path, write: Write) -> None:
    chosen = of_model(DENSE_FIRST).chosen.copy()
    chosen[2, 0] = range(DENSE_FIRST.routed.top_k)
    file = write(of_model(DENSE_FIRST)._replace(chosen=chosen), tmp_path)
    assert f"{DENSE_FIRST.name} has no experts in" in refusal(file, DENSE_FIRST)


def test_layers_without_experts_do_not_count_as_unpopular(tmp_path: Path) -> None:
    trace = of_model(DENSE_FIRST, tokens=300)
    assert set(trace.profile().counts[0]) == {0}
    assert statistics_of(trace.profile()).minimum > 0
    write_profile(trace.profile(), tmp_path / "counts.csv")
    choices = find_choices(str(tmp_path / "counts.csv"), DENSE_FIRST)
    assert choices is not None
    assert len(choices.of_tokens(1, np.array([0]), np.array([3]))[0]) == DENSE_FIRST.routed.top_k
