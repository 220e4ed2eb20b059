"""Models in GGUF files: tensors, metadata, tokens, and what is said of files that cannot be used."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, quants
from msgspec.structs import replace

from against_hugging_face import assert_near, generated
from benchmarks.exact.page_bytes import bytes_of_pages
from benchmarks.record.results import ROOT
from benchmarks.shared.gguf_files import ROUTER, TypeOf, add_vocabulary, q4_k_m, quantized, write_gguf
from benchmarks.shared.small_runs import same_bits
from gguf_models import gguf_model, unpacked_model
from moesched.devices.mlx.device import MlxDevice
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput
from moesched.inputs.tokenizer import TOKENIZER_NAME, find_tokenizer, open_model
from moesched.jobs.session import run_model
from moesched.models.checkpoint import StoredTensor, open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.networks import Activation, Router
from moesched.models.random_model import write_random_model
from moesched.models.rotary import Linear, Llama3, Rotary, Yarn
from moesched.models.shapes import SHAPES
from odd_models import DBRX, GLM, GPT_OSS, GRANITE, MINIMAX, MIXTRAL, OLMOE
from stored_checkpoints import assert_complete, content

WHOLE_ROWS = MIXTRAL.varied(
    layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=32, window=None
)
K_QUANTS = WHOLE_ROWS.varied(hidden=256, intermediate=256, heads=8)
LLAMA = MIXTRAL.varied(name="llama", layers=2, experts=1, top_k=1, window=None, form="llama")
GPT_OSS_FILE = GPT_OSS.cut(2).varied(activation=Activation(alpha=1.702, limit=7.0))
MODELS = {
    "mixtral in Q4_K_M": (K_QUANTS, q4_k_m),
    "mixtral in Q8_0": (WHOLE_ROWS, quantized(Type.Q8_0)),
    "mixtral in F32": (MIXTRAL, quantized(Type.F32)),
    "llama in F16": (LLAMA, quantized(Type.F16)),
    "qwen3moe in BF16": (
        MIXTRAL.varied(name="qwen", layers=2, qk_norm="head", tied_embeddings=True, form="qwen3_moe"),
        quantized(Type.BF16),
    ),
    "olmoe in Q8_0": (
        OLMOE.varied(layers=2, hidden=64, heads=4, head_dim=16, intermediate=32),
        quantized(Type.Q8_0),
    ),
    "dbrx in F32": (DBRX.varied(layers=2), quantized(Type.F32)),
    **{
        f"llama with {type(each).__name__}": (
            LLAMA.varied(rotary=Rotary(scaling=each), layers=2),
            quantized(Type.F32),
        )
        for each in (
            Linear(factor=3.0),
            Yarn(factor=4.0, beta_fast=4.0, beta_slow=0.5, original_max_position_embeddings=256),
            Llama3(
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        )
    },
    "granitemoe in F32": (GRANITE.varied(layers=2), quantized(Type.F32)),
    "minimax-m2 in F32": (MINIMAX.varied(layers=2), quantized(Type.F32)),
    "glm4moe in F32": (GLM.cut(2), quantized(Type.F32)),
    "gpt-oss in F32": (GPT_OSS_FILE, quantized(Type.F32)),
    "gpt-oss in MXFP4": (
        GPT_OSS_FILE.varied(hidden=64, intermediate=32, heads=4, kv_heads=2, head_dim=32),
        quantized(Type.MXFP4),
    ),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_hugging_face_with_the_unpacked_weights(
    model: tuple[ModelConfig, TypeOf], tmp_path: Path
) -> None:
    config, type_of = model
    file = gguf_model(config, tmp_path, type_of)
    assert_near(unpacked_model(file, config), generated(file), 1e-5)


def test_the_prediction_layer_of_a_file_is_left_out(tmp_path: Path) -> None:
    def add_prediction(writer: Any) -> None:
        writer.add_tokenizer_model("no_vocab")
        writer.add_block_count(3)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.2.nextn.enorm.weight", np.ones(GLM.hidden, np.float32))

    file = gguf_model(GLM.cut(2), tmp_path, quantized(Type.F32), describe=add_prediction)
    checkpoint = open_checkpoint(file)
    assert checkpoint.config.layers == 2
    assert_complete(checkpoint)


@pytest.mark.parametrize("make", [TorchDevice, MlxDevice])
def test_a_file_gives_the_bits_of_a_folder_with_the_same_weights(
    make: type[TorchDevice | MlxDevice], tmp_path: Path
) -> None:
    config = WHOLE_ROWS.varied(dtype="bfloat16", window=4)
    folder = write_random_model(config, tmp_path / "folder")
    file = tmp_path / "model.gguf"
    write_gguf(open_checkpoint(folder), file)
    runs = (generated(model, "bfloat16", kind=make, policy="layer_streaming") for model in (folder, file))
    assert same_bits(*(ran.logits_RSV for ran in runs))


def in_float16(stored: StoredTensor) -> None:
    weights = np.memmap(stored.file, np.float32, "r+", stored.offset, stored.shape)
    weights[:] = weights.astype(np.float16)
    weights.flush()


def test_routers_in_float16_beside_coded_matrices_are_read_in_float32(tmp_path: Path) -> None:
    """The first files of Mixtral have such routers."""
    plain = open_checkpoint(write_random_model(WHOLE_ROWS, tmp_path / "plain", dtype="float32"))
    for name, stored in plain.tensors.items():
        if name.endswith(".router"):
            in_float16(stored)

    def file_with_routers_in(kind: Type) -> Path:
        file = tmp_path / f"{kind.name}.gguf"
        write_gguf(
            plain, file, lambda name, shape: kind if ROUTER in name else quantized(Type.Q8_0)(name, shape)
        )
        return file

    files = map(file_with_routers_in, (Type.F16, Type.F32))
    runs = (generated(file, "bfloat16", policy="layer_streaming") for file in files)
    assert same_bits(*(ran.logits_RSV for ran in runs))


def test_pages_are_cut_from_stacked_experts_as_they_lie(tmp_path: Path) -> None:
    file = gguf_model(WHOLE_ROWS, tmp_path, quantized(Type.Q8_0))
    runs = (generated(file, page_bytes=each, policy="layer_streaming") for each in (None, 3_000))
    assert same_bits(*(ran.logits_RSV for ran in runs))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model in three files."""
    folder = tmp_path_factory.mktemp("split")
    gguf_model(WHOLE_ROWS, folder, quantized(Type.Q8_0), split_max_tensors=10)
    return sorted(folder.glob("*.gguf"))


