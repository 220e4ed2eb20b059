"""The kernels in Triton, by its interpreter on the CPU: equal to torch, and each row to itself alone."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.shared.small_runs import ONE_MEMORY, TWO_MEMORIES, generate
from moesched.devices.kernels import functions as torch_functions
from moesched.devices.kernels.check import check_kernel, cpu_resources
from moesched.devices.kernels.layer_weights import Weights
from moesched.devices.kernels.seam import Case
from moesched.devices.kernels.torch_rows import TorchAttention
from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.machines import Machine
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from small_models import SMALL, small_model

pytest.importorskip("triton", reason="needs triton, which is not installed: pip install triton")
from moesched.devices.kernels import triton_functions as functions
from moesched.devices.kernels import triton_rows
from moesched.devices.kernels.triton_code import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: here is a GPU"),
]

MODEL = SMALL.varied(hidden=64, intermediate=96, head_dim=24, experts=5, layers=2)
ROWS = 9
LENGTHS = [1, 5, 31, 32, 33, 64, 100, 17]


@pytest.mark.parametrize("name", ["AttentionInputs", "OutputProjection", "Route", "Expert", "Combine"])
def test_a_kernel_keeps_the_promises_of_the_table(name: str) -> None:
    assert check_kernel(getattr(triton_rows, f"Triton{name}"), (1, 17)) > 0


def cache_of(config: ModelConfig, lengths: list[int]) -> BlockedKV:
    """A cache whose sequences have one token less than these, in blocks that are scattered."""
    cache = BlockedKV(config, 80, block_size=8)
    cache.slots.copy_(torch.randn(cache.slots.shape, generator=torch.Generator().manual_seed(2)))
    for sequence in range(len(lengths)):
        cache.table.open(sequence)
    taken = [0] * len(lengths)
    order = [number for number, length in enumerate(lengths) for _ in range(0, length - 1, 8)]
    random.Random(0).shuffle(order)
    for sequence in order:
        more = min(8, lengths[sequence] - 1 - taken[sequence])
        taken[sequence] += more
        cache.extend([sequence], [more])
    return cache


@pytest.mark.parametrize("window", [None, 20])
def test_attention_over_scattered_blocks_is_that_of_torch_and_a_row_alone_has_the_same_bits(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "SPLIT", 32)  # so that short sequences have several parts
    torch.manual_seed(0)
    config = MODEL.varied(window=window)
    layer, sequences = config.layer(0), len(LENGTHS)
    heads = (layer.grouped.heads, layer.grouped.kv_heads, layer.grouped.kv_heads)
    qkv = tuple(torch.randn(sequences, each, layer.grouped.head_dim) for each in heads)
    case = Case("attention", sequences, frozenset(), "float32", "cpu", layer, decodes=True)
    resources = cpu_resources(config, torch.float32, None)
    own = triton_rows.TritonAttention(resources).bind(case, None, None)
    expected = TorchAttention(resources).bind(case, None, None)

    def attended(bound: Any, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        cache = cache_of(config, LENGTHS)
        step = cache.extend(chosen, [1] * len(chosen))
        return bound(tuple(part[chosen].contiguous() for part in qkv), cache.at(0), step), cache.slots

    everything = list(range(sequences))
    got, written = attended(own, everything)
    wanted, also_written = attended(expected, everything)
    assert torch.allclose(got, wanted, atol=1e-5)
    assert torch.equal(written, also_written)
    for sequence in (0, 3, 6):
        assert torch.equal(attended(own, [sequence])[0][0], got[sequence])


def moe_weights(dtype: torch.dtype, blocks: int) -> Weights:
    torch.manual_seed(1)
    inner, outer = (MODEL.routed.intermediate, MODEL.hidden), (MODEL.hidden, MODEL.routed.intermediate)
    shapes = {
        "o": (MODEL.hidden, MODEL.attention.attended_width),
        "ffn_norm": (MODEL.hidden,),
        "router": (MODEL.routed.experts, MODEL.hidden),
    }
    for expert in range(MODEL.routed.experts):
        parts = {"gate": inner, "up": inner, "down": outer}
        shapes |= {f"experts.{expert}.{part}": shape for part, shape in parts.items()}
    tensors = {name: (torch.randn(shape) * 0.2).to(dtype) for name, shape in shapes.items()}
    cut = {
        name: [block.clone() for block in tensor.chunk(blocks)] if tensor.dim() == 2 else [tensor]
        for name, tensor in tensors.items()
    }
    return Weights(cut, MODEL.layer(0))


class OneLayer:
    """The kernels of a layer in a dtype, and rows for them.

    Attributes:
        weights: in one block for each matrix.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.weights = moe_weights(dtype, 1)
        self.attended_TX = torch.randn(ROWS, MODEL.attention.attended_width).to(dtype)
        self.hidden_TD = torch.randn(ROWS, MODEL.hidden).to(dtype)
        self._dtype = dtype
        self._resources = cpu_resources(MODEL, dtype, None)

    def bound(self, name: str, weights: Weights) -> Any:
        kernel = getattr(triton_rows, f"Triton{name}")(self._resources)
        dtype = str(self._dtype).removeprefix("torch.")
        case = Case(kernel.operation, ROWS, frozenset({"rows"}), dtype, "cpu", MODEL.layer(0))
        assert not kernel.refusal(case)
        return kernel.bind(case, weights, None)

    def at_once(self, weights: Weights, rows: slice = slice(None)) -> torch.Tensor:
        hidden_TD: torch.Tensor
        hidden_TD, _, _ = self.bound("MoELayer", weights)(self.attended_TX[rows], self.hidden_TD[rows])
        return hidden_TD

    def by_parts(self) -> torch.Tensor:
        between_TD = self.bound("OutputProjection", self.weights)(self.attended_TX, self.hidden_TD)
        routed = self.bound("Route", self.weights)(between_TD)
        grouping = torch_functions.group_by_expert(routed.experts_Tk, MODEL.routed.experts)
        x_nD = routed.x_TD[grouping.tokens_n]
        y_nD = torch.empty_like(x_nD)
        start = 0
        for expert, count in enumerate(grouping.counts):
            stop = start + count
            self.bound("Expert", self.weights.expert(expert))(x_nD[start:stop], y_nD[start:stop])
            start = stop
        hidden_TD: torch.Tensor = self.bound("Combine", self.weights)(
            y_nD, grouping.rows_Tk, routed.weights_Tk, between_TD
        )
        return hidden_TD


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def one_layer(request: pytest.FixtureRequest) -> OneLayer:
    return OneLayer(request.param)


