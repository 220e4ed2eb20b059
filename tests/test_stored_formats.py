"""Weights in coded formats: what writers write, what kernels compute, and models that run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import gguf
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file, save_file

import moesched
from against_hugging_face import assert_near, generated
from benchmarks.shared.small_runs import ONE_MEMORY, TWO_MEMORIES, same_bits
from coded_checkpoints import decoded, decoded_model, random_blocks
from moesched.devices.kernels.check import check_kernel
from moesched.devices.kernels.coded_rows import CodedProduct
from moesched.devices.kernels.expert_of_products import ExpertOfProducts
from moesched.devices.kernels.functions import norm
from moesched.devices.kernels.samples import coded_block
from moesched.devices.products.coded_linear import coded_linear
from moesched.devices.shared.arena import aligned_bytes
from moesched.devices.shared.coded import CodedRows, plain_block
from moesched.devices.shared.page_reader import PageReader
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.coded_models import MIXES, coded_as
from moesched.models.config import NormKind
from moesched.models.encoding import encoded
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.operations import Operations
from moesched.models.published import published_tensors
from moesched.models.random_model import write_random_model
from moesched.models.reading import read_config
from moesched.models.stored_formats import CODED, STORED_FORMATS
from moesched.models.tensor_parallel import cut_checkpoint
from moesched.models.tensors import file_bytes
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from odd_models import CODED as MODEL
from odd_models import OLMOE
from odd_runs import one_batch
from runs import Ended

Q8_0 = STORED_FORMATS["q8_0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(MODEL, tmp_path_factory.mktemp("models") / "coded", dtype="float32")


@given(arrays(np.float32, 96, elements=st.floats(-1e4, 1e4, width=32)))
def test_a_weight_is_off_by_half_a_step_at_most(weights: np.ndarray[Any, Any]) -> None:
    back = decoded(encoded(weights, Q8_0), "q8_0").reshape(-1, 32)
    groups = weights.reshape(-1, 32)
    steps = np.abs(groups).max(axis=1, keepdims=True) / 127
    # The scale is rounded to 11 bits, and has a least unit.
    assert (np.abs(back - groups) <= steps * (0.5 + 127 / 2048) + 127 * 2.0**-25).all()


@pytest.mark.parametrize("name", CODED)
def test_blocks_are_unpacked_to_the_bits_of_ggml(name: str) -> None:
    raw = random_blocks(STORED_FORMATS[name], 40, 9)
    ours = CodedRows(torch.from_numpy(raw), STORED_FORMATS[name]).plain(torch.float32)
    assert same_bits(ours, torch.from_numpy(decoded(raw, name)))


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q5_0", "q5_1", "mxfp4"])
def test_blocks_are_written_as_ggml_writes_them(name: str) -> None:
    weights = np.random.default_rng(8).normal(size=320, scale=0.02).astype(np.float32)
    weights[:32] = 0
    theirs = gguf.quantize(weights, gguf.GGMLQuantizationType[name.upper()])
    assert (encoded(weights, STORED_FORMATS[name]) == theirs).all()


@pytest.mark.parametrize(("name", "most"), [("q4_k", 0.09), ("q5_k", 0.04), ("q6_k", 0.02)])
def test_blocks_with_factors_are_written_near_the_weights(name: str, most: float) -> None:
    weights = np.random.default_rng(9).normal(size=(8, 256)).astype(np.float32)
    back = decoded(encoded(weights.reshape(-1), STORED_FORMATS[name]), name).reshape(weights.shape)
    assert np.sqrt(np.square(back - weights).mean()) < most


@pytest.mark.parametrize("name", CODED)
def test_sums_of_a_group_are_whole_numbers_that_float32_holds(name: str) -> None:
    stored = STORED_FORMATS[name]
    raw = torch.from_numpy(random_blocks(stored, 40, 9))
    codes_NGg = CodedRows(raw, stored).groups().codes_NGg
    assert torch.equal(codes_NGg, codes_NGg.round())
    assert codes_NGg.abs().max() * stored.group <= 2**12


@given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.integers(1, 5), st.integers(1, 90))
def test_a_product_has_the_same_bits_in_any_order_and_beside_any_rows(
    seed: int, rows: int, groups: int, outputs: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights_ND = torch.randn(outputs, groups, 32, generator=generator)
    x_TD = torch.randn(rows, groups, 32, generator=generator).exp() * 1e3
    order = torch.randperm(32, generator=generator)
    block, shuffled = (coded_block(each.flatten(1), Q8_0) for each in (weights_ND, weights_ND[..., order]))
    y_TN = coded_linear(x_TD.flatten(1), block)
    assert torch.equal(coded_linear(x_TD[..., order].flatten(1), shuffled), y_TN)
    assert torch.equal(coded_linear(x_TD[-1:].flatten(1), block.chunk(3)[0])[0], y_TN[-1][: -(-outputs // 3)])


@pytest.mark.parametrize("name", CODED)
def test_a_product_is_that_of_the_unpacked_weights(name: str) -> None:
    stored = STORED_FORMATS[name]
    raw = encoded(np.random.default_rng(1).normal(size=7 * 512).astype(np.float32), stored)
    block = CodedRows(torch.from_numpy(raw).view(7, -1), stored)
    x_TD = torch.randn(5, 512, generator=torch.Generator().manual_seed(1))
    exact_TN = x_TD.double() @ block.plain(torch.float32).double().T
    assert (coded_linear(x_TD, block) - exact_TN).abs().max() < 1e-6 * exact_TN.abs().max()


@pytest.mark.parametrize("kernel", [CodedProduct, ExpertOfProducts])
def test_kernels_of_coded_matrices_keep_their_promises(kernel: type) -> None:
    assert check_kernel(kernel, numbers=(1, 5, 33)) > 0


@pytest.mark.parametrize(("name", "tied"), [*((name, False) for name in MIXES), ("q4_k_m", True)])
def test_logits_are_those_of_hugging_face_with_the_decoded_weights(
    name: str, tied: bool, tmp_path: Path
) -> None:
    config = MODEL.varied(2, intermediate=256, heads=4, head_dim=64, tied_embeddings=tied)
    folder = write_random_model(config, tmp_path / "coded", dtype="float32", stored_as=name)
    assert_near(decoded_model(folder, tmp_path / "decoded"), generated(folder), 1e-5)


def test_every_page_size_gives_the_same_logits(tmp_path: Path) -> None:
    config = coded_as(MODEL.varied(layers=1, heads=4, head_dim=24), "q8_0")
    folder = write_random_model(config, tmp_path / "coded", dtype="float32")
    assert same_bits(*(generated(folder, page_bytes=each).logits_RSV for each in (None, 5_000)))


def test_pages_and_their_sum_have_the_bytes_of_the_file(folder: Path) -> None:
    config = read_config(folder)
    layout = weight_layout(config, "float32", 14_000)
    paged = sum(extent.nbytes for page in layout.pages for extent in page.extents)
    entries = [
        entry
        for file in folder.glob("*.safetensors")
        for name, entry in header(file).items()
        if name != "__metadata__"
    ]
    in_files = sum(end - start for start, end in (each["data_offsets"] for each in entries))
    assert paged + layout.globals_bytes == in_files == file_bytes(config)
    assert {each["dtype"] for each in entries} == {"U8", "F32"}


def header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        found: dict[str, Any] = json.loads(opened.read(length))
    return found


# ---------------------------------------------------------------- norms and routers in float32


@pytest.fixture(scope="module")
def with_float32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16 whose norms and routers are numbers in float32."""
    config = OLMOE.varied(hidden=64, intermediate=32, heads=4, kv_heads=2, head_dim=16)
    folder = write_random_model(config, tmp_path_factory.mktemp("models") / "mixed")
    [file] = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("norm.weight", "mlp.gate.weight")):
            tensors[name] = tensor.float() + torch.randn(tensor.shape, generator=generator) / 50
    save_file(tensors, file)
    return folder