def test_any_part_of_a_split_model_is_the_model(parts: list[Path], tmp_path: Path) -> None:
    whole = open_checkpoint(gguf_model(WHOLE_ROWS, tmp_path, quantized(Type.Q8_0)))
    assert len(parts) == 3
    for part in parts:
        opened = open_checkpoint(part)
        assert opened.config == whole.config
        assert {name: content(each) for name, each in opened.tensors.items()} == {
            name: content(each) for name, each in whole.tensors.items()
        }


SHIPPED = ROOT / "examples" / "tiny-mixtral-256.gguf"


def test_the_file_that_ships_has_the_types_of_q4_k_m_and_at_most_5_megabytes() -> None:
    types = {each.name: each.tensor_type for each in GGUFReader(SHIPPED).tensors}
    matrices = {name: kind for name, kind in types.items() if kind != Type.F32}
    assert matrices == {name: q4_k_m(name, (256, 256)) for name in matrices}
    assert {Type.Q4_K, Type.Q6_K} == set(matrices.values())
    assert SHIPPED.stat().st_size <= 5_000_000


def test_the_file_that_ships_writes_the_same_words_under_every_policy() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("resident", {}),
        ("expert_cache", {"budgets": {"host": "7MB"}}),
        ("layer_streaming", {"budgets": {"host": "8.5MB"}}),
    ]
    runs = [
        run_model(SHIPPED, ["Return a list of"], policy=policy, max_new_tokens=12, **more)
        for policy, more in cases
    ]
    [text] = {each.text[0] for each in runs if each.text}
    assert len(text.split()) >= 2
    assert runs[1].peak_bytes["host"] < runs[2].peak_bytes["host"] < runs[0].peak_bytes["host"]


def test_a_model_and_its_tokenizer_are_made_of_one_look_at_the_file() -> None:
    opened: list[Any] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            opened.append(arguments[0])

    sys.addaudithook(note)
    checkpoint, tokenizer = open_model(SHIPPED)
    assert (checkpoint.config.layers, tokenizer is None) == (3, False)
    assert opened.count(str(SHIPPED)) == 1  # as the system gets it


def test_reading_all_pages_takes_hardly_more_bytes_than_their_tensors_have() -> None:
    for name in ("mixtral-8x7b", "qwen3-30b-a3b"):
        read, stored = bytes_of_pages(SHAPES[name].varied(layers=2))
        assert stored <= read <= 1.01 * stored


@pytest.mark.slow
def test_a_file_continues_a_text_as_the_folder_that_it_was_made_of(command: Any, tmp_path: Path) -> None:
    folder, file = ROOT / "examples" / "tiny-mixtral", tmp_path / "tiny.gguf"
    vocabulary = folder / TOKENIZER_NAME
    write_gguf(open_checkpoint(folder), file, describe=partial(add_vocabulary, file=vocabulary))
    ours, theirs = find_tokenizer(file), find_tokenizer(folder)
    assert ours is not None
    assert theirs is not None
    for text in ("Return a new list", "  if x:\n\treturn 1.5\n", "naïve\u0301 ½ 😀</s>", ""):
        assert ours.encode(text) == theirs.encode(text)
    said = [
        command("run", model, "--policy", "resident", "--prompt", "Return a new", "--max-new-tokens", "8")
        for model in (file, folder)
    ]
    assert said[0].out.splitlines()[:1] == said[1].out.splitlines()[:1]


