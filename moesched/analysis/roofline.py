"""Computes the Hierarchical Roofline Model of a model on a machine: the figures of MoE-Lightning's Figs. 4 and 5."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moesched.analysis import hrm
from moesched.analysis.hrm import Bound, Hierarchy, Intensity, LayerTime, Split
from moesched.analysis.options import RooflineOptions
from moesched.errors import BadInput
from moesched.inputs.lookup import find_machine, find_shape
from moesched.keywords import takes
from moesched.models.config import ModelConfig
from moesched.models.operations import Operations

BATCH_SIZES = (32, 512, 4096)
SECOND_KV_DTYPE = "int4"
CONTEXT = 512


class Computation(msgspec.Struct, frozen=True, kw_only=True):
    """One computation of a layer's decode step, and its bounds.

    Attributes:
        block: "attention" or "ffn".
        variant: label in the picture, such as "int4" or "N = 512".
        intensity: FLOPs per byte accessed in the memory of the upper level (the accelerator), and in that of the lower
            level (the host, or a disk).
        first_turning_point: FLOP per byte of the lower memory up to which fetching its data never pays (Eq. 9 of
            MoE-Lightning, as the equations below).
        second_turning_point: FLOP per byte of the lower memory above which the link is no limit (Eq. 10).
        balance_point: FLOP per byte of the lower memory at which link and upper memory limit equally (Eq. 11).
        fetched: bound in FLOP/s on the upper level, with data from the lower level (Eq. 7).
        in_place: bound in FLOP/s on the lower level (Eq. 8); None if the lower level has no processor.
        better: name of the memory of the level that computes faster.
    """

    block: str
    variant: str
    intensity: Intensity
    first_turning_point: float
    second_turning_point: float
    balance_point: float | None
    fetched: Bound
    in_place: Bound | None
    better: str


class RooflineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Hierarchical roofline of a model on a machine.

    Attributes:
        context: tokens in the cache of each request.
        micro_batch_size: requests per FFN kernel.
        attention: one computation for each dtype of the KV cache.
        ffn: one computation for each batch size, ascending.
        upper_ffn: bound in FLOP/s of a micro-batch's FFN, with its weights in the upper memory (Eq. 8).
        batch_at_first_turning_point: the smallest batch for which fetching the FFN's weights can be faster than
            computing on the lower level; None if there is none.
        batch_at_second_turning_point: the smallest batch for which the link no longer bounds the FFN; None if there is
            none.
        split: division of a layer's work between the levels, for the largest batch: the lower level computes attention
            if it has a processor, and the upper level all else.
        layer: busy seconds of the link and of each level for one layer, with the division in `split` (Eqs. 12 to 14).
        layer_seconds: the longest of the times in `layer`.
        bound_by: name of the link or level with the longest time in `layer`.
    """

    model: str
    machine: str
    dtype: str
    context: int
    micro_batch_size: int
    hierarchy: Hierarchy
    attention: tuple[Computation, ...]
    ffn: tuple[Computation, ...]
    upper_ffn: Bound
    batch_at_first_turning_point: int | None
    batch_at_second_turning_point: int | None
    split: Split
    layer: LayerTime
    layer_seconds: float
    bound_by: str


@takes(RooflineOptions)
def roofline_of(given: RooflineOptions) -> RooflineReport:
    """Compute the bounds of attention and FFN in decode steps of a model on a machine (MoE-Lightning, section 3).

    Raises:
        BadInput: the model or machine is unknown, a size is invalid, or the machine's description is insufficient.
    """
    config = find_shape(given.model)
    described = find_machine(given.machine)
    context = given.context or min(CONTEXT, config.max_positions)
    micro_batch_size = given.micro_batch_size
    batch_sizes = BATCH_SIZES if given.batch_size is None else (given.batch_size,)
    kv_dtypes = tuple(dict.fromkeys(given.kv_dtypes or (config.dtype, SECOND_KV_DTYPE)))
    _check(config, kv_dtypes, context)
    operations = Operations(config, config.dtype)
    hierarchy = hrm.hierarchy_of(described, config.dtype)
    upper_ffn = hrm.ffn_intensity(operations, micro_batch_size, micro_batch_size).upper
    split = _split(hierarchy, max(batch_sizes), micro_batch_size)
    layer = hrm.layer_time(hierarchy, operations, split, context, kv_dtypes[0])
    return RooflineReport(
        model=config.name,
        machine=described.name,
        dtype=config.dtype,
        context=context,
        micro_batch_size=micro_batch_size,
        hierarchy=hierarchy,
        attention=tuple(
            _computation(hierarchy, "attention", kv, hrm.attention_intensity(operations, context, kv))
            for kv in kv_dtypes
        ),
        ffn=tuple(
            _computation(
                hierarchy, "ffn", f"N = {batch}", hrm.ffn_intensity(operations, batch, micro_batch_size)
            )
            for batch in batch_sizes
        ),
        upper_ffn=hrm.in_place(hierarchy.upper, upper_ffn),
        batch_at_first_turning_point=hrm.batch_reaching(operations, hrm.first_turning_point(hierarchy)),
        batch_at_second_turning_point=hrm.batch_reaching(
            operations, hrm.second_turning_point(hierarchy, upper_ffn)
        ),
        split=split,
        layer=layer,
        layer_seconds=layer.seconds,
        bound_by=_longest(hierarchy, layer),
    )


def _computation(hierarchy: Hierarchy, block: str, variant: str, intensity: Intensity) -> Computation:
    lower = hierarchy.lower
    fetching = hrm.pays_to_fetch(hierarchy, intensity)
    return Computation(
        block=block,
        variant=variant,
        intensity=intensity,
        first_turning_point=hrm.first_turning_point(hierarchy),
        second_turning_point=hrm.second_turning_point(hierarchy, intensity.upper),
        balance_point=hrm.balance_point(hierarchy, intensity.upper),
        fetched=hrm.fetched(hierarchy, intensity),
        in_place=hrm.in_place(lower, intensity.lower) if lower.peak else None,
        better=(hierarchy.upper if fetching else lower).name,
    )


def _split(hierarchy: Hierarchy, batch_size: int, micro_batch_size: int) -> Split:
    """Divide a layer's work between the two levels of the hierarchical roofline model.

    The lower level (such as the host) computes attention if it has a processor, and the upper level (such as the GPU)
    all else. If the lower level has no processor, the KV cache stays in the upper memory.

    Args:
        batch_size, micro_batch_size: numbers of requests.
    """
    computes = hierarchy.lower.peak > 0
    return Split(
        batch_size=batch_size,
        micro_batch_size=min(micro_batch_size, batch_size),
        attention_on_gpu=not computes,
        kv_on_gpu=0.0 if computes else 1.0,
    )


def _longest(hierarchy: Hierarchy, layer: LayerTime) -> str:
    names = {
        hierarchy.link_name: layer.link,
        hierarchy.upper.name: layer.upper,
        hierarchy.lower.name: layer.lower,
    }
    return max(names, key=names.__getitem__)


def _check(config: ModelConfig, kv_dtypes: Sequence[str], context: int) -> None:
    for kv_dtype in kv_dtypes:
        if kv_dtype not in hrm.KV_BYTES:
            raise BadInput(f"--kv-dtype {kv_dtype!r} is unknown; choose one of {', '.join(hrm.KV_BYTES)}")
    if context > config.max_positions:
        raise BadInput(
            f"--context is {context}, but {config.name} has {config.max_positions} positions: give at most that"
        )