def test_norms_and_routers_are_in_pages_as_they_are_stored(with_float32: Path) -> None:
    checkpoint = open_checkpoint(with_float32)
    [file] = with_float32.glob("*.safetensors")
    stored, names = load_file(file), published_tensors(checkpoint.config)
    layout = weight_layout(checkpoint.config)
    with PageReader(checkpoint, layout) as reader:
        assert not reader.converts
        for page in layout.dense(1):
            memory = aligned_bytes(reader.bytes_in_slot(page))
            reader.read(page, memory)
            for name, [block] in reader.views(memory, page).items():
                [original] = [stored[each] for each in names if names[each].parts[0][0] == name]
                assert block.dtype == original.dtype
                assert torch.equal(block, original)
        assert reader.read_tensor("final_norm").dtype == torch.float32
    assert layout.globals_bytes + sum(e.nbytes for p in layout.pages for e in p.extents) == sum(
        each.nbytes for each in stored.values()
    )


def test_a_norm_in_float32_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(2)
    x_TD, weight_D = (torch.randn(shape, generator=generator) for shape in ((9, 64), (64,)))
    x_TD = x_TD.bfloat16()
    for kind in get_args(NormKind):
        exact_TD = norm(x_TD.double(), weight_D.double(), 1e-5, kind)
        assert torch.equal(norm(x_TD, weight_D, 1e-5, kind), exact_TD.bfloat16())