def test_commands_take_a_file_wherever_they_take_a_folder(command: Any, tmp_path: Path) -> None:
    file = gguf_model(WHOLE_ROWS, tmp_path, quantized(Type.F32))
    run = ("--policy", "expert_cache", "--prompt-ids", "1,2,3", "--max-new-tokens", "3", "--json")
    reports = [command("run", model, *run).json for model in (file, tmp_path / "plain")]
    assert reports[0]["tokens"] == reports[1]["tokens"]
    predict = ("--model", file, "--machine", "t4", "--policy", "expert_cache", "--no-band")
    assert command("simulate", *predict, "--workload", "uniform", "--gen", "2").code == 0
    assert command("plan", *predict, "--for", "latency").code == 0
    assert command("sparsity", file).code == 0
    assert f"{file}, " in command("doctor", "--model", file).out
    assert "is a GGUF file" in command("prestack", file, tmp_path / "stacked").err
    assert "which this command reads" in command("run", file, *run, "--trace", file).err


@pytest.mark.parametrize("stored_as", [None, "q8_0", "q4_k_m"])
def test_random_models_are_written_to_files_too(stored_as: str | None, tmp_path: Path) -> None:
    sizes = {"hidden": 256, "heads": 8, "head_dim": 32, "intermediate": 256}
    dense, *others = GLM.cut(2).varied(shared=256, **sizes).pattern
    dense = dense.varied(intermediate=0)
    for config in (
        K_QUANTS.varied(rotary=Rotary(scaling=Linear(factor=3.0))),
        GRANITE.varied(layers=2, **sizes),
        MINIMAX.varied(layers=2, **sizes),
        replace(GLM, hidden=256, pattern=(dense, *others)),
        replace(GLM, name="glm-with-norms", hidden=256, pattern=(dense, *others)).varied(qk_norm="head"),
        DBRX.varied(layers=2, **sizes),
        GPT_OSS_FILE.varied(layers=3, **sizes),
    ):
        file = write_random_model(config, tmp_path / f"{config.name}.gguf", stored_as=stored_as)
        checkpoint = open_checkpoint(file)
        assert_complete(checkpoint)
        wanted = config.varied(
            rotary=replace(config.attention.rotary, interleaved=config.form in ("mixtral", "granite_moe")),
            alternating=False,
            transposed_down=False,
        ).pattern
        assert [replace(each, formats=()) for each in checkpoint.config.pattern] == [*wanted]
        for each in GGUFReader(file).tensors:
            values = quants.dequantize(each.data, each.tensor_type)
            assert (
                (values == 1).all()
                if "norm" in each.name
                else values.size < 600 or 0.018 < values.std() < 0.022
            )
    with pytest.raises(BadInput, match="exists already; remove it"):
        write_random_model(config, file)


def test_names_that_do_not_open_again_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has the name of a part of a split model: choose another name"):
        write_random_model(MIXTRAL, tmp_path / "model-00001-of-00002.gguf")
    assert open_checkpoint(write_random_model(MIXTRAL, tmp_path / "MODEL.GGUF")).config.layers


def test_factors_that_a_file_leaves_out_are_1(tmp_path: Path) -> None:
    config = GRANITE.varied(embedding_factor=1.0, residual_factor=1.0, logits_factor=1.0, router=Router())
    read = open_checkpoint(write_random_model(config, tmp_path / "granite.gguf")).config
    assert (read.embedding_factor, read.residual_factor, read.logits_factor) == (1.0, 1.0, 1.0)
    assert read.routed.router == Router()


def test_layers_that_no_file_describes_are_refused(tmp_path: Path) -> None:
    layers = (MIXTRAL.pattern[0], MIXTRAL.pattern[0].varied(window=None))
    with pytest.raises(BadInput, match="mixtral has layers that differ, which no GGUF file describes: use"):
        write_random_model(replace(MIXTRAL, pattern=layers), tmp_path / "model.gguf")
    with pytest.raises(BadInput, match="gpt-oss has layers that differ, which no GGUF file describes: use"):
        write_random_model(GPT_OSS_FILE.varied(window=4), tmp_path / "model.gguf")
    with pytest.raises(
        BadInput, match=r"gpt-oss has experts with .* limit=0\.01\), and GGUF files .* limit=7\.0"
    ):
        write_random_model(GPT_OSS, tmp_path / "model.gguf")
    whole_pairs = GPT_OSS_FILE.varied(
        rotary=Rotary(scaling=Yarn(factor=4.0, original_max_position_embeddings=16))
    )
    said = (
        r"^no GGUF file of the family mixtral has layers as those of mixtral: use layers that the family has$"
    )
    for other in (MIXTRAL.varied(qk_norm="head"), MIXTRAL.varied(norm="layer")):
        with pytest.raises(BadInput, match=said):
            write_random_model(other, tmp_path / "model.gguf")
    with pytest.raises(
        BadInput, match="GGUF files with a rotation scaled by yarn, truncate=True are not written"
    ):
        write_random_model(whole_pairs, tmp_path / "model.gguf")
    assert not [*tmp_path.iterdir()]
