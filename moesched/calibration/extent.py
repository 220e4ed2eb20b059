"""The two extents of a calibration: a quick one for bfloat16, and a thorough one for both dtypes."""

from __future__ import annotations

import msgspec

from moesched.models.config import DType, ModelConfig
from moesched.models.shapes import SHAPES


class OperationExtent(msgspec.Struct, frozen=True, kw_only=True):
    """Operations that are timed by themselves.

    Attributes:
        rounds: how often each is measured; the median counts.
        seconds: the time for each, in each round.
        rows, matrices: of products; a matrix is (outputs, inputs).
        copies, reads, stream, scratch: bytes.
        pieces: reads at a time, as in a transfer of several pages.
    """

    rounds: int = 3
    seconds: float = 0.025
    rows: tuple[int, ...] = (1, 8, 64, 256)
    matrices: tuple[tuple[int, int], ...] = ((640, 1536), (1920, 2560))
    copies: tuple[int, ...] = (1 << 14, 1 << 20, 1 << 24)
    reads: tuple[int, ...] = tuple(1 << power for power in (16, 18, 20, 22, 24, 25))
    pieces: tuple[int, ...] = (1, 2, 8)
    stream: int = 256 << 20
    scratch: int = 512 << 20


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one batch that the small models run.

    Attributes:
        groups: the prompt lengths of each micro-batch.
        host_attended: the micro-batches, by index in `groups`, whose attention runs on the host in some runs.
        long: more micro-batches, for the smallest model only.

    The first prompts of a length use memory that is new to the process; as in a batch, most do not. So long prompts are
    there several times.
    """

    groups: tuple[tuple[int, ...], ...]
    host_attended: tuple[int, ...]
    long: tuple[tuple[int, ...], ...] = ()


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of the small models in one dtype.

    Attributes:
        models: smallest first; costs are interpolated between their sizes.
        steps: steps of each run, prefill included.
        serial: runs of each model, one task after the other.
        fresh: the same, with weights that were fetched just before.
        together: runs with each overlap of tasks: with reads, those of every model; otherwise of the largest.
    """

    models: tuple[ModelConfig, ...]
    steps: int
    serial: int
    fresh: int
    together: int = 0


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a calibration measures.

    Attributes:
        name: the name of the extent in the machine's description.
        batches: of few and of many rows, since a device chooses its kernels, and how weights lie in memory, by the
            largest micro-batch of a batch.
        runs: by dtype; costs in the other dtypes are scaled from bfloat16.
        repeats: how many measurements may be repeated because other processes were busy.
    """

    name: str
    operations: OperationExtent
    batches: tuple[Prompts, ...]
    runs: dict[DType, Runs]
    repeats: int


def small_model(name: str, *, heads: int, **sizes: int) -> ModelConfig:
    """A shape of two layers to measure with.

    sizes: the others, by their names in `ModelConfig` and its layers.
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
"""Small experts whose layer of 83 MB does not stay in a cache between two micro-batches."""
LARGE = small_model(
    "calibration-large", hidden=1280, intermediate=2304, heads=16, head_dim=128, vocabulary=24_576
)
MIDDLE = small_model(
    "calibration-middle", hidden=1024, intermediate=2048, heads=16, head_dim=64, vocabulary=12_288
)
"""For float32, whose products go from one core to all of them between the sizes of the other two."""

THOROUGH = Extent(
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
        "bfloat16": Runs(models=(SMALL, LARGE), steps=9, serial=4, fresh=2, together=4),
        "float32": Runs(models=(SMALL, MIDDLE, LARGE), steps=5, serial=2, fresh=2),
    },
    repeats=12,
)
"""Three to four minutes on two cores."""

QUICK = Extent(
    name="quickly",
    operations=OperationExtent(
        rounds=2,
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
    runs={"bfloat16": Runs(models=(SMALL, LARGE), steps=3, serial=3, fresh=2, together=1)},
    repeats=2,
)
"""At most 40 seconds on two cores. The median of three serial runs ignores one that other programs slowed down."""