@pytest.mark.parametrize("policy", ["layer_streaming", "expert_cache"])
def test_logits_with_norms_in_float32_are_the_same_under_every_policy(
    policy: str, with_float32: Path
) -> None:
    checkpoint = open_checkpoint(with_float32)
    layout = weight_layout(checkpoint.config)
    runs = [
        one_batch(TorchDevice(checkpoint, layout, keep_logits=True), each, machine=machine, weights=weights)
        for each, machine, weights in (("resident", ONE_MEMORY, 1.0), (policy, TWO_MEMORIES, 0.8))
    ]
    assert same_bits(*(each.logits_RSV for each in runs))


# ---------------------------------------------------------------- layers


def test_layers_whose_formats_differ_have_pages_of_their_own() -> None:
    coded, plain = coded_as(MODEL, "q8_0").pattern[0], msgspec.structs.replace(MODEL.pattern[0], formats=())
    config = msgspec.structs.replace(MODEL, pattern=(coded, plain, coded))
    layout = weight_layout(config, "bfloat16", 14_000)
    assert layout.pages_per_expert[0] == layout.pages_per_expert[2] < layout.pages_per_expert[1]
    assert len(layout.an_expert) == layout.pages_per_expert[1]
    for layer in range(3):
        nbytes = sum(extent.nbytes for page in layout.expert(layer, 3) for extent in page.extents)
        assert nbytes == Operations(config, "bfloat16", kind=config.pattern[layer]).expert_bytes


def test_an_expert_costs_the_bytes_that_it_has_in_its_layer() -> None:
    layout, policy, ran = weight_layout(MODEL, "bfloat16"), make_policy("expert_streaming"), Ended()
    plan = plan_run(TWO_MEMORIES, layout, split_batch([3] * 4, 2, 4), policy)
    simulate(plan, policy, observers=[ran])
    experts = [task for task in ran.tasks if task.verb == "run_expert"]
    assert {task.layer for task in experts} == {*range(MODEL.layers)}
    for task in experts:
        stored = sum(extent.nbytes for page in layout.expert(task.layer, 0) for extent in page.extents)
        assert {part.size for part in task.work.parts} == {stored}


def test_a_folder_is_refused_whose_files_are_not_as_config_json_says(folder: Path, tmp_path: Path) -> None:
    pattern = tuple(msgspec.structs.replace(layer, formats=()) for layer in MODEL.pattern)
    config = msgspec.structs.replace(MODEL, formats=(), pattern=pattern)
    plain = write_random_model(config, tmp_path / "plain")
    (plain / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(
        BadInput, match=r"is BF16 of shape .*, and rows in q4_k, which config.json describes, are U8"
    ):
        open_checkpoint(plain)


def test_an_unknown_format_is_refused_with_the_known_ones(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["format"] = "q9_9"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"format is 'q9_9', .*one of q8_0"):
        read_config(tmp_path)


def test_a_scale_that_is_no_number_is_named_with_its_matrix(tmp_path: Path) -> None:
    folder = write_random_model(MODEL, tmp_path / "coded", dtype="float32")
    stored = open_checkpoint(folder).tensors["layers.2.q"]
    with stored.file.open("r+b") as file:
        file.seek(stored.offset + Q8_0.scale)
        file.write(np.float16(np.nan).tobytes())
    report = moesched.run_model(folder, [[5, 6, 7]], max_new_tokens=2, expect=False)
    assert report.failure is not None
    assert "the first bad tensor is weight layers.2.q:" in report.failure


def test_activations_of_coded_experts_are_counted(command: Any, folder: Path) -> None:
    counted = command("sparsity", folder, "--json").json
    assert len(counted["values"]) == MODEL.layers


def test_ranks_share_coded_rows_in_whole_groups(tmp_path: Path) -> None:
    narrow, wide = (
        open_checkpoint(
            write_random_model(
                coded_as(
                    MODEL.varied(layers=1, heads=6, kv_heads=2, intermediate=inner, vocabulary=96), "q8_0"
                ),
                tmp_path / str(inner),
                dtype="float32",
            )
        )
        for inner in (96, 128)
    )
    with pytest.raises(BadInput, match=r"down has rows of 96 weights in q8_0, .* whole blocks of 32: use"):
        cut_checkpoint(narrow, 0, 2)
    whole, share = (
        down(checkpoint, weight_layout(checkpoint.config, "float32"))
        for checkpoint in (wide, cut_checkpoint(wide, 1, 2))
    )
    assert torch.equal(whole[:, 64:], share)


def down(checkpoint: Checkpoint, layout: WeightLayout) -> torch.Tensor:
    """The down matrix of an expert, as its page has it."""
    with PageReader(checkpoint, layout) as reader:
        [page] = layout.expert(0, 1)
        memory = aligned_bytes(reader.bytes_in_slot(page))
        reader.read(page, memory)
        [block] = reader.views(memory, page)["layers.0.experts.1.down"]
    return plain_block(block, torch.float32)
