"""Rotary embeddings that are scaled turn as those of transformers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moesched.devices.kernels.qkv_functions import rotary_frequencies
from moesched.errors import BadInput
from moesched.models.reading import read_config

PAIRS, LONGEST = 4, 2048
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LONGEST,
}

factors = st.floats(1.5, 32.0)
lengths = st.integers(64, LONGEST - 1)
of_pairs = st.lists(st.floats(0.5, 64.0), min_size=PAIRS, max_size=PAIRS)
SCALINGS = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": factors,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(3.0, 8.0),
            "original_max_position_embeddings": lengths,
        }
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": factors, "original_max_position_embeddings": lengths},
        optional={"attention_factor": st.floats(0.5, 2.0), "truncate": st.booleans()},
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("longrope"),
            "long_factor": of_pairs,
            "short_factor": of_pairs,
            "original_max_position_embeddings": lengths,
        },
        optional={"factor": factors, "attention_factor": st.floats(0.5, 2.0)},
    ),
)


@settings(max_examples=40)
@given(scaling=SCALINGS, theta=st.sampled_from([100.0, 1e4]))
def test_frequencies_and_magnitude_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, scaling: dict[str, Any], theta: float
) -> None:
    scaling = scaling | {"rope_theta": theta}
    mine = _read(tmp_path_factory.mktemp("model"), rope_parameters=scaling).attention
    theirs, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
        LlamaConfig(
            **{key: value for key, value in SIZES.items() if key != "model_type"}, rope_parameters=scaling
        ),
        torch.device("cpu"),
        seq_len=LONGEST,
    )
    torch.testing.assert_close(rotary_frequencies(mine, torch.device("cpu")), theirs, rtol=1e-6, atol=0.0)
    assert mine.rotary.magnitude == pytest.approx(magnitude, rel=1e-12)


LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [2.0] * PAIRS,
    "short_factor": [1.0] * PAIRS,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(("longest", "factor", "slowed"), [(512, 4.0, 1.0), (1024, 1.0, 0.5)])
def test_the_longest_context_chooses_the_factors_whatever_the_scaling_says(
    tmp_path: Path, longest: int, factor: float, slowed: float
) -> None:
    model = _read(tmp_path, rope_scaling=LONGROPE | {"factor": factor}, max_position_embeddings=longest)
    assert model.attention.rotary.slowed(8) == [slowed] * PAIRS


def test_both_spellings_may_say_the_same(tmp_path: Path) -> None:
    newer = {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}
    older = {"type": "linear", "factor": 4.0}
    both = _read(tmp_path, rope_theta=50.0, rope_parameters=newer, rope_scaling=older)
    assert both.attention == _read(tmp_path, rope_parameters=newer).attention


def test_a_context_as_long_as_those_of_the_training_has_the_short_factors(tmp_path: Path) -> None:
    whole = _read(tmp_path, rope_scaling=LONGROPE, max_position_embeddings=512).attention
    assert (whole.rotary.slowed(8), whole.rotary.magnitude) == ([1.0] * PAIRS, 1.0)


def test_the_length_of_the_training_may_stand_outside_the_scaling(tmp_path: Path) -> None:
    scaling = {key: value for key, value in LONGROPE.items() if "original" not in key}
    outside = _read(tmp_path, rope_scaling=scaling, original_max_position_embeddings=512)
    assert outside.attention == _read(tmp_path, rope_scaling=LONGROPE).attention


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"long_factor": [2.0] * 3}, "long_factor has 3 numbers, but 4 pairs of a head turn"),
        ({"short_factor": [1.0, 1.0, 1.0, 0.0]}, "short_factor has 0, but float32 overflows or loses it"),
        ({"long_factor": [2.0, 1e30, 2.0, 2.0]}, "long_factor has 1e+30, but float32 overflows or loses it"),
        ({"original_max_position_embeddings": 1}, "is 1, but contexts of the training were longer"),
        ({"long_factor": None}, "missing required field `long_factor`"),
        ({"factor": 0.0}, "factor is 0"),
        ({"rope_type": "longrop"}, "longrope"),
    ],
)
def test_a_longrope_that_no_model_has_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=r"config\.json") as refused:
        _read(tmp_path, rope_scaling=LONGROPE | change)
    assert said in str(refused.value)


def _read(folder: Path, **keys: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(SIZES | keys))
    return read_config(folder)
