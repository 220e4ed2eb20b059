"""What the Hierarchical Roofline Model says of a model on a machine: what MoE-Lightning's Figs. 4 and 5 show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from moesched.analysis import hrm
from moesched.analysis.hrm import Bound, Hierarchy, Intensity, LayerTime, Split
from moesched.errors import BadInput
from moesched.inputs.lookup import find_machine, find_shape
from moesched.machines import Machine
from moesched.models.config import ModelConfig
from moesched.models.operations import Operations

CONTEXT = 512
"""Tokens in the cache: those of Fig. 4."""
MICRO_BATCH_SIZE = 128
"""Requests: those of Fig. 5."""
BATCH_SIZES = (32, 512, 4096)
SECOND_KV_DTYPE = "int4"


class Computation(msgspec.Struct, frozen=True, kw_only=True):
    """One computation of a layer's decode step, and what bounds it.

    Attributes:
        block: "attention" or "ffn".
        variant: what it is drawn for, such as "int4" or "N = 512".
        intensity: FLOP/byte.
        first_turning_point, second_turning_point, balance_point: FLOP/byte of the lower level (Eqs. 9 to 11).
        fetched: on the upper level, its data coming from the lower one (Eq. 7).
        in_place: on the lower level (Eq. 8); None where nothing computes there.
        better: the level where it is faster.
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
    """A model on a machine.

    Attributes:
        context: tokens in the cache of each request.
        micro_batch_size: of the FFN.
        attention: by dtype of the KV cache. ffn: by batch size, ascending.
        upper_ffn: FFN of a whole micro-batch whose weights the upper level holds (Eq. 8).
        batch_at_first_turning_point: from which the FFN's weights are worth fetching; None where no batch is enough.
        batch_at_second_turning_point: from which the link no longer binds the FFN.
        split: of the layer below: the largest batch, attention where the cache lies unless nothing computes there.
        layer: seconds that one layer keeps the link and the levels busy (Eqs. 12 to 14).
        layer_seconds: the longest of them. bound_by: which one it is.
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


def roofline_of(
    model: Path | str,
    machine: Machine | str,
    *,
    kv_dtypes: Sequence[str] = (),
    context: int = CONTEXT,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
) -> RooflineReport:
    """What bounds attention and FFN of a model's decode steps on a machine (MoE-Lightning, section 3).

    Args:
        model: a shape's name, as `moesched list models` prints it, or a folder with a config.json.
        kv_dtypes: of the KV cache; by default what the model computes in, and int4.
        context: tokens in the cache of each request.
        batch_size: by default a small, a middling and a large one.
        micro_batch_size: by default 128.

    Raises:
        BadInput: model or machine are not there, a size is no size, or the machine lacks what it takes.
    """
    config = find_shape(model)
    described = find_machine(machine)
    micro_batch_size = MICRO_BATCH_SIZE if micro_batch_size is None else micro_batch_size
    batch_sizes = BATCH_SIZES if batch_size is None else (batch_size,)
    kv_dtypes = tuple(dict.fromkeys(kv_dtypes or (config.dtype, SECOND_KV_DTYPE)))
    _check(config, kv_dtypes, context, batch_sizes, micro_batch_size)
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
    """The paper's own setting; where nothing computes below, the cache stays in the upper memory."""
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


def _check(
    config: ModelConfig,
    kv_dtypes: Sequence[str],
    context: int,
    batch_sizes: Sequence[int],
    micro_batch_size: int,
) -> None:
    for kv_dtype in kv_dtypes:
        if kv_dtype not in hrm.KV_BYTES:
            raise BadInput(f"--kv-dtype {kv_dtype!r} is unknown; choose one of {', '.join(hrm.KV_BYTES)}")
    sizes = {
        "--context": context,
        "--batch-size": min(batch_sizes),
        "--micro-batch-size": micro_batch_size,
    }
    for name, size in sizes.items():
        if size < 1:
            raise BadInput(f"{name} is {size}: give at least 1")
    if max(batch_sizes) >= hrm.LARGEST_BATCH:
        raise BadInput(f"--batch-size is {max(batch_sizes)}: give less than {hrm.LARGEST_BATCH}")
    if context > config.max_positions:
        raise BadInput(f"--context is {context}, but {config.name} has {config.max_positions} positions")
