"""Families that are only simulated: published figures, what their layers keep and read, and every policy on each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import moesched
from moesched import plugins
from moesched.errors import BadInput
from moesched.inputs.lookup import find_shape, in_format
from moesched.jobs.options import SimulationOptions
from moesched.jobs.report import JobReport
from moesched.jobs.scenario import Scenario
from moesched.jobs.simulate_model import simulate_scenario
from moesched.machines import load_machine
from moesched.machines.networks import load_network
from moesched.models.architectures import ARCHITECTURES
from moesched.models.config import ModelConfig
from moesched.models.formats import FORMATS
from moesched.models.layers import LatentAttention, LinearAttention
from moesched.models.layout import weight_layout
from moesched.models.operations import Operations
from moesched.models.shapes import SHAPES
from moesched.models.tensor_parallel import cut_config
from moesched.models.tensors import count_active_weights, count_weights, file_bytes
from moesched.requests.workloads import given_lengths
from small_shapes import FAMILIES, small

GIGA = 1e9

# ---------------------------------------------------------------- published figures


@pytest.mark.parametrize(
    ("name", "total", "active", "digit"),
    [  # billions, from the model cards; `digit` is the last one that they print
        ("mixtral-8x7b", 46.7, 12.9, 0.1),
        ("mixtral-8x22b", 141, 39, 1),
        ("dbrx", 132, 36, 1),
        ("qwen3-30b-a3b", 30.5, 3.3, 0.1),
        ("olmoe-1b-7b", 6.9, 1.3, 0.1),
        ("gpt-oss-20b", 20.9, 3.6, 0.1),
        ("gpt-oss-120b", 116.8, 5.1, 0.1),
        ("glm-4.5", None, 32, 1),
        ("glm-4.5-air", None, 12, 1),
        ("glm-4.7", None, 32, 1),
        ("deepseek-v2-lite", 15.7, 2.4, 0.1),
        ("deepseek-v3", 671, 37, 1),
        ("deepseek-r1", 671, 37, 1),
        ("kimi-k2", 1026, 32, 1),
        ("qwen3-next-80b-a3b", 80, 3, 1),
        ("qwen3.5-35b-a3b", 35, 3, 1),
        ("qwen3.6-35b-a3b", 35, 3, 1),
        ("gemma-4-26b-a4b", 25.2, 3.8, 0.1),
        ("llama-4-scout", 109, 17, 1),
        ("llama-4-maverick", 400, 17, 1),
        ("minimax-m2", 229, 10, 1),
    ],
)
def test_parameters_are_the_published_ones(
    name: str, total: float | None, active: float, digit: float
) -> None:
    config = SHAPES[name]
    left_out = ARCHITECTURES[config.form].left_out
    # Some cards cut digits off instead of rounding, such as 3.3 for 3.353.
    assert count_active_weights(config, left_out) / GIGA == pytest.approx(active, abs=0.6 * digit)
    if total is not None:
        assert count_weights(config) / GIGA == pytest.approx(total, rel=0.01)
