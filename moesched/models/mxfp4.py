"""MXFP4 weights as in gpt-oss's files: one tensor has the codes of a matrix, another the scales of its groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.headers import Entry, FoundTensor
from moesched.models.stored_formats import STORED_FORMATS

MXFP4 = STORED_FORMATS["mxfp4"]
CODES, SCALES = "_blocks", "_scales"
"""Endings of the names of the tensor with a matrix's codes and of the one with its scales."""
CODE_BYTES = MXFP4.block_bytes - 1
"""Bytes of the codes of a group: each byte has the 4-bit codes of two neighbouring weights."""
REMEDY = "copy the checkpoint again from where it came from"


def with_experts_in_mxfp4(config: ModelConfig) -> ModelConfig:
    """Return a copy of the configuration whose experts have matrices in MXFP4, stored as (outputs, inputs)."""
    plain = config.varied(transposed_down=False)
    matrices = [name for name, shape in plain.routed.expert_shapes(plain.hidden).items() if MXFP4.fits(shape)]
    formats = tuple((f"experts.{name}", MXFP4.name) for name in sorted(matrices))
    return replace(plain, pattern=tuple(replace(layer, formats=formats) for layer in plain.pattern))


def join_codes_and_scales(tensors: Iterable[FoundTensor]) -> Iterator[FoundTensor]:
    """Yield the tensors of files, with each pair of a tensor of codes and one of scales joined to one MXFP4 tensor.

    Raises:
        BadInput: one of a pair is missing, or their shapes do not match.
    """
    pairs: dict[str, dict[str, FoundTensor]] = {}
    for found in tensors:
        ending = next((each for each in (CODES, SCALES) if found.name.endswith(each)), None)
        if ending is None:
            yield found
        else:
            pairs.setdefault(found.name.removesuffix(ending), {})[ending] = found
    for name, pair in pairs.items():
        if len(pair) == 1:
            [alone] = pair.values()
            missing = name + (SCALES if CODES in pair else CODES)
            raise BadInput(f"{alone.file}: {alone.name} is there, and {missing} is not; {REMEDY}")
        yield _joined(name, pair[CODES], pair[SCALES])


def _joined(name: str, codes: FoundTensor, scales: FoundTensor) -> FoundTensor:
    *outer, groups = scales.entry.shape
    wanted = (*scales.entry.shape, CODE_BYTES)
    if codes.entry.shape != wanted or (codes.entry.dtype, scales.entry.dtype) != ("U8", "U8"):
        raise BadInput(
            f"{codes.file}: {codes.name} is {codes.entry.dtype} of shape {list(codes.entry.shape)}, and "
            f"{scales.name} {scales.entry.dtype} of shape {list(scales.entry.shape)}, for which it is U8 of shape "
            f"{list(wanted)}; {REMEDY}"
        )
    entry = Entry("U8", (*outer, groups * MXFP4.block_bytes), codes.entry.data_offsets)
    return FoundTensor(codes.file, name, entry, codes.data_start, scales)
