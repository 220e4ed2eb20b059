"""Types and names of tensors of GGUF files are those of llama.cpp's package."""

from __future__ import annotations

import re

import gguf

from moesched.models.gguf.families import GGUF_FAMILIES
from moesched.models.gguf.tensor_names import as_in_gguf, gguf_tensors
from moesched.models.gguf.types import TENSOR_TYPES
from moesched.models.shapes import SHAPES


def test_types_of_tensors_are_those_of_llama_cpp() -> None:
    assert {(number, each.block, each.block_bytes) for number, each in TENSOR_TYPES.items()} == {
        (int(kind), *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()
    }
    assert all(each.name == gguf.GGMLQuantizationType(number).name for number, each in TENSOR_TYPES.items())


def test_names_of_tensors_are_those_of_llama_cpp() -> None:
    for name, family in GGUF_FAMILIES.items():
        architecture = next(each for each, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
        theirs = {gguf.TENSOR_NAMES[each].replace("{bid}.", "") for each in gguf.MODEL_TENSORS[architecture]}
        config = as_in_gguf(next(each for each in SHAPES.values() if each.form in family.forms).cut(1))
        ours = {re.sub(r"^blk\.0\.|\.(weight|bias)$", "", each.name) for each in gguf_tensors(family, config)}
        assert ours <= {each.removeprefix("blk.") for each in theirs}
