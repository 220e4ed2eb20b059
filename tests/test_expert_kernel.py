"""The CPU expert kernel: right, and equal to the bit however rows, row blocks and threads are divided."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F

from benchmarks.shared.fresh_process import FreshProcess, in_fresh_process
from kernel_tables import TINY, kernels_of, logits_by
from moesched.devices.kernels.layer_weights import Weights
from moesched.devices.kernels.workspace import Workspace
from moesched.devices.native.compiled import availability, instruction_sets
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.products import crossover
from moesched.devices.products.linear import expert_ffn, linear
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.system.cores import affinity, usable_cores
from patience import PATIENCE_SECONDS
from small_models import SMALL

Tensor = torch.Tensor

MOST_ROWS = 128  # of a group

needs_kernel = pytest.mark.skipif(not instruction_sets(), reason=availability())


def random(rows: int, columns: int, seed: int = 1, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * scale).bfloat16()


# Larger and smaller than what a thread takes at a time, a step, and a panel of x; whole numbers of them and not.
SHAPES = [(256, 4096), (100, 600), (33, 45), (8, 9000), (1, 1), (130, 1031)]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_is_right_and_a_row_has_the_same_bits_whatever_the_other_rows_and_the_row_blocks(
    native: NativeKernels, outputs: int, inputs: int
) -> None:
    """Rows of a group and of several, by one and by many more."""
    rows = 513 if outputs < 128 else MOST_ROWS + 1
    x_TD, weight_ND = random(rows, inputs), random(outputs, inputs, 2)
    together = native.linear(x_TD, [weight_ND])
    exact_TN = x_TD.double() @ weight_ND.double().T
    assert ((together.double() - exact_TN).abs() <= exact_TN.abs() * 2**-8 + 1e-5 * inputs**0.5).all()
    for fewer in (*range(1, 18), 24, 31, 33, 63, 65, 96, 127, 128, 129, 200):
        assert torch.equal(native.linear(x_TD[:fewer], [weight_ND]), together[:fewer])
    assert torch.equal(native.linear(x_TD.flip(0), [weight_ND]), together.flip(0))
    for row in (0, 127, 128, rows - 1):
        assert torch.equal(native.linear(x_TD[row : row + 1], [weight_ND])[0], together[row])
    for cuts in ([1], [5, 6, 40], [16, 32, 48, 64, 80, 96]):
        blocks = [each.clone() for each in weight_ND.tensor_split([cut for cut in cuts if cut < outputs])]
        assert torch.equal(native.linear(x_TD[:7], blocks), together[:7])


def test_the_number_of_threads_does_not_show_in_the_bits(variant: str) -> None:
    x_TD = random(5, 512)
    gate, up, down = random(1500, 512, 2), random(1500, 512, 3), random(512, 1500, 4)
    outcomes = []
    for threads in (1, 2, 3, 8):
        with closing(NativeKernels(MOST_ROWS, variant, threads)) as kernel:
            outcomes += [kernel.expert(x_TD, [gate], [up], [down]) for _ in range(5)]
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)


@pytest.mark.parametrize("rows", [1, 2, 5, 7, 16, 32, 129, 513])
@pytest.mark.parametrize(("hidden", "width"), [(96, 205), (33, 45), (512, 130)])
def test_an_expert_is_as_close_to_exact_as_torch_is_and_gives_each_row_the_bits_that_it_has_alone(
    native: NativeKernels, rows: int, hidden: int, width: int
) -> None:
    x_nD = random(rows, hidden)
    shapes = enumerate([(width, hidden), (width, hidden), (hidden, width)])
    gate, up, down = (random(*shape, seed, 0.1) for seed, shape in shapes)
    x, g, u, d = (each.double() for each in (x_nD, gate, up, down))
    exact = (F.silu(x @ g.T) * (x @ u.T)) @ d.T
    ours = native.expert(x_nD, [gate], [up], [down])
    theirs = expert_ffn(x_nD, [gate], [up], [down]).double() - exact
    assert (ours.double() - exact).square().mean() <= theirs.square().mean() * 1.1
    for row in {0, min(rows, 128) - 1, min(rows, 129) - 1, rows - 1}:
        assert torch.equal(native.expert(x_nD[row : row + 1], [gate], [up], [down])[0], ours[row])


def test_nan_and_infinity_stay_what_they_are_and_a_gate_far_out_gives_no_nan(native: NativeKernels) -> None:
    x_TD = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [1.0, 2.0]]).bfloat16()
    one, up = torch.eye(2).bfloat16(), torch.full((2, 2), 1e-3).bfloat16()
    got = native.linear(x_TD, [one[:1] + 0.0, torch.ones(1, 2).bfloat16()])
    assert got[0].isnan().all()
    assert got[1, 1].isinf()
    assert got[2].tolist() == [1.0, 3.0]
    x_nD = torch.tensor([[1000.0, -1000.0], [0.0, 1e15], [-1e30, 0.0]]).bfloat16()
    expected = F.silu(x_nD.double()) * (x_nD.double() @ up.double().T)
    assert torch.allclose(native.expert(x_nD, [one], [up], [one]).double(), expected, rtol=0.01)


def test_rows_of_x_may_lie_apart(native: NativeKernels) -> None:
    weight_ND = random(40, 90, 2)
    for x_TD in (random(6, 200)[:, 7:97], random(90, 6).T):
        assert torch.equal(native.linear(x_TD, [weight_ND]), native.linear(x_TD.contiguous(), [weight_ND]))


def test_several_lanes_may_call_at_once(native: NativeKernels) -> None:
    x_TD, weight_ND = random(3, 2048), random(900, 2048, 2)
    expected = native.linear(x_TD, [weight_ND])
    equal: list[bool] = []

    def call() -> None:
        equal.extend(torch.equal(native.linear(x_TD, [weight_ND]), expected) for _ in range(50))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 200


@needs_kernel
@pytest.mark.parametrize(
    ("x_TD", "blocks"),
    [
        pytest.param(random(9, 8), [random(5, 8)], id="too many rows"),
        pytest.param(random(0, 8), [random(5, 8)], id="no rows"),
        pytest.param(random(2, 8).float(), [random(5, 8).float()], id="float32"),
        pytest.param(random(2, 8), [random(8, 5).T], id="transposed"),
    ],
)
def test_other_work_is_left_to_torch(x_TD: Tensor, blocks: list[Tensor]) -> None:
    weights = Weights({"matrix": blocks})
    with closing(NativeKernels(8, threads=1)) as kernel:
        product = kernels_of(SMALL, kernel, x_TD.dtype).bound("product", weights, Workspace(len(x_TD)))
        assert torch.equal(product(x_TD), linear(x_TD, blocks))


@needs_kernel
def test_kernels_that_are_closed_twice_end_their_threads_once() -> None:
    kernel = NativeKernels(8, threads=2)
    for _ in range(2):
        kernel.close()


def product_of_a_child() -> int:
    """The exit code of a child that multiplies although its parent's helpers are not there: 0 if it is right."""
    x_TD, weight_ND = torch.ones(1, 1024).bfloat16(), torch.ones(1024, 1024).bfloat16()
    with closing(NativeKernels(8, threads=2)) as kernel:
        kernel.linear(x_TD, [weight_ND])
        child = os.fork()
        if not child:
            os._exit(0 if (kernel.linear(x_TD, [weight_ND]) == 1024).all() else 1)
        return os.waitpid(child, 0)[1]


