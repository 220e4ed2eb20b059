"""MLX's kernels: joined on Metal with the same bits, routers converted once, few evaluations for a token."""

# ruff: noqa: E402  # what needs MLX is imported after the check that it is there

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="there is no MLX for this platform")

import numpy as np

import moesched
from benchmarks.shared.small_runs import ONE_MEMORY
from moesched import run_model
from moesched.devices.kernels import mlx_elements
from moesched.devices.kernels.mlx_elements import ONE_BY_ONE, Kernel
from moesched.devices.kernels.mlx_functions import choose_experts
from moesched.devices.kernels.mlx_rows import mlx_table
from moesched.devices.kernels.seam import ROWS, STACK, Case
from moesched.devices.mlx.device import MlxDevice
from moesched.devices.mlx.thread import OneThread
from moesched.devices.mlx.weights import MlxWeights
from moesched.devices.shared.page_reader import PageReader
from moesched.errors import MoeschedError
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.networks import FeedForward, Router
from moesched.models.random_model import write_random_model
from moesched.models.rotary import Rotary
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.system.signals import ctrl_c_interrupts
from moesched.trace import check_trace
from small_models import SMALL, small_model
from test_nodes import run_nodes

needs_compiler = pytest.mark.skipif(
    not mx.metal.is_available() and shutil.which("g++") is None,
    reason="MLX joins kernels on a processor with g++",
)

SHORTEST, LONGEST = 1, 70


def drawn(*shape: int, dtype: Any = mx.float32) -> Any:
    array = (3 * mx.random.normal(shape)).astype(dtype)
    mx.eval(array)
    return array


def arguments(function: Kernel, tokens: int) -> tuple[Any, ...]:
    """Those that a layer gives a function for a number of tokens."""
    dtype = mx.bfloat16
    heads, pair = (tokens, 6, 8), (tokens, 1, 8)
    row, float32s = (tokens, 1, 9), [drawn(tokens, 1, 9) for _ in range(8)]
    return {
        "swiglu": (drawn(*row, dtype=dtype), drawn(*row, dtype=dtype)),
        "turned": (drawn(*heads, dtype=dtype), drawn(*heads, dtype=dtype), drawn(*pair), drawn(*pair)),
        "clipped": (drawn(*row, dtype=dtype), 0.5),
        "weighted": (drawn(tokens, 4, 9, dtype=dtype), drawn(tokens, 4, 1)),
        "added": (*float32s,),
        "added_to": (drawn(*row, dtype=dtype), *float32s),
        "probability": (drawn(tokens, 4), drawn(tokens, 1)),
    }[function.__name__]


@needs_compiler
@pytest.mark.parametrize("function", ONE_BY_ONE, ids=lambda each: each.__name__)
def test_a_joined_kernel_has_the_bits_of_the_operations_one_by_one_and_is_fewer_kernels(
    tmp_path: Path, function: Kernel
) -> None:
    as_one = mlx_elements.joined(function)
    for tokens in (SHORTEST, LONGEST, 5):  # one kernel for all shapes
        given = arguments(function, tokens)
        apart, joined = function(*given), as_one(*given)
        assert kernels(tmp_path, joined) < kernels(tmp_path, apart)
        assert apart.dtype == joined.dtype
        assert mx.array_equal(apart, joined)


def kernels(folder: Path, array: Any) -> int:
    """The operations that an array still waits for."""
    mx.export_to_dot(str(folder / "graph.dot"), array)
    return len(re.findall(r'label ?="[A-Za-z]', (folder / "graph.dot").read_text()))


def test_scores_that_are_all_0_give_weights_of_0() -> None:
    network = FeedForward(experts=3, top_k=2, router=Router(score="sigmoid"))
    assert choose_experts(mx.full((1, 3), -200.0), network)[1].tolist() == [[0, 0]]


def test_a_router_that_stays_is_converted_once_in_the_memory_that_the_plan_gives_it(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_model(tmp_path / "model"))
    layout = weight_layout(checkpoint.config, "bfloat16")
    device, reader = MlxDevice(checkpoint, layout), PageReader(checkpoint, layout)
    plan = plan_run(
        ONE_MEMORY, layout, split_batch([3], 2, 1), make_policy("resident", {}), slot_bytes=device.slot_bytes
    )
    weights = MlxWeights(reader, layout)
    weights.begin(plan)
    page = next(page for page in layout.pages if page.expert < 0)
    (stored,) = (extent for extent in page.extents if extent.tensor.endswith(".router"))
    assert device.slot_bytes(page) - reader.bytes_in_slot(page) == 2 * stored.nbytes

    def router() -> Any:
        view: Any = SimpleNamespace(bound=None, pages=(page,), slots=(SimpleNamespace(fixed=True),))
        (shown,) = weights.show(view)["router"]
        mx.eval(shown)
        return shown

    first = router()
    assert first.dtype == mx.float32
    taken = mx.get_active_memory()
    again = router()
    assert mx.array_equal(first, again)
    assert mx.get_active_memory() <= taken
    reader.close()
    asyncio.run(device.aclose())