def test_a_layer_at_once_has_the_bits_of_its_parts(one_layer: OneLayer) -> None:
    assert torch.equal(one_layer.at_once(one_layer.weights), one_layer.by_parts())


def test_cuts_of_matrices_into_pages_change_no_bits(one_layer: OneLayer) -> None:
    cut = moe_weights(one_layer.hidden_TD.dtype, 3)
    assert torch.equal(one_layer.at_once(cut), one_layer.at_once(one_layer.weights))


@pytest.mark.parametrize("row", [0, 4, ROWS - 1])
def test_a_row_alone_has_the_bits_that_it_has_among_others(one_layer: OneLayer, row: int) -> None:
    among = one_layer.at_once(one_layer.weights)[row : row + 1]
    assert torch.equal(one_layer.at_once(one_layer.weights, slice(row, row + 1)), among)


@given(
    st.integers(1, 40).flatmap(
        lambda rows: st.lists(
            st.sets(st.integers(0, 6), min_size=2, max_size=2), min_size=rows, max_size=rows
        )
    )
)
@settings(max_examples=15)
def test_rows_are_sorted_by_expert_and_then_by_token(chosen: list[set[int]]) -> None:
    experts_Tk = torch.tensor([sorted(each) for each in chosen])
    order = functions.sort_rows(experts_Tk, experts=7)
    assert order.rows_Tk is not None and order.pairs_n is not None
    sorted_n, order_n = experts_Tk.view(-1).sort(stable=True)
    assert order.pairs_n.tolist() == order_n.tolist()
    assert order.rows_Tk.tolist() == order_n.argsort().view_as(experts_Tk).tolist()
    assert order.starts_E.tolist() == [int((sorted_n < expert).sum()) for expert in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "small", config=MODEL)


def logits(model: Path, dtype: str, policy: str, machine: Machine, size: int, *kernels: type) -> torch.Tensor:
    checkpoint = open_checkpoint(model)
    device = TorchDevice(
        checkpoint,
        weight_layout(checkpoint.config, dtype),
        keep_logits=True,
        own_kernels=kernels,
        kernel="torch",
    )
    prompts = [[5, 6, 7], [8, 9], [10]]
    return generate(
        device, make_policy(policy), machine, prompts, new_tokens=3, micro_batch_size=size
    ).logits_RSV


def test_a_model_generates_what_it_does_on_torch(model: Path) -> None:
    own = logits(model, "float32", "resident", ONE_MEMORY, 3, *triton_rows.TRITON)
    assert torch.allclose(own, logits(model, "float32", "resident", ONE_MEMORY, 3), atol=1e-3)


@pytest.mark.parametrize("policy", ["expert_cache", "expert_streaming"])
def test_bits_depend_on_no_policy_and_no_number_of_rows(model: Path, policy: str) -> None:
    apart = logits(model, "bfloat16", policy, TWO_MEMORIES, 1, *triton_rows.TRITON)
    assert torch.equal(apart, logits(model, "bfloat16", "resident", ONE_MEMORY, 3, *triton_rows.TRITON))


@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_kernel_compiles_and_fits_into_the_shared_memory_of_a_gpu(capability: str) -> None:
    script = Path(__file__).parent / "compiled_triton.py"
    said = subprocess.run(
        [sys.executable, script, capability],
        capture_output=True,
        text=True,
        check=True,
        cwd=script.parent.parent,
    )
    shared = dict(line.split() for line in said.stdout.splitlines())
    assert len(shared) == 9
    assert max(map(int, shared.values())) <= 48 * 1024