@needs_kernel
def test_a_forked_process_does_the_work_alone() -> None:
    assert in_fresh_process(product_of_a_child, seconds=PATIENCE_SECONDS) == 0


@needs_kernel
@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or usable_cores() < 2, reason="needs Linux and two cores"
)
@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"threads": 2, "pin": True}, [{affinity()[-1] if len(affinity()) < 2 else affinity()[1]}]),
        ({"threads": 3, "free_cores": 1}, [set(affinity()[1:])] * 2),
        ({"threads": 2, "free_cores": len(affinity())}, [set(affinity())]),
    ],
    ids=["pinned to a core each", "off the cores that are left to others", "anywhere where all are left"],
)
def test_helpers_run_where_they_may_and_the_caller_anywhere(
    settings: dict[str, Any], allowed: list[set[int]]
) -> None:
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    with closing(NativeKernels(8, **settings)) as kernel:
        helpers = set(tasks.iterdir()) - before
        assert [os.sched_getaffinity(int(helper.name)) for helper in helpers] == allowed
        product = kernel.linear(torch.ones(1, 64).bfloat16(), [torch.ones(2, 64).bfloat16()])
    assert product.tolist() == [[64, 64]]
    assert os.sched_getaffinity(0) == set(affinity())


@needs_kernel
def test_a_run_says_with_the_kernel_about_what_it_says_with_torch() -> None:
    kernels = (instruction_sets()[0], "torch")
    ours, theirs = (logits_by(kernel, "bfloat16", new_tokens=2)[:, 0] for kernel in kernels)
    assert not torch.equal(ours, theirs), "the setting has no effect"
    assert (ours - theirs).abs().mean() < 0.03 * theirs.std()


