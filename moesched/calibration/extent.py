"""Lists the measurements of a quick calibration, in bfloat16, and of a thorough one, in bfloat16 and float32."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from moesched.models.config import DType, ModelConfig
from moesched.models.shapes import SHAPES

CODED = ("q8_0", "q4_k", "q6_k", "mxfp4")
"""Coded storage formats whose products are timed; predictions for the others take the nearest of these."""


class OperationExtent(msgspec.Struct, frozen=True, kw_only=True):
    """Operations that are timed by themselves, without a model.

    Attributes:
        rounds: number of times that each operation is measured; the median counts.
        seconds: time to spend on each operation in each round.
        rows: numbers of rows in matrix products.
        matrices: (outputs, inputs) of the matrices in these products, by dtype. Float32 has no large matrix, since a
            product with a large coded (quantised) matrix takes a tenth of a second in float32.
        copies, reads: bytes of each copy and of each read from the disk.
        pieces: numbers of reads in one transfer.
        pauses: number of reads after a pause in each round.
        stream: bytes of a pass over memory.
        scratch: bytes of the file that is read.
    """

    rounds: int = 3
    seconds: float = 0.025
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 64, 256)
    matrices: Mapping[DType, tuple[tuple[int, int], ...]] = MappingProxyType(
        {
            "bfloat16": ((640, 1536), (1920, 2560), (8192, 2560)),
            "float32": ((640, 1536), (1920, 2560)),
        }
    )
    copies: tuple[int, ...] = (1 << 14, 1 << 20, 1 << 24)
    reads: tuple[int, ...] = tuple(1 << power for power in (16, 18, 20, 22, 24, 25))
    pieces: tuple[int, ...] = (1, 2, 8)
    pauses: int = 25
    stream: int = 256 << 20
    scratch: int = 512 << 20


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """One batch of prompts for the small models.

    Attributes:
        groups: for each micro-batch the lengths of its prompts, in tokens.
        host_attended: indices in `groups` of micro-batches whose attention runs on the host in some runs.
        long: further micro-batches in the form of `groups`, which only the smallest model runs. Each length occurs
            several times, as the first prompt of a length is slower: its memory is new to the process.
    """

    groups: tuple[tuple[int, ...], ...]
    host_attended: tuple[int, ...]
    long: tuple[tuple[int, ...], ...] = ()


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of the small models in one dtype; `Mode` in `moesched/calibration/exercise.py` explains the modes.

    Attributes:
        models: the models, smallest first; costs are interpolated between their sizes.
        steps: steps of each run, prefill included.
        resident: number of runs of each model in RESIDENT mode.
        serial: number of runs of each model in SERIAL mode, the baseline of the runs with overlap.
        fresh: number of runs of each model in FRESH mode.
        together: number of runs in each mode with overlap. STREAMING mode runs every model, ATTENDING and SHARING modes
            run the largest model only.
    """

    models: tuple[ModelConfig, ...]
    steps: int
    resident: int
    fresh: int
    serial: int = 0
    together: int = 0


class CalibrationExtent(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a calibration measures.

    Attributes:
        name: name of the extent in the machine's description.
        batches: one batch with small micro-batches and one with large ones. Both are needed, since the largest
            micro-batch of a batch decides which kernels a device uses, and how it orders weights in memory.
        runs: runs of the small models by dtype; costs in dtypes without runs are scaled from bfloat16.
        repeats: the largest number of measurements that may be repeated because other processes were busy.
    """

    name: str
    operations: OperationExtent
    batches: tuple[Prompts, ...]
    runs: dict[DType, Runs]
    repeats: int


def small_model(name: str, *, heads: int, **sizes: int) -> ModelConfig:
    """Return a model of two equal layers to measure with.

    Args:
        heads: number of attention heads.
        sizes: all other sizes of the model, by their names in `ModelConfig` and its layers.
    """
    kv_heads = heads // 4
    return SHAPES["mixtral-0.8b"].varied(
        2, name=name, heads=heads, kv_heads=kv_heads, max_positions=4096, stop_tokens=(), **sizes
    )


SMALL = small_model(
    "calibration-small",
    hidden=640,
    intermediate=448,
    heads=8,
    head_dim=64,
    vocabulary=6144,
    experts=48,
    top_k=6,
)
"""Model of small experts; its layer of 83 MB does not stay in a processor's cache between two micro-batches."""
LARGE = small_model(
    "calibration-large", hidden=1280, intermediate=2304, heads=16, head_dim=128, vocabulary=24_576
)
MIDDLE = small_model(
    "calibration-middle", hidden=1024, intermediate=2048, heads=16, head_dim=64, vocabulary=12_288
)
"""Model for float32: between the sizes of the other two models, products change from one core to all cores."""

THOROUGH = CalibrationExtent(
    name="thoroughly",
    operations=OperationExtent(),
    batches=(
        Prompts(groups=((5,), (5,) * 3, (5,) * 8, tuple(range(6, 22)), (5,) * 24), host_attended=(2, 3, 4)),
        Prompts(
            groups=((5,) * 24, (5,) * 80, (250, 251), (250, 251), (250, 251)),
            host_attended=(0, 2),
            long=((1500,), (1500,)),
        ),
    ),
    runs={
        "bfloat16": Runs(models=(SMALL, LARGE), steps=9, resident=4, fresh=2, serial=2, together=4),
        "float32": Runs(models=(SMALL, MIDDLE, LARGE), steps=5, resident=2, fresh=2),
    },
    repeats=12,
)
"""The thorough extent; it takes three to seven minutes on two cores."""

QUICK = CalibrationExtent(
    name="quickly",
    operations=OperationExtent(
        seconds=0.01,
        copies=(1 << 14, 1 << 24),
        reads=tuple(1 << power for power in (16, 20, 22, 24)),
        pieces=(1, 4),
        scratch=256 << 20,
    ),
    batches=(
        Prompts(groups=((5,), (5,) * 8, tuple(range(2, 14)), (2,) * 24), host_attended=(1, 2)),
        Prompts(
            groups=((2,) * 64, (100, 101), (100, 101), (100, 101)),
            host_attended=(1,),
            long=((1000,), (1000,)),
        ),
    ),
    runs={"bfloat16": Runs(models=(SMALL, LARGE), steps=4, resident=3, fresh=2, serial=1, together=1)},
    repeats=2,
)
"""The quick extent: at most 40 seconds on two cores. The median of three rounds or runs ignores a disturbed one."""
