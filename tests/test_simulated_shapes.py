"""Families that are only simulated: published figures, what their layers keep and read, and every policy on each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import moesched
from moesched import plugins
from moesched.errors import BadInput
from moesched.inputs.lookup import find_shape
from moesched.jobs.options import SimulationOptions
from moesched.jobs.report import JobReport
from moesched.jobs.scenario import Scenario
from moesched.jobs.simulate_model import simulate_scenario
from moesched.machines import load_machine
from moesched.machines.networks import load_network
from moesched.machines.sustained import at_peak
from moesched.models.architectures import ARCHITECTURES
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.formats import CHOICES, FORMATS
from moesched.models.layers import LatentAttention, LinearAttention
from moesched.models.layout import weight_layout
from moesched.models.operations import Operations
from moesched.models.published import published_config
from moesched.models.reading import in_format
from moesched.models.shapes import SHAPES
from moesched.models.tensor_parallel import cut_config
from moesched.models.tensors import count_active_weights, count_weights, file_bytes
from moesched.requests.workloads import given_lengths
from small_shapes import FAMILIES, small
from tables import files, table

GIGA = 1e9

# ---------------------------------------------------------------- published figures


@pytest.mark.parametrize(("name", "total", "active", "digit"), table("published.md", "Parameters"))
def test_parameters_are_the_published_ones(
    name: str, total: float | None, active: float | None, digit: float
) -> None:
    config = SHAPES[name]
    left_out = ARCHITECTURES[config.form].left_out
    # Some cards cut digits off instead of rounding, such as 3.3 for 3.353.
    if active is not None:
        assert count_active_weights(config, left_out) / GIGA == pytest.approx(active, abs=0.6 * digit)
    if total is not None:
        assert count_weights(config) / GIGA == pytest.approx(total, rel=0.01)


@pytest.mark.parametrize(("name", "stored_as", "published"), table("published.md", "Bytes of files"))
def test_bytes_are_those_of_the_published_files(name: str, stored_as: str | None, published: float) -> None:
    assert file_bytes(find_shape(name, stored_as)) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(("name", "stored_as", "gibibytes"), table("published.md", "GiB of text models"))
def test_files_without_prediction_layers_and_encoders_are_smaller(
    name: str, stored_as: str, gibibytes: float
) -> None:
    text = replace(find_shape(name, stored_as), unused_weights=0)
    assert file_bytes(text) == pytest.approx(gibibytes * 2**30, rel=0.01)


@pytest.mark.parametrize("name", SHAPES)
def test_pages_and_what_is_beside_them_are_all_weights(name: str) -> None:
    config = replace(SHAPES[name], unused_weights=0).cut(12)
    layout = weight_layout(config)
    paged = sum(page.nbytes for page in layout.pages) + layout.globals_bytes
    assert paged == pytest.approx(file_bytes(config), rel=1e-3)


# ---------------------------------------------------------------- what layers keep and read


def test_a_latent_cache_is_one_vector_for_all_heads() -> None:
    latent = Operations(SHAPES["deepseek-v3"], "bfloat16")
    assert latent.kv_bytes == (512 + 64) * 2
    assert latent.held_bytes([1000]) == 1000 * (512 + 64) * 2


def test_linear_attention_keeps_as_much_of_a_long_prompt_as_of_a_short_one() -> None:
    config = SHAPES["qwen3-next-80b-a3b"]
    operations = Operations(config, "bfloat16")
    linear = operations.by_layer[0]
    assert isinstance(linear.layer.attention, LinearAttention)
    assert linear.held_bytes([10]) == linear.held_bytes([100_000]) > 0
    assert linear.attention_step([10]) == linear.attention_step([100_000])
    growth = operations.held_in(range(config.layers), [2000]) - operations.held_in(
        range(config.layers), [1000]
    )
    assert growth == 12 * 1000 * operations.kv_bytes


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=5))
def test_a_window_bounds_what_a_layer_keeps_and_reads(lengths: list[int]) -> None:
    config = SHAPES["gpt-oss-20b"]
    near, far = Operations(config, "bfloat16").by_layer[:2]
    blocks_and_one_more = 128 + 16
    assert near.held_bytes(lengths) == far.held_bytes(
        [min(length, blocks_and_one_more) for length in lengths]
    )
    assert near.attention_step(lengths).nbytes <= far.attention_step(lengths).nbytes
    if max(lengths) <= 128:
        assert near.attention_step(lengths) == far.attention_step(lengths)


@given(st.sampled_from(sorted(FAMILIES.values())), st.lists(st.integers(1, 300), min_size=1, max_size=6))
def test_a_step_of_attention_costs_the_same_either_way(name: str, totals: list[int]) -> None:
    for operations in Operations(SHAPES[name], "bfloat16").kinds.values():
        in_general = operations.attention([(1, total) for total in totals])
        assert operations.attention_step(totals)[:2] == pytest.approx(in_general[:2])


def test_a_dense_layer_has_its_network_among_the_weights_that_every_token_uses() -> None:
    config = SHAPES["deepseek-v3"]
    layout = weight_layout(config.cut(4))
    dense, routed = layout.dense(0), layout.dense(3)
    assert [len(layout.experts_of(i)) for i in range(4)] == [0, 256, 256, 256]
    assert layout.expert(0, 7) == ()
    assert layout.layer(0) == dense
    own_network, shared = 3 * 7168 * 18432, 3 * 7168 * 2048
    router = 256 * 7168 * 2
    grows = sum(page.nbytes for page in dense) - sum(page.nbytes for page in routed)
    assert grows == pytest.approx(own_network - shared - router, rel=1e-3)


def test_prediction_layers_are_on_disk_and_not_in_memory() -> None:
    config = SHAPES["deepseek-v3"]
    assert config.unused_weights > 11e9
    assert file_bytes(config) - file_bytes(replace(config, unused_weights=0)) > 11e9
    cut = replace(config.cut(4), unused_weights=0)
    assert weight_layout(config.cut(4)).pages == weight_layout(cut).pages


@pytest.mark.parametrize(
    ("name", "layers", "dense", "linear"),
    [
        ("deepseek-v3", 6, 1, 0),
        ("qwen3-next-80b-a3b", 4, 0, 3),
        ("qwen3-next-80b-a3b", 8, 0, 6),
        ("kimi-k2", 2, 1, 0),
    ],
)
def test_a_cut_has_every_kind_of_layer_in_about_its_share(
    name: str, layers: int, dense: int, linear: int
) -> None:
    cut = SHAPES[name].cut(layers)
    assert cut.layers == len(cut.pattern) == layers
    assert sum(not layer.feed_forward.experts for layer in cut.pattern) == dense
    assert sum(isinstance(layer.attention, LinearAttention) for layer in cut.pattern) == linear


def test_ranks_copy_key_value_heads_and_latent_caches_that_they_cannot_divide() -> None:
    share = Operations(cut_config(SHAPES["qwen3-next-80b-a3b"], 4), "bfloat16")
    assert share.kv_bytes == 2 * 1 * 256 * 2
    latent = cut_config(SHAPES["deepseek-v3"], 8).typical_layer.attention
    assert isinstance(latent, LatentAttention)
    assert (latent.heads, latent.cache_width) == (16, 576)


# ---------------------------------------------------------------- formats


def test_fewer_bits_take_fewer_bytes() -> None:
    order = ["bf16", "q8_0", "int8", "fp8", "q6_k", "q5_k", "q4_k_m", "q4_0", "int4"]
    sizes = [file_bytes(find_shape("qwen3-30b-a3b", name)) for name in order]
    assert sizes == sorted(sizes, reverse=True)
    assert set(CHOICES) == {*order, "mxfp4"}


def test_rows_that_no_k_quant_divides_take_blocks_of_32() -> None:
    # The experts of DeepSeek-V2-Lite have 1408 = 5.5 x 256 inner rows.
    config = in_format(SHAPES["deepseek-v2-lite"], "q6_k")
    assert config.weight_bytes("expert", 2048, "bfloat16") == 210 / 256
    assert config.weight_bytes("expert_down", 1408, "bfloat16") == 34 / 32


def test_the_kernel_rate_divides_the_speed_of_products_that_are_bound_by_computing() -> None:
    machine = at_peak(load_machine("l4"))
    cost = moesched.machines.cost.cost_model(machine, "bfloat16")
    seconds = {}
    for name in ("bf16", "q6_k"):
        amount = Operations(find_shape("mixtral-8x7b", name), "bfloat16").fetched_expert(100_000)
        work = moesched.work.Work("expert", "gpu", *amount[:2], 100_000, amount.parts, amount.kernel_rate)
        seconds[name] = cost.work(work).seconds
    assert seconds["q6_k"] == pytest.approx(seconds["bf16"] / FORMATS["q6_k"].kernel_rate, rel=1e-3)


def test_activations_and_caches_keep_16_bits() -> None:
    plain, stored = (Operations(find_shape("mixtral-8x7b", name), "bfloat16") for name in ("bf16", "q4_0"))
    assert stored.kv_bytes == plain.kv_bytes
    assert stored.hidden_bytes == plain.hidden_bytes
    assert stored.expert_bytes / plain.expert_bytes == pytest.approx(18 / 32 / 2)


# ---------------------------------------------------------------- configuration files


DEEPSEEK_V3 = files("published.md")["deepseek-v3.json"]


def test_a_folder_without_kernels_for_it_is_simulated_and_not_run(command: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(DEEPSEEK_V3)
    said = command("run", tmp_path, "--policy", "resident", "--prompt-ids", "1,2,3")
    assert said.code == 2
    assert "no device has kernels for the family deepseek, and for weights in fp8" in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(("quantization", "name"), table("published.md", "Formats of quantisation_config"))
def test_the_format_has_the_bits_that_quantization_config_gives(
    tmp_path: Path, quantization: dict[str, Any], name: str
) -> None:
    values = json.loads(DEEPSEEK_V3) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert find_shape(tmp_path).format == name


@pytest.mark.parametrize(("quantization", "complaint"), table("broken_files.md", "Quantisations"))
def test_other_bits_are_refused_with_their_number(
    tmp_path: Path, quantization: dict[str, Any], complaint: str
) -> None:
    values = json.loads(DEEPSEEK_V3) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(BadInput, match=re.escape(complaint)):
        find_shape(tmp_path)


def quantised_mixtral(folder: Path, method: str) -> Path:
    """The folder of a model of a family that runs, quantised."""
    values = published_config(SHAPES["mixtral-8x7b"]) | {"quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_quantised_model_of_a_family_that_runs_is_simulated_and_refused_by_devices(tmp_path: Path) -> None:
    folder = quantised_mixtral(tmp_path, "awq")
    assert file_bytes(find_shape(folder)) < 0.3 * file_bytes(SHAPES["mixtral-8x7b"])
    with pytest.raises(BadInput, match="no device has kernels for weights in int4: use `moesched simulate`"):
        open_checkpoint(folder)


@pytest.mark.parametrize("stored", ["lm_head.weight", "model.norm.weight"])
def test_a_simulated_folder_has_the_head_that_its_files_have(tmp_path: Path, stored: str) -> None:
    values = published_config(SHAPES["mixtral-8x7b"]) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    index = {"weight_map": {stored: "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_shape(tmp_path).tied_embeddings == (stored != "lm_head.weight")


def test_a_given_format_replaces_one_that_is_not_known(tmp_path: Path) -> None:
    assert find_shape(quantised_mixtral(tmp_path, "exl2"), "q4_k_m").format == "q4_k_m"


# ---------------------------------------------------------------- every policy on every family


def simulated(config: ModelConfig, policy: str) -> JobReport:
    """Six requests of a few tokens on a small cut."""
    cluster = policy.startswith("ep_")
    machine = load_machine("m2-ultra" if cluster else "t4")
    if cluster:
        machine = replace(machine, network=load_network("10gbe"))
    workload = given_lengths([40, 60, 33, 200], 3)
    given = SimulationOptions(
        config.name,
        workload=workload,
        machine=machine,
        policy=policy,
        gen=3,
        batch_size=1 if cluster else 4,
        micro_batch_size=1 if cluster else 2,
        nodes=2 if cluster else None,
        band=False,
    )
    return simulate_scenario(Scenario(config, machine, workload, None), given)


@pytest.mark.usefixtures("as_users_run")
@pytest.mark.parametrize("policy", ["adversarial", *plugins.names("policies")])
def test_every_policy_simulates_every_family(policy: str) -> None:
    for name in FAMILIES.values():
        report = simulated(small(name), policy)
        verbs = {each.kind for each in report.kinds}
        assert {"embed", "pre_attention", "sample"} <= verbs, f"{policy} on {name}"
