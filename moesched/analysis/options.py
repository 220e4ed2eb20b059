"""Holds the options of `roofline_of` and `latencies_of`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated

from moesched.inputs.options import SIZES, DTypeOptions, MachineOptions, ModelOptions
from moesched.options import Option

if TYPE_CHECKING:
    from moesched.machines import Machine
LARGEST_BATCH = (1 << 40) - 1
MOST_TOKENS = 1 << 20


class ShapeOnMachine(MachineOptions, ModelOptions):
    """Options that name a machine, and a model of which only the sizes are needed, not the weights."""

    machine: Machine | str = field(kw_only=False)


class RooflineOptions(ShapeOnMachine):
    """The options of `roofline_of`; their defaults are the values in MoE-Lightning's Figs. 4 and 5."""

    kv_dtypes: Annotated[
        Sequence[str],
        Option(
            "Number format of the KV cache: float16, int8, int4 and others; repeatable. By default the model's, and "
            "int4.",
            "D",
            flag="--kv-dtype",
        ),
    ] = ()
    context: Annotated[
        int | None,
        Option(
            "Tokens in the KV cache of each request. By default 512, or the model's longest context if that is less.",
            "N",
            group=SIZES,
            ge=1,
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        Option("Requests in a batch. By default 32, 512 and 4096.", "N", group=SIZES, ge=1, le=LARGEST_BATCH),
    ] = None
    micro_batch_size: Annotated[int, Option("Requests that share a kernel.", "N", group=SIZES, ge=1)] = 128


class LatencyOptions(DTypeOptions, ShapeOnMachine):
    """The options of `latencies_of`."""

    tokens: Annotated[
        Sequence[int],
        Option("Number of tokens of an expert; repeatable. By default 1 to 1024.", "N", ge=1, le=MOST_TOKENS),
    ] = ()