def test_a_kernel_that_is_not_there_is_refused_with_those_that_are() -> None:
    checkpoint = open_checkpoint(TINY)
    with pytest.raises(BadInput, match="kernel is 'gpu': give one of auto, torch"):
        TorchDevice(checkpoint, weight_layout(checkpoint.config), kernel="gpu")


@pytest.mark.parametrize(
    ("ratios", "most"),
    [
        pytest.param({1: 0.5, 2: 0.6, 4: 0.9, 8: 1.2}, 4, id="wins up to 4"),
        pytest.param({1: 1.3, 2: 0.4, 4: 0.5, 8: 1.5}, 4, id="the first one was disturbed"),
        pytest.param({1: 0.5, 2: 1.1, 4: 0.5, 8: 0.9}, 8, id="one in the middle was disturbed"),
        pytest.param({1: 1.3, 2: 1.1, 4: 0.95}, 0, id="loses more than it wins"),
    ],
)
def test_a_disturbed_ratio_does_not_decide_when_the_kernel_is_used(
    ratios: dict[int, float], most: int
) -> None:
    assert crossover.most_saved(ratios) == most


@needs_kernel
def test_the_crossover_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESCHED_CACHE", str(tmp_path / "cache"))

    def most() -> int:
        crossover.most_rows.cache_clear()
        return crossover.most_rows("portable", crossover.Shape(100, 600), packed=False)

    most()
    [file] = (tmp_path / "cache").glob("*.json")
    [(here, rows)] = msgspec.json.decode(file.read_bytes()).items()
    assert here.startswith("portable, 512 x 1024, plain to ")
    assert rows in (0, *crossover.ROWS)
    for kept, expected in ((7, 7), (crossover.ROWS[-1], crossover.ANY_ROWS)):
        file.write_bytes(msgspec.json.encode({here: kept}))
        assert most() == expected
    file.write_bytes(b"{broken")
    assert most() in (0, *crossover.ROWS, crossover.ANY_ROWS)
    crossover.most_rows.cache_clear()


def crossover_kept_in(cache: str) -> int:
    """The crossover, with a folder for what is kept on this machine."""
    os.environ["MOESCHED_CACHE"] = cache
    return crossover.most_rows("portable", crossover.Shape(600, 700), packed=False)


@needs_kernel
def test_processes_that_start_together_agree_on_the_crossover(tmp_path: Path) -> None:
    started = [FreshProcess(crossover_kept_in, str(tmp_path)) for _ in range(2)]
    said = [process.result(PATIENCE_SECONDS) for process in started]
    assert said[0] == said[1] >= 0
