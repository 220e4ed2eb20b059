"""Conformance suite of kernels: checks shapes, accuracy, and that no row's bits depend on other rows or row blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from msgspec.structs import replace

from moesched import plugins
from moesched.errors import KernelFailed
from moesched.models.config import ModelConfig
from moesched.models.layers import GroupedAttention, Layer
from moesched.models.networks import Activation, FeedForward, Router
from moesched.models.rotary import Rotary
from moesched.models.stored_formats import CODED, STORED_FORMATS, StoredFormat

from ..native.compiled import instruction_sets
from ..native.kernels import NativeKernels
from ..shared.coded import rows_of
from ..shared.page_reader import DTYPES
from . import samples
from .guarded import Guarded
from .layer_weights import Tensor, Weights
from .resources import Resources, host_indices, host_upload, uncaptured
from .samples import Cut, Sample
from .seam import OPERATIONS, Bound, Case, Kernel
from .table import KernelTable
from .torch_kernels import fill, guarded
from .torch_rows import TorchKernel
from .workspace import Workspace

ROWS = (1, 2, 3, 5, 16, 33, 130)
"""Numbers of rows that are tried."""
BLOCKS = (1, 3)
"""Numbers of row blocks that a matrix is cut into."""
WORSE = 1.5
"""Largest mean squared error that a kernel may have, as a multiple of the error of torch's kernel."""
LEAST_ERROR = 1e-12
"""Mean squared error that is always allowed."""


def check_kernel(
    row: str | type,
    numbers: Sequence[int] = ROWS,
    instruction_set: str | None = None,
    formats: Sequence[str] = CODED,
) -> int:
    """Check a kernel's results on small random data; returns the number of cases that the kernel took.

    Args:
        row: the class of the kernel (a row of the kernel table), or its name, such as `file.py:Class`.
        numbers: the numbers of input rows to try.
        instruction_set: instruction set of the native kernels; None for the widest of this processor.
        formats: names of quantised storage formats of weights to try beside plain ones.

    Raises:
        KernelFailed: the kernel raised, a result has a wrong shape or dtype, or only `check_device` can check the
            kernel's operation.
        AssertionError: a result is too far from the exact one, an element of a result is not finite or was not written,
            a second call returned other bits, an input or a weight was written to, or the bits of a kernel with
            `independent` depend on other rows or row blocks. The message names kernel and case.
    """
    kind = plugins.find("kernels", row)
    tried = (None, *(STORED_FORMATS[name] for name in formats))
    taken = 0
    for config in _configs():
        for dtype in ("bfloat16", "float32"):
            with (
                _resources(config, dtype, max(numbers), instruction_set) as resources,
                torch.inference_mode(),
            ):
                kernel = guarded(kind, resources)
                if kernel.operation not in samples.MAKERS:
                    raise KernelFailed(
                        f"kernel {kernel.name}: {kernel.operation} is not checked alone: use check_device with "
                        "the device that has the kernel"
                    )
                fitting = [each for each in tried if each is None or each.fits((1, config.hidden))]
                taken += sum(
                    _check_rows(kernel, resources, rows, coded) for coded in fitting for rows in numbers
                )
    assert taken, f"kernel {kind.__name__} took none of {', '.join(map(str, numbers))} rows on a CPU"
    return taken


def _configs() -> Iterator[ModelConfig]:
    """Yield five small models that differ in what kernels must handle.

    The first is plain. The second has layer norms, norms of heads, clipping, and experts' weights that do not sum to 1.
    The third has a single expert, norms of whole projections, and heads that are rotated in part. The fourth has biases
    of queries, keys and values, rotated pairs of neighbours, and a sigmoid router with a correction of the scores and
    groups of experts. The fifth has biases everywhere, gate and up in one matrix, and limited activations.
    """
    attention = GroupedAttention(heads=4, kv_heads=2, head_dim=24)
    network = FeedForward(experts=6, top_k=2, intermediate=72)
    limited = Activation(alpha=1.7, limit=0.1)
    biased = replace(network, biases=True, alternating=True, activation=limited)
    plain = ModelConfig(
        name="plain",
        pattern=(Layer(attention=attention, feed_forward=network),),
        hidden=96,
        vocabulary=101,
        norm_eps=1e-5,
        max_positions=256,
        tied_embeddings=False,
        stop_tokens=(),
        dtype="bfloat16",
    )
    yield plain
    yield plain.varied(qk_norm="head", clip=0.5, router=Router(normalised=False), norm="layer")
    yield plain.varied(qk_norm="projection", experts=1, top_k=1, rotary=Rotary(width=16))
    yield plain.varied(
        hidden=256,
        intermediate=256,
        head_dim=64,
        rotary=Rotary(interleaved=True),
        router=Router(score="sigmoid", corrected=True, scale=1.5, groups=3, kept_groups=2),
        biases="qkv",
    )
    yield replace(plain, pattern=(Layer(attention=replace(attention, biases="qkvo"), feed_forward=biased),))


def cpu_resources(config: ModelConfig, dtype: torch.dtype, threads: NativeKernels | None) -> Resources:
    """Make the resources of kernels on the CPU for a model and a dtype, with a table of all shipped kernels.

    The kernels leave the number of cores that torch uses as it is.

    threads: the native kernels; None to compute everything with torch.
    """
    resources = Resources(
        config=config,
        dtype=dtype,
        device=torch.device("cpu"),
        indices=host_indices,
        upload=host_upload,
        captured=uncaptured,
        use_cores_for=lambda rows, weights: None,
        team=None,
        threads=threads,
        fused_attention=True,
        table=KernelTable(()),
    )
    fill(resources.table, resources)
    return resources


