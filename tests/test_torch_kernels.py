"""The torch kernels: right, and equal to themselves however the work is cut and ordered."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from exact_attention import exact_attention
from moesched.devices.kernels import attention_functions, expert_functions, functions, qkv_functions
from moesched.devices.kernels.attention_functions import KVView
from moesched.devices.products.linear import expert_ffn, linear
from moesched.devices.products.packed_weights import pack, packed_bytes, packing_pays
from moesched.models.footprint import QUERY_TILE, TOKEN_TILE
from moesched.models.layers import GroupedAttention
from moesched.models.networks import FeedForward, Router
from moesched.models.shapes import SHAPES
from reference import cut_in_three

Tensor = torch.Tensor

# ---------------------------------------------------------------- however the work is cut and ordered


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("chunks", [[20], [1] * 20, [7, 7, 6], [3, 1, 16], [19, 1]])
def test_a_prompt_in_chunks_is_the_prompt(window: int | None, chunks: list[int]) -> None:
    torch.manual_seed(6)
    q, k, v = torch.randn(20, 6, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    parts, start = [], 0
    for chunk in chunks:
        stop = start + chunk
        view = KVView(k[None, :stop], v[None, :stop], chunk)
        parts.append(attention_functions.attention(q[start:stop], [view], window))
        start = stop
    assert torch.allclose(torch.cat(parts), exact_attention(q, k, v, window).float(), atol=1e-6)


@pytest.mark.parametrize("window", [None, 300])
def test_attention_over_more_queries_than_a_tile(window: int | None) -> None:
    torch.manual_seed(7)
    tokens, past = QUERY_TILE + 90, 60
    q, k, v = torch.randn(tokens, 2, 4), torch.randn(tokens + past, 1, 4), torch.randn(tokens + past, 1, 4)
    out = attention_functions.attention(q, [KVView(k[None], v[None], tokens)], window)
    assert torch.allclose(out, exact_attention(q, k, v, window).float(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_together_has_the_bits_of_decoding_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    keys, values = torch.randn(2, 5, 70, 3, 16).to(dtype)
    q = torch.randn(5, 6, 16).to(dtype)
    together = attention_functions.attention(q, [KVView(keys, values, 1)])
    alone = [
        attention_functions.attention(q[i : i + 1], [KVView(keys[i : i + 1], values[i : i + 1], 1)])
        for i in range(5)
    ]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_in_which_experts_run_does_not_show_in_the_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    x_TD, residual_TD = torch.randn(2, 17, 24).to(dtype)
    router = torch.randn(8, 24).to(dtype)
    experts = [[torch.randn(shape).to(dtype) for shape in ((40, 24), (40, 24), (24, 40))] for _ in range(8)]
    experts_Tk, weights_Tk = expert_functions.route(
        x_TD, {"router": [router]}, FeedForward(experts=8, top_k=3)
    )
    tokens_n, rows_Tk = expert_functions.sorted_by_expert(experts_Tk)
    counts = experts_Tk.flatten().bincount(minlength=8).tolist()
    starts = [sum(counts[:expert]) for expert in range(8)]

    def run(order: list[int]) -> Tensor:
        y_nD = torch.full((51, 24), torch.nan, dtype=dtype)
        for expert in order:
            rows = slice(starts[expert], starts[expert] + counts[expert])
            gate, up, down = experts[expert]
            y_nD[rows] = expert_ffn(x_TD[tokens_n[rows]], [gate], [up], [down])
        return expert_functions.combine(y_nD, rows_Tk, weights_Tk, residual_TD)

    expected = run(list(range(8)))
    assert not expected.isnan().any()
    for seed in range(5):
        assert torch.equal(run(random.Random(seed).sample(range(8), 8)), expected)


# ---------------------------------------------------------------- kernels one by one


def test_routing_takes_the_largest_logits_and_softmaxes_those() -> None:
    torch.manual_seed(10)
    x_TD, router = torch.randn(30, 16), torch.randn(7, 16)
    experts_Tk, weights_Tk = expert_functions.route(
        x_TD, {"router": [router[:3], router[3:]]}, FeedForward(experts=7, top_k=3)
    )
    logits = x_TD @ router.T
    assert experts_Tk.dtype == torch.int64
    assert weights_Tk.dtype == torch.float32
    assert torch.equal(experts_Tk, logits.topk(3).indices.sort(-1).values)
    assert torch.allclose(weights_Tk, logits.gather(-1, experts_Tk).softmax(-1), atol=1e-5)


def test_scores_that_are_all_0_give_weights_of_0() -> None:
    network = FeedForward(experts=3, top_k=2, router=Router(score="sigmoid"))
    assert expert_functions.choose_experts(torch.full((1, 3), -200.0), network)[1].tolist() == [[0, 0]]


def test_sorting_puts_the_rows_of_an_expert_together() -> None:
    experts_Tk = torch.tensor([[0, 3], [1, 3], [0, 1]])
    tokens_n, rows_Tk = expert_functions.sorted_by_expert(experts_Tk)
    assert tokens_n.tolist() == [0, 2, 1, 2, 0, 1]
    assert rows_Tk.tolist() == [[0, 4], [2, 5], [1, 3]]


def test_combining_weighs_and_adds_to_the_residual() -> None:
    y_nD = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0]])
    rows, weights = torch.tensor([[0, 3], [1, 2]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    residual = torch.tensor([[100.0, 0.0], [0.0, 100.0]])
    assert expert_functions.combine(y_nD, rows, weights, residual).tolist() == [[106.25, 62.5], [3.0, 130.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_longer_than_a_tile_have_the_bits_of_their_parts(dtype: torch.dtype) -> None:
    config = SHAPES["mixtral-0.8b"].varied(hidden=48, heads=4, kv_heads=2, head_dim=12, qk_norm="head")
    tokens, attention = 2 * TOKEN_TILE + 5, config.attention
    torch.manual_seed(13)
    x_TX, residual_TD = torch.randn(tokens, 96).to(dtype), torch.randn(tokens, 48).to(dtype)
    y_nD, weights_Tk = torch.randn(2 * tokens, 48).to(dtype), torch.rand(tokens, 2)
    rows_Tk = torch.randperm(2 * tokens).view(tokens, 2)
    norms = {name: [torch.rand(12).to(dtype)] for name in ("q_norm", "k_norm")}
    angles = qkv_functions.rotary_angles(torch.arange(tokens), attention)

    def computed(part: slice) -> list[Tensor]:
        cosines, sines = (each[part] for each in angles)
        return [
            functions.norm(residual_TD[part], torch.ones(48, dtype=dtype), 1e-5),
            *qkv_functions.rotated_heads(x_TX[part].clone(), norms, (cosines, sines), config, attention),
            expert_functions.combine(y_nD, rows_Tk[part], weights_Tk[part], residual_TD[part]),
        ]

    cuts = [0, 7, TOKEN_TILE + 9, tokens]
    parts = [computed(slice(*cut)) for cut in pairwise(cuts)]
    for whole_prompt, cut in zip(computed(slice(0, tokens)), zip(*parts, strict=True), strict=True):
        assert torch.equal(whole_prompt, torch.cat(cut))


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    torch.manual_seed(11)
    q, k = torch.randn(2, 1, 1, 12)
    attention = GroupedAttention(heads=1, kv_heads=1, head_dim=12)

    def score(q_position: int, k_position: int) -> float:
        turned = [
            qkv_functions.apply_rotary(x, *qkv_functions.rotary_angles(torch.tensor([position]), attention))
            for x, position in ((q, q_position), (k, k_position))
        ]
        assert turned[0].norm() == pytest.approx(q.norm())
        return float((turned[0] * turned[1]).sum())

    assert score(5, 2) == pytest.approx(score(103, 100), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 4), abs=1e-2)


def test_packed_weights_give_the_same_bits_as_row_blocks_of_plain_ones() -> None:
    if not packing_pays(cores=torch.get_num_threads()):
        pytest.skip("this processor gains nothing from packed bfloat16 weights")
    torch.manual_seed(12)
    for outputs, inputs in ((96, 64), (50, 33), (1024, 3584)):
        weight = torch.randn(outputs, inputs).to(torch.bfloat16)
        packed = pack(weight)
        assert weight.nbytes <= packed_bytes(packed) <= 2 * weight.nbytes + 65536
        for tokens in (1, 3, 16, 40):
            x = torch.randn(tokens, inputs).to(torch.bfloat16)
            assert torch.equal(linear(x, [packed]), linear(x, cut_in_three(weight)))