def chosen(operation: str, dtype: str, device: str, *formats: str) -> str:
    """The kernel of MLX for a case."""
    case = Case(operation, 3, frozenset(formats), dtype, device, SMALL.layer(0))
    return mlx_table(SMALL).require(case).name


def test_experts_are_gathered_where_mlx_does_that_and_else_run_one_by_one() -> None:
    assert chosen("experts", "float32", "cpu", STACK) == "mlx gathered"
    assert chosen("experts", "bfloat16", "metal", STACK) == "mlx gathered"
    assert chosen("experts", "bfloat16", "cpu", STACK) == "mlx one by one"


@pytest.mark.parametrize(
    ("formats", "dtype", "reason"),
    [
        ((ROWS,), "float32", "it takes experts in one stack"),
        ((ROWS, STACK), "bfloat16", "float32 matrices only"),
    ],
)
def test_a_layer_whose_experts_are_not_gathered_is_no_single_kernel(
    formats: tuple[str, ...], dtype: str, reason: str
) -> None:
    with pytest.raises(MoeschedError, match=reason):
        chosen("moe_layer", dtype, "cpu", *formats)


def test_a_report_names_the_kernels_that_ran(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    report = run_model(model, [[1, 2]], device="mlx", policy="resident", max_new_tokens=2, dtype="float32")
    assert report.kernels["moe_layer"] == ["mlx"]
    assert report.kernels["experts"] == ["mlx gathered"]


# -- evaluations -----------------------------------------------------------------------------------

TOKENS = 5
MOST_FOR_A_TOKEN = 90
TOY_DBRX = SHAPES["mixtral-0.8b"].varied(
    name="dbrx", form="dbrx", transposed_down=True, norm="layer", clip=8.0, rotary=Rotary(theta=5e5),
    layers=40, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, experts=16, top_k=4, vocabulary=512,
    stop_tokens=(),
)  # fmt: skip


@pytest.fixture(scope="module")
def dbrx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(TOY_DBRX, tmp_path_factory.mktemp("models") / "dbrx", dtype="float32")


def test_a_token_of_dbrx_on_two_nodes_takes_few_evaluations_and_has_the_bits_of_one_for_every_task(
    dbrx: Path,
) -> None:
    (needed, devices), (every_task, others) = (
        run_nodes(dbrx, "ep_router_aided", 2, kind, prompts=[[5, 6, 7]], new_tokens=TOKENS)
        for kind in (MlxDevice, partial(MlxDevice, evaluate="task"))
    )
    assert needed == every_task
    for device, other in zip(devices, others, strict=True):
        assert device.evaluations <= MOST_FOR_A_TOKEN * TOKENS
        assert other.evaluations > 3 * device.evaluations
        for (_, mine), (_, theirs) in zip(device.logits, other.logits, strict=True):
            assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("policy", ["resident", "cgopipe", "expert_streaming"])
def test_a_traced_run_has_a_span_for_every_task_either_way(
    no_text: Path, tmp_path: Path, policy: str
) -> None:
    tokens = []
    for evaluate in ("needed", "task"):
        trace = tmp_path / f"{evaluate}.json"
        report = moesched.run_model(
            no_text,
            [[1, 2, 3], [4, 5]],
            device="mlx",
            device_settings={"evaluate": evaluate},
            policy=policy,
            max_new_tokens=4,
            micro_batch_size=1,
            trace=trace,
        )
        assert not check_trace(trace)
        tokens.append(report.tokens)
    assert tokens[0] == tokens[1]


def test_posted_calls_run_in_order_before_the_next_one_that_is_waited_for() -> None:
    thread = OneThread("test")
    ran: list[int] = []
    for number in range(3):
        thread.post(ran.append, number)
    assert not ran
    thread.call(ran.append, 3)
    assert ran == [0, 1, 2, 3]
    thread.post(ran.append, 4)
    thread.drop_posted()
    thread.call(ran.append, 5)
    assert ran == [0, 1, 2, 3, 5]
    thread.close()


def test_an_interrupted_call_leaves_no_result_for_the_next_ones() -> None:
    thread, caller = OneThread("test"), threading.get_ident()
    with ctrl_c_interrupts(), pytest.raises(KeyboardInterrupt):
        thread.call(signal.pthread_kill, caller, signal.SIGINT)
    assert [thread.call(str, number) for number in range(3)] == ["0", "1", "2"]
    thread.close()


def test_what_a_posted_call_raises_ends_the_next_one_and_drops_what_builds_on_it() -> None:
    thread = OneThread("test")
    nothing: dict[int, int] = {}
    ran: list[int] = []
    thread.post(nothing.__getitem__, 0)
    thread.post(ran.append, 1)
    with pytest.raises(KeyError):
        thread.call(ran.append, 2)
    thread.call(ran.append, 3)
    assert ran == [3]
    thread.close()