@contextmanager
def _resources(
    config: ModelConfig, dtype: str, most: int, instruction_set: str | None
) -> Iterator[Resources]:
    """Return a context with the resources of kernels on the CPU for a model, with native kernels if there are any.

    Args:
        most: the largest number of input rows that is tried.
        instruction_set: instruction set of the native kernels; None for the widest of this processor.
    """
    if not instruction_sets():
        yield cpu_resources(config, DTYPES[dtype], None)
        return
    with closing(NativeKernels(most, instruction_set, threads=1)) as threads:
        yield cpu_resources(config, DTYPES[dtype], threads)


def _check_rows(kernel: Guarded, resources: Resources, rows: int, coded: StoredFormat | None) -> int:
    """Check a kernel on `rows` rows, for matrices in one and in more row blocks; returns the number of cases taken.

    coded: quantised storage format of the matrices; None for plain numbers.
    """
    outcomes = [_outcome(kernel, resources, rows, Cut(blocks, coded)) for blocks in BLOCKS]
    taken = [outcome for outcome in outcomes if outcome is not None]
    if kernel.independent and len(taken) == len(BLOCKS):
        assert torch.equal(*taken), (
            f"kernel {kernel.name} ({kernel.operation} of {rows} rows): bits depend on how a matrix is cut into row "
            "blocks: sum each output in one order"
        )
    return len(taken)


def _outcome(kernel: Guarded, resources: Resources, rows: int, cut: Cut) -> Tensor | None:
    """Check a kernel on one case as `check_kernel` says; returns its results, a row per input row, or None if refused.

    Args:
        rows: number of rows of the input.
        cut: the number and format of the row blocks that each matrix is cut into.
    """
    sample = samples.MAKERS[kernel.operation](resources.config, resources.dtype, rows, cut)
    case = _case(kernel, resources, sample.weights, rows)
    if kernel.refusal(case):
        return None
    title = f"kernel {kernel.name} ({case})"
    given = [*sample.inputs, *(rows_of(block) for blocks in sample.weights.values() for block in blocks)]
    before = _cloned(given)
    bound = kernel.bind(case, sample.weights, Workspace(rows))
    first = _results(title, sample, bound, range(rows))
    assert _same(before, given), f"{title}: it wrote to one of its inputs or weights"
    second = sample.run(bound, range(rows))
    assert torch.equal(first, second), f"{title}: a second call with the same inputs has other bits"
    _require_close(title, first, resources, sample, case)
    if kernel.independent:
        for row in {0, rows // 2, rows - 1}:
            alone = _case(kernel, resources, sample.weights, 1)
            if not kernel.refusal(alone):
                own = sample.run(kernel.bind(alone, sample.weights, Workspace(1)), range(row, row + 1))
                assert torch.equal(own, first[row : row + 1]), (
                    f"{title}: row {row} alone has other bits: set `independent = False`, or let no sum depend on "
                    "the number of rows"
                )
    return first


def _results(title: str, sample: Sample, bound: Bound, rows: range) -> Tensor:
    """Call a bound kernel on a range of a sample's rows; returns its results (rows, X), all of which must be finite.

    title: kernel and case, for the message.
    """
    try:
        results = sample.run(bound, rows)
    except AssertionError as error:
        raise AssertionError(f"{title}: {error}") from None
    assert results.isfinite().all(), (
        f"{title}: some results are not finite, or were not written: memory for results begins as NaN"
    )
    return results


def _require_close(title: str, got: Tensor, resources: Resources, sample: Sample, case: Case) -> None:
    """Check that a kernel's result is about as close to the exact one as the result of torch's kernel is.

    Torch's kernel gets plain weights.

    Args:
        title: kernel and case, for the message.
        got: the kernel's result (rows, X).
        sample: the inputs and the exact result.

    Raises:
        AssertionError: the mean squared error is more than 1.5 times the error of torch's kernel.
    """
    weights = sample.plain(resources.dtype)
    plain = case._replace(formats=weights.formats(OPERATIONS[case.operation]))
    torchs = next(
        row
        for row in resources.table.rows
        if row.operation == case.operation and isinstance(row, TorchKernel) and not row.refusal(plain)
    )
    theirs = sample.run(torchs.bind(plain, weights, Workspace(case.rows)), range(case.rows))
    exact = sample.exact()
    error, allowed = ((each - exact).square().mean().item() for each in (got, theirs))
    assert error <= WORSE * allowed + LEAST_ERROR, (
        f"{title}: mean squared error {error:.3g} from the exact results, of torch {allowed:.3g}"
    )


def _case(kernel: Kernel, resources: Resources, weights: Weights, rows: int) -> Case:
    dtype = str(resources.dtype).removeprefix("torch.")
    formats = weights.formats(OPERATIONS[kernel.operation])
    return Case(kernel.operation, rows, formats, dtype, "cpu", weights.layer)


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [_cloned(each) for each in value] if isinstance(value, Sequence) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return not isinstance(one, Sequence) or all(map(_same, one, other))
