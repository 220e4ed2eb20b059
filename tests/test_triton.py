"""The kernels in Triton, by its interpreter or on a GPU: equal to the references, and each row to itself alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu import tile_sweep
from moesched.devices.kernels import operators
from moesched.devices.kernels.operators import UNLIMITED, tiles_of_queries
from moesched.devices.kernels.triton_kernel import Matrix
from moesched.devices.kernels.triton_sizes import TILES

pytest.importorskip("triton", reason="needs triton, which is not installed: make test-triton")
from moesched.devices.kernels import triton_launches
from moesched.devices.kernels.triton_tiles import INTERPRETED

pytestmark = pytest.mark.slow

Tensor = torch.Tensor
Rows = Sequence[int]

HERE = "cpu" if INTERPRETED else "cuda"
"""The device that runs the kernels; references run on the CPU."""
ROWS = 19
WIDTH, INNER, HEADS, KV_HEADS, HEAD = 136, 40, 6, 2, 24
EXPERTS, TOP_K, VOCABULARY = 5, 2, 71
EPS, BLOCK, SPLIT = 1e-5, 8, 32
LENGTHS = [1, 5, 31, 32, 33, 64, 100, 17, *range(2, 13)]


class Data:
    """Made-up tensors by name, for all rows.

    Args:
        blocks: the number of row blocks of each matrix.
    """

    def __init__(self, dtype: torch.dtype, blocks: int, device: str = HERE) -> None:
        self.dtype = dtype
        self.device = device
        self._blocks = blocks

    def on_cpu(self) -> Data:
        """The same numbers, for the references."""
        return Data(self.dtype, self._blocks, "cpu")

    def numbers(self, numbers: Sequence[object]) -> Tensor:
        """Integers, on the device."""
        return torch.tensor(numbers, device=self.device)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Random numbers, always the same for a name."""
        seed = sum(map(ord, name))
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device, self.dtype)

    def out(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a result, with numbers that are none where that is possible."""
        empty = torch.full(shape, -1 if dtype in (torch.int64, torch.int32) else torch.nan)
        return empty.to(self.device, dtype or self.dtype)

    def stack(self, name: str, rows: int, width: int, count: int = 1) -> Matrix:
        """A stack of matrices, whose first one is in one block fewer than the others."""
        most = self._blocks + (name == "up")
        blocks: list[Tensor] = []
        numbers: list[list[int]] = []
        for number in range(count):
            matrix = self.tensor(f"{name} {number}", rows, width) * 0.2
            cut = max(1, most - (count > 1 and number == 0))
            own = [block.clone() for block in matrix.split(-(-rows // cut))]
            firsts = [sum(map(len, own[:place])) for place in range(len(own))]
            repeated = most - len(own)
            blocks += own + own[-1:] * repeated
            numbers += [[first, block.data_ptr()] for first, block in zip(firsts, own, strict=True)]
            numbers += [[rows, own[-1].data_ptr()]] * repeated
        return Matrix(self.numbers(numbers).view(count, most, 2), blocks)


Case = Callable[[ModuleType, Data, Rows], Tensor]
"""Calls operators of a module on some of the rows; returns a result for each row."""


def embed(of: ModuleType, data: Data, rows: Rows) -> Tensor:
    ids, positions = data.numbers(rows) * 3, data.numbers(rows) * 1000
    frequencies_h = data.tensor("frequencies", HEAD // 2).float().abs()
    hidden_TD = data.out(len(rows), WIDTH)
    cosines, sines = (data.out(len(rows), 1, HEAD, dtype=torch.float32) for _ in range(2))
    embedding_VD = data.tensor("embedding", VOCABULARY, WIDTH)
    of.embed(ids, positions, embedding_VD, frequencies_h, hidden_TD, cosines, sines)
    return torch.cat([hidden_TD.float(), cosines[:, 0], sines[:, 0]], dim=1)


def attention_inputs(of: ModuleType, data: Data, rows: Rows) -> Tensor:
    hidden_TD = data.tensor("hidden", ROWS, WIDTH)[[*rows]]
    qkv = [data.out(len(rows), heads, HEAD) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    angles = [data.tensor(name, ROWS, 1, HEAD)[[*rows]].float() for name in ("cosines", "sines")]
    matrix = data.stack("qkv", (HEADS + 2 * KV_HEADS) * HEAD, WIDTH)
    x_TD = data.out(len(rows), WIDTH)
    of.norm(hidden_TD, data.tensor("norm", WIDTH), EPS, False, x_TD)
    of.attention_inputs(x_TD, *matrix, [], *angles, EPS, False, None, *qkv)
    return torch.cat([part.flatten(1) for part in qkv], dim=1)


def interleaved_attention_inputs_with_norms(of: ModuleType, data: Data, rows: Rows) -> Tensor:
    hidden_TD = data.tensor("hidden", ROWS, WIDTH)[[*rows]]
    qkv = [data.out(len(rows), heads, HEAD) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    angles = [data.tensor(name, ROWS, 1, HEAD)[[*rows]].float() for name in ("cosines", "sines")]
    norms = [data.tensor(name, HEAD) for name in ("q norm", "k norm")]
    matrix = data.stack("qkv", (HEADS + 2 * KV_HEADS) * HEAD, WIDTH)
    x_TD = data.out(len(rows), WIDTH)
    of.norm(hidden_TD, data.tensor("norm", WIDTH), EPS, True, x_TD)
    of.attention_inputs(x_TD, *matrix, norms, *angles, EPS, True, 0.5, *qkv)
    return torch.cat([part.flatten(1) for part in qkv], dim=1)


def attention(of: ModuleType, data: Data, rows: Rows, window: int = UNLIMITED) -> Tensor:
    qkv = [
        data.tensor(name, ROWS, heads, HEAD)[[*rows]]
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    ]
    most = max(LENGTHS) // BLOCK + 1
    scattered = torch.randperm(ROWS * most, generator=torch.Generator().manual_seed(3)).view(ROWS, most)
    keys, values = (data.tensor(name, ROWS * most * BLOCK, KV_HEADS, HEAD) for name in ("keys", "values"))
    lengths = [LENGTHS[row] for row in rows]
    places = [most * number for number in range(len(rows))]
    table = data.numbers([*lengths, *places, *scattered[[*rows]].flatten().tolist()])
    parts = -(-max(lengths) // SPLIT)
    sums, peaks = (data.out(len(rows), HEADS, parts, dtype=torch.float32) for _ in range(2))
    weighted, out_SX = (
        data.out(len(rows), HEADS, parts, HEAD, dtype=torch.float32),
        data.out(len(rows), HEADS * HEAD),
    )
    of.attend(*qkv, table, BLOCK, window, SPLIT, keys, values, sums, peaks, weighted)
    of.join_parts(sums, peaks, weighted, table, SPLIT, out_SX)
    last = [LENGTHS[row] - 1 for row in rows]
    written = torch.tensor(
        [
            int(scattered[row, place // BLOCK]) * BLOCK + place % BLOCK
            for row, place in zip(rows, last, strict=True)
        ]
    )
    return torch.cat([out_SX, keys[written].flatten(1), values[written].flatten(1)], dim=1)


def attention_in_a_window(of: ModuleType, data: Data, rows: Rows) -> Tensor:
    return attention(of, data, rows, window=20)


def attention_of_prompts(of: ModuleType, data: Data, rows: Rows, window: int = UNLIMITED) -> Tensor:
    """The last tokens of sequences, of which some are cached already: rows are sequences, not tokens."""
    most = max(LENGTHS) // BLOCK + 1
    scattered = torch.randperm(ROWS * most, generator=torch.Generator().manual_seed(3)).view(ROWS, most)
    keys, values = (data.tensor(name, ROWS * most * BLOCK, KV_HEADS, HEAD) for name in ("keys", "values"))
    lengths = [LENGTHS[row] for row in rows]
    new = [max(1, length - row % 3 * 7) for row, length in zip(rows, lengths, strict=True)]
    queries = [data.tensor(f"q {row}", tokens, HEADS, HEAD) for row, tokens in zip(rows, new, strict=True)]
    places = [most * number for number in range(len(rows))]
    table = data.numbers([*lengths, *places, *scattered[[*rows]].flatten().tolist()])
    starts, tiles = data.numbers([0, *accumulate(new)]), sum(map(tiles_of_queries, new))
    out_TX = data.out(sum(new), HEADS * HEAD)
    of.attend_prompts(torch.cat(queries), starts, tiles, table, BLOCK, window, keys, values, out_TX)
    padded = [part.flatten() for part in out_TX.split(new)]
    return torch.nn.utils.rnn.pad_sequence(padded, batch_first=True)


def attention_of_prompts_in_a_window(of: ModuleType, data: Data, rows: Rows) -> Tensor:
    return attention_of_prompts(of, data, rows, window=20)


def output_projection(of: ModuleType, data: Data, rows: Rows) -> Tensor:
    x_TX, residual_TD = data.tensor("x", ROWS, 144)[[*rows]], data.tensor("residual", ROWS, WIDTH)[[*rows]]
    out_TD = data.out(len(rows), WIDTH)
    of.output_projection(x_TX, *data.stack("o", WIDTH, 144), residual_TD, out_TD)
    return out_TD


def route(of: ModuleType, data: Data, rows: Rows, layer_norm: bool = False) -> Tensor:
    hidden_TD, x_TD = data.tensor("hidden", ROWS, WIDTH)[[*rows]], data.out(len(rows), WIDTH)
    experts_Tk = data.out(len(rows), TOP_K, dtype=torch.int64)
    weights_Tk, logits_TE = (data.out(len(rows), n, dtype=torch.float32) for n in (TOP_K, EXPERTS))
    router = data.stack("router", EXPERTS, WIDTH)
    settings = EPS, layer_norm, not layer_norm
    of.route(
        hidden_TD, data.tensor("norm", WIDTH), *router, *settings, x_TD, experts_Tk, weights_Tk, logits_TE
    )
    return torch.cat([x_TD.float(), experts_Tk.float(), weights_Tk, logits_TE], dim=1)


def route_with_layer_norm(of: ModuleType, data: Data, rows: Rows) -> Tensor:
    return route(of, data, rows, layer_norm=True)


def experts(of: ModuleType, data: Data, rows: Rows) -> Tensor:
    """All experts but one, which has no rows, and the sum of their outputs."""
    chosen = [(row % 2, 2 + row % (EXPERTS - 3)) for row in rows]
    experts_Tk, x_TD = data.numbers(chosen), data.tensor("x", ROWS, WIDTH)[[*rows]]
    rows_Tk, starts_E = torch.empty_like(experts_Tk), experts_Tk.new_empty(EXPERTS + 1)
    pairs_n = data.out(experts_Tk.numel(), dtype=torch.int32)
    of.sort_rows(experts_Tk, rows_Tk, pairs_n, starts_E)
    gates, ups = (data.stack(name, INNER, WIDTH, EXPERTS) for name in ("gate", "up"))
    inner_nI, y_nD = data.out(len(pairs_n), INNER), data.out(len(pairs_n), WIDTH)
    of.gate_and_up(x_TD, pairs_n, starts_E, *gates, *ups, inner_nI, None)
    of.down(inner_nI, starts_E, *data.stack("down", WIDTH, INNER, EXPERTS), y_nD)
    weights_Tk, out_TD = data.tensor("weights", ROWS, TOP_K)[[*rows]].float(), data.out(len(rows), WIDTH)
    of.combine(y_nD, rows_Tk, weights_Tk, data.tensor("residual", ROWS, WIDTH)[[*rows]], out_TD)
    return out_TD


def one_expert(of: ModuleType, data: Data, rows: Rows) -> Tensor:
    x_nD, starts = data.tensor("x", ROWS, WIDTH)[[*rows]], data.numbers([0, len(rows)])
    gate, up = (data.stack(name, INNER, WIDTH) for name in ("gate", "up"))
    inner_nI, gated_nI = data.out(len(rows), INNER), data.out(len(rows), INNER, dtype=torch.float32)
    of.gate_and_up(x_nD, None, starts, *gate, *up, inner_nI, gated_nI)
    return torch.cat([inner_nI.float(), gated_nI], dim=1)


def logits(of: ModuleType, data: Data, rows: Rows) -> Tensor:
    logits_SV = data.out(len(rows), VOCABULARY, dtype=torch.float32)
    of.logits(data.tensor("x", ROWS, WIDTH)[[*rows]], *data.stack("head", VOCABULARY, WIDTH), logits_SV)
    return logits_SV


CASES = (
    embed,
    attention_inputs,
    interleaved_attention_inputs_with_norms,
    attention,
    attention_in_a_window,
    attention_of_prompts,
    attention_of_prompts_in_a_window,
    output_projection,
    route,
    route_with_layer_norm,
    experts,
    one_expert,
    logits,
)
EVERYTHING = range(ROWS)
WITH_SINGLE_LOADS = {"attention_inputs", "attend"}
"""Kernels that load single numbers in 16 bits: norms of heads, and the newest key and value."""


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def data(request: pytest.FixtureRequest) -> Data:
    return Data(request.param, blocks=3)


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_computes_what_its_reference_does(data: Data, case: Case) -> None:
    digits = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}[data.dtype]
    own = case(triton_launches, data, EVERYTHING).float().cpu()
    assert torch.allclose(own, case(operators, data.on_cpu(), EVERYTHING).float(), rtol=digits, atol=digits)


@pytest.mark.parametrize("case", CASES)
def test_a_row_alone_has_the_bits_that_it_has_among_others(case: Case) -> None:
    data = Data(torch.bfloat16, blocks=2)
    among = case(triton_launches, data, EVERYTHING)
    for row in (0, 6, ROWS - 1):
        alone = case(triton_launches, data, [row])[0]
        assert torch.equal(alone, among[row][: len(alone)])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sum_to_one", [False, True])
def test_a_bad_router_gives_experts_that_exist_and_weights_that_are_no_numbers(
    bad: float, sum_to_one: bool
) -> None:
    data = Data(torch.float32, 1)
    hidden_TD, x_TD = data.tensor("hidden", 3, WIDTH), data.out(3, WIDTH)
    table, [router] = data.stack("router", EXPERTS, WIDTH)
    router[1] = bad
    experts_Tk, weights_Tk = data.out(3, TOP_K, dtype=torch.int64), data.out(3, TOP_K, dtype=torch.float32)
    given = hidden_TD, data.tensor("norm", WIDTH), table, [router], EPS, False, sum_to_one
    with np.errstate(invalid="ignore"):
        triton_launches.route(*given, x_TD, experts_Tk, weights_Tk, data.out(3, EXPERTS, dtype=torch.float32))
    assert ((experts_Tk >= 0) & (experts_Tk < EXPERTS)).all()
    assert (experts_Tk[:, 0] < experts_Tk[:, 1]).all()
    assert weights_Tk.isnan().all()


@pytest.mark.parametrize("case", [attention_inputs, output_projection, route, experts, logits])
def test_cuts_of_matrices_into_pages_change_no_bits(case: Case) -> None:
    whole, cut = (case(triton_launches, Data(torch.float16, blocks), [2, 3]) for blocks in (1, 4))
    assert torch.equal(whole, cut)


def test_of_equal_logits_the_first_is_the_likeliest_and_bad_ones_have_none() -> None:
    logits_SV = torch.randn(6, 3000, generator=torch.Generator().manual_seed(1))
    logits_SV[0, [7, 1500, 2900]] = 9.0
    logits_SV[1, 5], logits_SV[2, 5], logits_SV[3], logits_SV[4, 2048] = torch.nan, torch.inf, -torch.inf, 9.0
    own, expected = (torch.empty(6, dtype=torch.int64, device=device) for device in (HERE, "cpu"))
    triton_launches.likeliest(logits_SV.to(HERE), own)
    operators.likeliest(logits_SV, expected)
    assert own.tolist() == expected.tolist()
    assert own.tolist()[:5] == [7, -1, -1, -1, 2048]


@given(st.integers(1, 700), st.integers(2, 40), st.integers(0, 9))
@settings(max_examples=15)
def test_rows_are_sorted_by_expert_and_then_by_token(tokens: int, experts: int, seed: int) -> None:
    drawn = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    experts_Tk = drawn.topk(2).indices.sort().values
    shapes = experts_Tk.shape, (experts_Tk.numel(),), (experts + 1,)
    dtypes = torch.int64, torch.int32, torch.int64
    own, expected = (
        [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]
        for device in (HERE, "cpu")
    )
    triton_launches.sort_rows(experts_Tk.to(HERE), *own)
    operators.sort_rows(experts_Tk, *expected)
    assert all(torch.equal(each.cpu(), wanted) for each, wanted in zip(own, expected, strict=True))


@pytest.mark.parametrize("case", [attention_inputs, output_projection, experts, logits])
def test_wide_tiles_of_many_rows_compute_what_the_reference_does(case: Case) -> None:
    data, many = Data(torch.bfloat16, blocks=2), [row % ROWS for row in range(16 * ROWS)]
    own = case(triton_launches, data, many).float().cpu()
    assert torch.allclose(own, case(operators, data.on_cpu(), many).float(), rtol=4e-2, atol=4e-2)
    assert torch.equal(own, own[:ROWS].repeat(16, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bits_of_tensor_cores_depend_on_no_tile(dtype: torch.dtype) -> None:
    data, width, most = Data(dtype, blocks=2), 2048, 600
    x_TD, projection = data.tensor("x", most, width), data.stack("o", width, width)
    gate, up = (data.stack(name, width, width) for name in ("gate", "up"))

    def results(rows: int) -> list[Tensor]:
        projected, inner, y = (data.out(rows, width) for _ in range(3))
        starts = data.numbers([0, rows])
        triton_launches.output_projection(x_TD[:rows], *projection, x_TD[:rows], projected)
        triton_launches.gate_and_up(x_TD[:rows], None, starts, *gate, *up, inner, None)
        triton_launches.down(inner, starts, *projection, y)
        return [projected, inner, y]

    whole = results(most)
    for rows in (1, 16, 17, 33, 65, 300):
        for few, many in zip(results(rows), whole, strict=True):
            assert torch.equal(few, many[:rows])


def test_a_sweep_prints_a_table_of_tiles_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(TILES)
    assert tile_sweep.main(["--small", "--only", "down", "--out", str(tmp_path / "sweep.json")]) == 0
    table = capsys.readouterr().out.partition("TILES: ")[2].partition("}")[0]
    assert '"down": (Tile(16, ' in table
    assert before == TILES


@pytest.mark.parametrize(("capability", "kilobytes"), [("80", 99), ("90", 227)])
def test_every_tile_fits_into_the_shared_memory_of_a_gpu_and_reads_weights_in_wide_loads(
    capability: str, kilobytes: int
) -> None:
    script = Path(__file__).parent / "compiled_triton.py"
    said = subprocess.run(
        [sys.executable, script, capability],
        capture_output=True,
        text=True,
        check=True,
        cwd=script.parent.parent,
    )
    compiled = [line.split() for line in said.stdout.splitlines()]
    assert len({name for name, *_ in compiled}) == 14
    assert max(int(shared) for *_, shared, _ in compiled) <= kilobytes * 1024
    assert {name for name, *_, single in compiled if int(single)} <= WITH_SINGLE_LOADS
