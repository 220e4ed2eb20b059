"""Headers of GGUF files: whatever is wrong with one is said in one line, before memory is taken for it."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_headers import (
    TOKENS,
    Change,
    Header,
    Tensor,
    gpt_oss,
    key,
    mixtral,
    number,
    numbers,
    real,
    string,
    text,
    texts,
)
from moesched.errors import BadInput
from moesched.models.checkpoint import open_checkpoint
from moesched.models.coded_models import with_formats
from moesched.models.gguf.header import read_gguf_header
from moesched.models.reading import read_config
from moesched.models.rotary import Linear, Yarn
from moesched.models.shapes import SHAPES
from moesched.models.stored_formats import CODED, STORED_FORMATS
from stored_checkpoints import assert_complete

HUGE = 1 << 60
NORM, ROUTER, GATES = "blk.0.attn_norm.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_exps.weight"
EMBEDDING = "token_embd.weight"


def attribute(**changes: Any) -> Change:
    def change(header: Header) -> None:
        for name, value in changes.items():
            setattr(header, name, value)

    return change


def tensor(name: str, **changes: Any) -> Change:
    def change(header: Header) -> None:
        for attribute, value in changes.items():
            setattr(header.tensor(name), attribute, value)

    return change


def more(*tensors: Tensor) -> Change:
    return lambda header: header.tensors.extend(tensors)


def without(name: str) -> Change:
    return lambda header: header.tensors.remove(header.tensor(name))


def again(name: str) -> Change:
    return lambda header: header.keys.append((name, number(1)))


def text_of_key(value: bytes) -> Change:
    def change(header: Header) -> None:
        header.begin += struct.pack("<QQ", 1, 1) + value
        header.keys, header.tensors = [], []

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    # the beginning
    "another file": (attribute(begin=b"PK\3\4\0\0\0\0"), "is not a GGUF file: it does not begin with GGUF"),
    "version 1": (attribute(begin=b"GGUF\1\0\0\0"), "is of GGUF version 1: convert it to version 3"),
    "big-endian": (attribute(begin=b"GGUF\0\0\0\3"), "is big-endian: convert it to version 3, little-endian"),
    "2^60 tensors": (attribute(count=HUGE), "it has 1,152,921,504,606,846,976 tensors, no model has more"),
    "2^60 keys": (attribute(key_count=HUGE), "its metadata: they have 1,152,921,504,606,846,976 keys"),
    # metadata
    "a key of 2^60 bytes": (text_of_key(text("a", HUGE)), "key 1 of its metadata: it has a text of 1,152,9"),
    "a key beyond the end": (text_of_key(text("a", 9_000)), "key 1 .*: the file is truncated: it has .* needs"),
    "a text of 2^60 bytes": (key("general.name", string("a", HUGE)), "'general.name': it has a text of 1,152,9"),
    "a text beyond the end": (
        key("general.name", string("a", 1_000_000)),
        "'general.name': the file is truncated: it has",
    ),
    "a template of 10 MB": (
        key("tokenizer.chat_template", string("a" * 10_000_000)),
        "'tokenizer.chat_template': it has a text of 10,000,000 bytes, which no real file has",
    ),
    "a text that is not UTF-8": (
        key("general.name", string(b"\xff")),
        "'general.name': it has a text that is not UTF-8",
    ),
    "a key that acts on the terminal": (key("\x1b[2J", number(1)), r"its name '\\x1b\[2J' cannot be shown"),
    "a key twice": (again("llama.block_count"), "'llama.block_count': its metadata have this key twice"),
    "an array of 2^60 texts": (key(TOKENS, texts(["a"], HUGE)), f"'{TOKENS}': it is an array of 1,152,9.* items"),
    "an array of 2^60 numbers": (key(TOKENS, numbers([1], HUGE)), f"'{TOKENS}': it is an array of 1,152,9.* items"),
    "an array beyond the end": (key(TOKENS, numbers([1], 1_000_000)), f"'{TOKENS}': the file is truncated"),
    "an array of arrays": (key(TOKENS, struct.pack("<IIQ", 9, 9, 1)), f"'{TOKENS}': its value is of type 9"),
    "an unknown type of value": (key("a", struct.pack("<I", 77)), "'a': its value is of type 77, which is unknown"),
    "alignment 0": (key("general.alignment", number(0)), "general.alignment is 0, and must be a power of two"),
    "alignment 24": (key("general.alignment", number(24)), "general.alignment is 24, and must be a power of two"),
    # tensors
    "an unknown type of tensor": (tensor(NORM, kind=77), f"'{NORM}': it is of type 77, which is unknown"),
    "a type without kernels": (
        lambda header: header.tensors.__setitem__(2, Tensor("output.weight", [256, 6], kind=10)),
        "output.weight is of type Q2_K, which no kernel reads: did you mean Q._K",
    ),
    "rows that are no whole blocks": (
        tensor(GATES, kind=8),
        f"'{GATES}': its rows have 8 weights, and blocks of Q8_0 have 32",
    ),
    "no dimensions": (tensor(NORM, lengths=[]), f"'{NORM}': it has 0 dimensions, and may have 1 to 4"),
    "5 dimensions": (tensor(NORM, lengths=[1] * 5), f"'{NORM}': it has 5 dimensions"),
    "a dimension of 0": (tensor(NORM, lengths=[0]), rf"'{NORM}': its dimensions are \[0\], and must be positive"),
    "a dimension of 2^60": (tensor(NORM, lengths=[HUGE]), f"'{NORM}': the file is truncated: it has|overlaps"),
    "a tensor twice": (more(Tensor(NORM, [8])), f"'{NORM}': the file has this tensor twice"),
    "a tensor over another": (tensor(NORM, offset=0), "it overlaps "),
    "a tensor at an odd place": (
        tensor(NORM, offset=33),
        f"'{NORM}': it begins at byte 33 of the weights, no multiple of 32",
    ),
    "a tensor past the end": (attribute(missing=1), "'blk.0.ffn_up_exps.weight': the file is truncated: it has"),
    "a name of two lines": (more(Tensor("a\nb", [8])), r"its name 'a\\nb' cannot be shown"),
    # the model
    "no architecture": (key("general.architecture", None), "no device has kernels for general.architecture None: use"),
    "an unknown architecture": (
        key("general.architecture", string("qwen3moee")),
        "general.architecture 'qwen3moee': did you mean qwen3moe?",
    ),
    "a size that is text": (
        key("llama.block_count", string("1")),
        "llama: Expected `int`, got '1' - at `.*block_count",
    ),
    "a missing size": (key("llama.block_count", None), "llama: .*missing required field `block_count`"),
    "a missing key of the family": (
        key("llama.feed_forward_length", None),
        r"model\.gguf has no key llama\.feed_forward_length; copy the file",
    ),
    "no layers": (key("llama.block_count", number(0)), "layers is 0, but it must be positive"),
    "4 billion layers": (key("llama.block_count", number(2**32 - 1)), "layers is 4294967295, but it may be"),
    "100,000 experts": (
        key("llama.expert_count", number(100_000)),
        "its header describes 1 layers with 100,000 experts",
    ),
    "more layers than tensors": (key("llama.block_count", number(2)), "lacks 16 of the model's tensors"),
    "another width": (key("llama.embedding_length", number(12)), r"has shape \[6, 8\], its header says \[6, 12\]"),
    "an epsilon that is no number": (
        key("llama.attention.layer_norm_rms_epsilon", real(float("nan"))),
        "norm_eps is nan, but float32 overflows or loses it",
    ),
    "an unknown scaling of rotations": (
        key("llama.rope.scaling.type", string("yarm")),
        "rope.scaling.type is 'yarm', which is not supported: .*yarn",
    ),
    "a scaling without its factor": (
        key("llama.rope.scaling.type", string("yarn")),
        r"has rope\.scaling\.type yarn and no rope\.scaling\.factor; copy the file",
    ),
    "rotations that scale without a type": (
        key("llama.rope.scaling.attn_factor", real(1.2)),
        r"rope.scaling.attn_factor is 1\.2.*not supported",
    ),
    "factors of rotations for other heads": (
        more(Tensor("rope_freqs.weight", [3])),
        r"rope_freqs.weight is \[3\] of type F32, and \[2\] of type F32 is needed",
    ),
    "factors of rotations that are 0": (
        more(Tensor("rope_freqs.weight", [2])),
        r"entry 0 of rope_freqs\.weight is 0, but it must be positive",
    ),
    "rotations of a part": (key("llama.rope.dimension_count", number(2)), "llama.rope.dimension_count is 2"),
    "an unknown tensor": (
        more(Tensor("blk.0.ffn_gate_shexp.weight", [8, 6])),
        "ffn_gate_shexp.weight is no tensor of a model",
    ),
    "a bias": (more(Tensor("blk.0.attn_q.bias", [8])), "attn_q.bias is a bias; use a checkpoint without biases"),
    "a missing tensor": (without(ROUTER), "lacks 1 of the model's tensors, layers.0.router"),
    "no weights": (attribute(tensors=[]), f"has no {EMBEDDING} of two dimensions: give a file"),
    "embeddings of one dimension": (
        tensor(EMBEDDING, lengths=[8]),
        f"has no {EMBEDDING} of two dimensions: give a file",
    ),
    "another shape": (tensor(ROUTER, lengths=[8, 4]), rf"{ROUTER} has shape \[4, 8\], its header says \[3, 8\]"),
    "a vocabulary of another size": (
        key("llama.vocab_size", number(7)),
        f"vocab_size says 7 tokens, and {EMBEDDING} has 6 rows",
    ),
    "scores of other tokens": (key(TOKENS, texts(["a"] * 5)), "scores has 6 entries for 5 tokens"),
    "tokens of another size": (
        tensor(EMBEDDING, lengths=[8, 7]),
        f"{TOKENS} says 6 tokens, and {EMBEDDING} has 7 rows",
    ),
    "types of other tokens": (
        key("tokenizer.ggml.token_type", numbers([1] * 4)),
        "token_type has 4 entries for 6 tokens",
    ),
    "an end that is no token": (
        key("tokenizer.ggml.eos_token_id", number(6)),
        "eos_token_id is 6, and there are 6 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("broken", REFUSED.values(), ids=REFUSED)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(
    broken: tuple[Change, str], tmp_path: Path
) -> None:
    change, said = broken
    header = mixtral()
    change(header)
    file = header.write(tmp_path / "model.gguf")
    with pytest.raises(BadInput) as error:
        open_checkpoint(file)
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)
    assert re.search(said, str(error.value))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            without("blk.1.attn_sinks.weight"),
            "lacks 1 of the model's tensors, layers.1.sinks the first; copy",
        ),
        (
            tensor("blk.0.ffn_up_exps.bias", lengths=[33, 3]),
            r"has shape \[3, 33\], its header says \[3, 32\]",
        ),
        (
            tensor("blk.0.attn_q.bias", kind=8),
            "attn_q.bias is of type Q8_0, and norms, biases and routers have",
        ),
        (
            key("gpt-oss.rope.scaling.type", string("yarm")),
            r"is 'yarm', which is not supported: did you mean yarn\?",
        ),
        (key("gpt-oss.rope.scaling.factor", real(math.inf)), "factor"),
        (key("gpt-oss.attention.sliding_window", number(0)), "sliding_window"),
        (
            key("gpt-oss.rope.freq_base_swa", real(5e5)),
            "gpt-oss.rope.freq_base_swa is 500000.0, which is not",
        ),
    ],
)
def test_a_gpt_oss_that_cannot_be_used_is_refused_in_one_line(
    change: Change, said: str, tmp_path: Path
) -> None:
    header = gpt_oss()
    change(header)
    with pytest.raises(BadInput, match=f"^[^\n]*{said}[^\n]*$"):
        open_checkpoint(header.write(tmp_path / "model.gguf"))


def test_every_other_layer_of_a_gpt_oss_has_its_window_and_only_some_are_scaled(tmp_path: Path) -> None:
    header = gpt_oss()
    config = read_config(header.write(tmp_path / "scaled.gguf"))
    assert [layer.grouped.window for layer in config.pattern] == [4, None]
    assert config.attention.rotary.scaling == Yarn(
        factor=4.0, truncate=False, original_max_position_embeddings=16
    )
    header.set("gpt-oss.rope.scaling.type", string("none"))
    assert read_config(header.write(tmp_path / "plain.gguf")).attention.rotary.scaling is None


@pytest.mark.parametrize("rotates", [True, False])
def test_a_granite_that_rotates_no_queries_is_refused(rotates: bool, tmp_path: Path) -> None:
    header = mixtral()
    header.keys = [(name.replace("llama.", "granitemoe."), value) for name, value in header.keys]
    header.set("general.architecture", string("granitemoe"))
    header.set("granitemoe.rope.scaling.finetuned", struct.pack("<IB", 7, rotates))
    file = header.write(tmp_path / "model.gguf")
    if rotates:
        assert read_config(file).form == "granite_moe"
    else:
        with pytest.raises(
            BadInput, match=r"granitemoe\.rope\.scaling\.finetuned is False, which is not supported"
        ):
            read_config(file)


@pytest.mark.parametrize(("name", "factor"), [("rope.scaling.factor", 4.0), ("rope.scale_linear", 2.0)])
def test_a_factor_without_a_type_scales_rotations_as_linear(name: str, factor: float, tmp_path: Path) -> None:
    for header, family in ((mixtral(), "llama"), (gpt_oss(), "gpt-oss")):
        header.set(f"{family}.rope.scaling.type", None)
        header.set(f"{family}.rope.scaling.factor", None)
        header.set(f"{family}.{name}", real(factor))
        path = header.write(tmp_path / f"{family}.gguf")
        assert read_config(path).attention.rotary.scaling == Linear(factor=factor)
        header.set(f"{family}.{name}", real(0.0))
        assert read_config(header.write(path)).attention.rotary.scaling is None


def test_a_file_of_each_version_is_read(tmp_path: Path) -> None:
    for version in (2, 3):
        header = mixtral()
        header.begin = b"GGUF" + struct.pack("<I", version)
        checkpoint = open_checkpoint(header.write(tmp_path / "model.gguf"))
        assert_complete(checkpoint)
        assert checkpoint.config.norm_eps == 1e-5
        assert checkpoint.config.stop_tokens == (2,)
        assert checkpoint.config.name == "model"


def test_experts_may_have_tensors_of_their_own(tmp_path: Path) -> None:
    header = mixtral()
    stacked = [each for each in header.tensors if "_exps" in each.name]
    header.tensors = [each for each in header.tensors if each not in stacked] + [
        Tensor(each.name.replace("_exps", f".{expert}"), each.lengths[:2])
        for each in stacked
        for expert in range(3)
    ]
    assert_complete(open_checkpoint(header.write(tmp_path / "model.gguf")))


def test_experts_of_a_layer_are_alike() -> None:
    stored = {f"layers.0.experts.{number}.up": STORED_FORMATS[name] for number, name in enumerate(CODED[:2])}
    with pytest.raises(BadInput, match=f"up is in {CODED[1]}, and that of another expert in {CODED[0]}: use"):
        with_formats(SHAPES["mixtral-0.8b"], stored)


LETTERS = st.text("abc.é😀", min_size=1, max_size=9)
VALUES = st.one_of(
    st.tuples(st.just(gguf.GGUFValueType.UINT32), st.integers(0, 2**32 - 1)),
    st.tuples(st.just(gguf.GGUFValueType.INT64), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(
        st.just(gguf.GGUFValueType.FLOAT32), st.floats(allow_nan=False, allow_infinity=False, width=32)
    ),
    st.tuples(st.just(gguf.GGUFValueType.FLOAT64), st.floats(allow_nan=False)),
    st.tuples(st.just(gguf.GGUFValueType.BOOL), st.booleans()),
    st.tuples(st.just(gguf.GGUFValueType.STRING), LETTERS),
    st.tuples(st.just(gguf.GGUFValueType.ARRAY), st.lists(LETTERS, min_size=1)),
    st.tuples(st.just(gguf.GGUFValueType.ARRAY), st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1)),
)


@given(values=st.dictionaries(LETTERS, VALUES))
def test_metadata_are_read_as_llama_cpps_package_writes_them(
    values: dict[str, tuple[gguf.GGUFValueType, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("metadata") / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    for name, (kind, value) in values.items():
        writer.add_key_value(name, value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    read = read_gguf_header(file).metadata
    assert read.pop("general.architecture") == "llama"
    assert read.keys() == values.keys()
    for name, (kind, value) in values.items():
        found = read[name]
        if kind == gguf.GGUFValueType.FLOAT32:
            assert struct.pack("<f", found) == struct.pack("<f", value)
        else:
            assert found == (tuple(value) if isinstance(value, list) else value)


def test_a_part_of_a_split_model_is_named_that_is_missing_or_of_another_one(tmp_path: Path) -> None:
    def part(number_of_it: int, of: int, header: Header, name: str) -> Path:
        for name_of_key, value in (
            ("split.no", number_of_it),
            ("split.count", of),
            ("split.tensors.count", 13),
        ):
            header.set(name_of_key, number(value))
        return header.write(tmp_path / name)

    first, second = mixtral(), mixtral()
    first.tensors, second.tensors, second.keys = first.tensors[:6], second.tensors[6:], []
    names = [f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    file = part(0, 2, first, names[0])
    with pytest.raises(BadInput, match=rf"cannot read weights .*{names[1]}: No such file"):
        open_checkpoint(file)
    part(1, 2, second, names[1])
    assert_complete(open_checkpoint(file))
    part(1, 3, second, names[1])
    with pytest.raises(
        BadInput, match=r"is part 1 of 3, counted from 0, and by its name part 1 of 2: copy all"
    ):
        open_checkpoint(file)
    second.tensors = mixtral().tensors[5:]
    part(1, 2, second, names[1])
    with pytest.raises(BadInput, match=r"both have 'blk.0.attn_k.weight': copy all parts of one model"):
        open_checkpoint(file)
    second.tensors = mixtral().tensors[7:]
    part(1, 2, second, names[1])
    with pytest.raises(BadInput, match="its 2 parts have 12 tensors, and the model has 13: copy all"):
        open_checkpoint(file)
    renamed = part(0, 2, first, "renamed.gguf")
    with pytest.raises(
        BadInput, match=r"is part 0 of 2, .* and by its name the first of 1: give the parts the names"
    ):
        open_checkpoint(renamed)
