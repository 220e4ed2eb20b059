"""The operators of a step, `torch.ops.moesched`: each writes to tensors that it is given, and is one launch on a GPU.

Each function here defines an operator and computes it on the host's tensors in plain torch, with sums in float64: the
reference for GPU kernels. A kernel for GPUs registers itself for the same operator (`triton_launches.py`).

The letters in names of tensors are their dimensions, as in `functions.py`. In addition, N is tokens in a KV cache, P is
parts of a sequence, and h is half of a head. An operator gets a matrix twice: as the list of its row blocks, and as a
table for GPU kernels, (matrices, blocks, 2), int64, with the first row and the address of each block. In a stack, which
has one matrix for each expert, a matrix with fewer blocks than the others repeats its last block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch.library import Library, infer_schema

from moesched.models.networks import FeedForward, Router

from . import expert_functions, functions, qkv_functions

Tensor = torch.Tensor

UNLIMITED = 2**30
"""The window that stands for attention without a window, where a token sees all earlier tokens."""
QUERIES = 64
"""Largest number of new tokens of a sequence whose attention one program of a GPU kernel computes."""


Operator = Callable[..., None]

_LIBRARY = Library("moesched", "DEF")  # a call takes a quarter of the time of a `custom_op`


def _operator(*written: str) -> Callable[[Operator], Operator]:
    """Return a decorator that makes a function a torch operator of its name, which on the CPU runs the function.

    written: the names of the arguments that the operator writes to.
    """

    def define(reference: Operator) -> Operator:
        name = reference.__name__
        _LIBRARY.define(name + infer_schema(reference, mutates_args=written))
        _LIBRARY.impl(name, reference, "CPU")
        defined: Operator = getattr(torch.ops.moesched, name).default
        return defined

    return define


def on_gpu(launch: Operator) -> Operator:
    """Decorate a function that launches a GPU kernel: register it for GPUs as the operator with the function's name."""
    _LIBRARY.impl(launch.__name__, launch, "CUDA")
    return launch


@_operator("hidden_TD", "cosines_T1d", "sines_T1d")
def embed(
    ids_T: Tensor,
    positions_T: Tensor,
    embedding_VD: Tensor,
    frequencies_h: Tensor,
    hidden_TD: Tensor,
    cosines_T1d: Tensor,
    sines_T1d: Tensor,
) -> None:
    """Write tokens' embeddings, and cosines and sines of position times frequency, to the last three arguments."""
    hidden_TD.copy_(functions.embed(ids_T, embedding_VD))
    angles = qkv_functions.angles(positions_T, frequencies_h)
    for out, values in zip((cosines_T1d, sines_T1d), angles, strict=True):
        out.copy_(values)


@_operator("x_TD")
def norm(hidden_TD: Tensor, norm_D: Tensor, eps: float, layer_norm: bool, x_TD: Tensor) -> None:
    """Normalise each token in float64, and write the result, rounded, to x.

    layer_norm: True to normalise by mean and variance, False by the root mean square.
    """
    compute = functions.layer_norm if layer_norm else functions.rms_norm
    x_TD.copy_(compute(hidden_TD.double(), norm_D.double(), eps))


@_operator("q_THd", "k_TKd", "v_TKd")
def attention_inputs(
    x_TD: Tensor,
    table: Tensor,
    blocks: list[Tensor],
    head_norms: list[Tensor],
    cosines_T1d: Tensor,
    sines_T1d: Tensor,
    eps: float,
    interleaved: bool,
    clip: float | None,
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
) -> None:
    """Project normalised tokens by the matrix in `blocks` (and `table`), rotate queries and keys; write q, k and v.

    Args:
        cosines_T1d, sines_T1d: cosines and sines of the tokens' rotary angles.
        head_norms: weights of the norms of query heads and of key heads; empty if the layer has none.
        interleaved: True if rows 2i and 2i + 1 of a head's matrix make a rotated pair, False for rows i and i + d/2. In
            q and k the pair is at i and i + d/2 in both cases.
        clip: queries, keys and values are limited to -clip .. clip before rotation; None for no limit.
    """
    x_TX = _product(x_TD, torch.cat(blocks))
    out = q_THd, k_TKd, v_TKd
    parts = x_TX.unflatten(1, (-1, q_THd.shape[2])).split([each.shape[1] for each in out], dim=1)
    if head_norms:
        turned = zip(parts, head_norms, strict=False)
        parts = (*(functions.rms_norm(part, weight.double(), eps) for part, weight in turned), parts[2])
    if clip is not None:
        parts = tuple(part.clamp(-clip, clip) for part in parts)
    for part, rotated in zip(parts[:2], out, strict=False):
        angles = cosines_T1d.double(), sines_T1d.double()
        rotated.copy_(qkv_functions.apply_rotary(part, *angles, interleaved=interleaved))
    v_TKd.copy_(parts[2])


@_operator("keys_NKd", "values_NKd", "sums_SHP", "peaks_SHP", "parts_SHPd")
def attend(
    q_SHd: Tensor,
    k_SKd: Tensor,
    v_SKd: Tensor,
    table: Tensor,
    block: int,
    window: int,
    split: int,
    keys_NKd: Tensor,
    values_NKd: Tensor,
    sums_SHP: Tensor,
    peaks_SHP: Tensor,
    parts_SHPd: Tensor,
) -> None:
    """Store the keys and values of one new token of each sequence, and attend from it over each part of its sequence.

    Args:
        table: three lists one after the other, int64: the number of tokens of each sequence; for each sequence, the
            place in the third list where its blocks begin; the numbers of the blocks of all sequences.
        block: number of tokens in a block of the KV cache.
        window: the largest number of tokens that a query sees, itself included.
        split: number of tokens in a part of a sequence.
        sums_SHP: receives, for each part, the sum over its tokens of exp(score - peak).
        peaks_SHP: receives the largest score of each part; minus infinity if the query sees no token of the part.
        parts_SHPd: receives, for each part, the sum over its tokens of exp(score - peak) times the token's value.
    """
    kv_heads = k_SKd.shape[1]
    for s, slots in enumerate(_slots(table, len(q_SHd), block)):
        keys_NKd[slots[-1]], values_NKd[slots[-1]] = k_SKd[s], v_SKd[s]
        keys_KLd, values_KLd = (each[slots].double().transpose(0, 1) for each in (keys_NKd, values_NKd))
        q_KGd = q_SHd[s].double().unflatten(0, (kv_heads, -1))
        scores_KGL = q_KGd @ keys_KLd.mT * q_SHd.shape[2] ** -0.5
        scores_KGL[..., :-window] = -torch.inf
        for part, own_KGl in enumerate(scores_KGL.split(split, dim=2)):
            peaks_KG = own_KGl.amax(2)
            powers_KGl = (own_KGl - peaks_KG.nan_to_num(neginf=0.0)[..., None]).exp()
            own_values = values_KLd[:, part * split : (part + 1) * split]
            sums_SHP[s, :, part] = powers_KGl.sum(2).flatten()
            peaks_SHP[s, :, part] = peaks_KG.flatten()
            parts_SHPd[s, :, part] = (powers_KGl @ own_values).flatten(0, 1)


@_operator("out_TX")
def attend_prompts(
    q_THd: Tensor,
    starts_S: Tensor,
    tiles: int,
    table: Tensor,
    block: int,
    window: int,
    keys_NKd: Tensor,
    values_NKd: Tensor,
    out_TX: Tensor,
) -> None:
    """Attend from all new tokens of sequences, whose keys and values are in the KV cache already, and write out_TX.

    Args:
        starts_S: the first row of each sequence in q, and at the end the number of rows.
        tiles: number of tiles of all sequences together; a tile is up to `QUERIES` (64) rows of one sequence.
        table: the lengths and the blocks of the sequences, as for `attend`.
        block: number of tokens in a block of the KV cache.
        window: the largest number of tokens that a query sees, itself included.
    """
    kv_heads = keys_NKd.shape[1]
    rows = [*_rows(starts_S)]
    for own, slots in zip(rows, _slots(table, len(rows), block), strict=True):
        keys_KLd, values_KLd = (each[slots].double().transpose(0, 1) for each in (keys_NKd, values_NKd))
        q_KGTd = q_THd[own].double().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        scores_KGTL = q_KGTd @ keys_KLd.mT[:, None] * q_THd.shape[2] ** -0.5
        tokens, length = scores_KGTL.shape[2:]
        position_T1 = torch.arange(length - tokens, length)[:, None]
        before_TL = position_T1 - torch.arange(length)
        scores_KGTL.masked_fill_((before_TL < 0) | (before_TL >= window), -torch.inf)
        attended_KGTd = scores_KGTL.softmax(3) @ values_KLd[:, None]
        out_TX[own] = attended_KGTd.permute(2, 0, 1, 3).flatten(1).to(out_TX.dtype)


def tiles_of_queries(tokens: int) -> int:
    """Return the number of tiles of up to `QUERIES` (64) rows that a sequence's new tokens need."""
    return -(-tokens // QUERIES)


@_operator("out_SX")
def join_parts(
    sums_SHP: Tensor, peaks_SHP: Tensor, parts_SHPd: Tensor, table: Tensor, split: int, out_SX: Tensor
) -> None:
    """Combine the sums, peaks and parts that `attend` wrote into attention of whole sequences, out_SX.

    table, split: as for `attend`.
    """
    for s, length in enumerate(table[: len(out_SX)].tolist()):
        used = slice(-(-length // split))
        peaks_HP = peaks_SHP[s, :, used].double()
        weights_HP = (peaks_HP - peaks_HP.amax(1, keepdim=True)).exp()
        total_H1 = (weights_HP * sums_SHP[s, :, used]).sum(1, keepdim=True)
        out_SX[s] = (weights_HP[..., None] * parts_SHPd[s, :, used]).sum(1).div_(total_H1).flatten()


@_operator("out_TD")
def output_projection(
    x_TX: Tensor, table: Tensor, blocks: list[Tensor], residual_TD: Tensor, out_TD: Tensor
) -> None:
    """Multiply rows by the matrix (D, X) in `blocks` and `table`, add the residual, and write the result to out_TD."""
    out_TD.copy_(_product(x_TX, torch.cat(blocks)).add_(residual_TD))


@_operator("x_TD", "experts_Tk", "weights_Tk", "logits_TE")
def route(
    hidden_TD: Tensor,
    norm_D: Tensor,
    table: Tensor,
    blocks: list[Tensor],
    eps: float,
    layer_norm: bool,
    sum_to_one: bool,
    x_TD: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    logits_TE: Tensor,
) -> None:
    """Normalise tokens, compute router logits, choose each token's k experts; write results to the last four arguments.

    The experts of a token are ascending.

    Args:
        layer_norm: True to normalise by mean and variance, False by the root mean square.
        sum_to_one: True if the weights of a token's chosen experts add up to 1.
    """
    norm(hidden_TD, norm_D, eps, layer_norm, x_TD)
    logits_TE.copy_(_product(x_TD, torch.cat(blocks)))
    network = FeedForward(top_k=experts_Tk.shape[1], router=Router(normalised=sum_to_one))
    chosen = expert_functions.choose_experts(logits_TE, network)
    for out, values in zip((experts_Tk, weights_Tk), chosen, strict=True):
        out.copy_(values)


@_operator("rows_Tk", "pairs_n", "starts_E")
def sort_rows(experts_Tk: Tensor, rows_Tk: Tensor, pairs_n: Tensor, starts_E: Tensor) -> None:
    """Sort the pairs of token and expert by expert, then by token; each pair is a row of its expert.

    Args:
        rows_Tk: receives the row of each pair.
        pairs_n: receives the pair of each row, int32, where pair t * k + j is the j-th expert of token t.
        starts_E: receives the first row of each expert, and at the end the number of rows.
    """
    sorted_n, order_n = experts_Tk.view(-1).sort(stable=True)
    rows_Tk.view(-1).copy_(order_n.argsort())
    pairs_n.copy_(order_n)
    starts_E.copy_(torch.searchsorted(sorted_n, torch.arange(len(starts_E))))


@_operator("inner_nI", "gated_nI")
def gate_and_up(
    x_TD: Tensor,
    pairs_n: Tensor | None,
    starts_E: Tensor,
    gate_table: Tensor,
    gates: list[Tensor],
    up_table: Tensor,
    ups: list[Tensor],
    inner_nI: Tensor,
    gated_nI: Tensor | None,
) -> None:
    """Compute silu(gate x) * up x for all experts, each on its rows, and write the results to inner_nI.

    Args:
        pairs_n, starts_E: as written by `sort_rows`; pairs_n is None if the rows of x are sorted by expert already.
        gate_table, gates, up_table, ups: the tables and row blocks of all experts' matrices gate and up.
        gated_nI: receives silu(gate x), float32, for an observer; None to drop it.
    """
    choices = len(inner_nI) // len(x_TD)
    x_nD = x_TD if pairs_n is None else x_TD[pairs_n // choices]
    stacks = (
        _matrices(blocks, table, inner_nI.shape[1])
        for blocks, table in ((gates, gate_table), (ups, up_table))
    )
    for rows, gate, up in zip(_rows(starts_E), *stacks, strict=True):
        own_nI = F.silu(_product(x_nD[rows], gate))
        inner_nI[rows] = (own_nI * _product(x_nD[rows], up)).to(inner_nI.dtype)
        if gated_nI is not None:
            gated_nI[rows] = own_nI.to(inner_nI.dtype).float()


@_operator("y_nD")
def down(inner_nI: Tensor, starts_E: Tensor, table: Tensor, blocks: list[Tensor], y_nD: Tensor) -> None:
    """Multiply each expert's rows (see `sort_rows`) by its matrix in `blocks` (and `table`); write the results to y."""
    for rows, matrix in zip(_rows(starts_E), _matrices(blocks, table, y_nD.shape[1]), strict=True):
        y_nD[rows] = _product(inner_nI[rows], matrix).to(y_nD.dtype)


@_operator("out_TD")
def combine(y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor, out_TD: Tensor) -> None:
    """Add each token's expert outputs (rows `rows_Tk` of y), times their weights, to the residual; write out_TD."""
    out_TD.copy_(expert_functions.sum_experts(y_nD.double(), rows_Tk, weights_Tk.double()).add_(residual_TD))


@_operator("logits_SV")
def logits(x_SD: Tensor, table: Tensor, blocks: list[Tensor], logits_SV: Tensor) -> None:
    """Multiply rows by the LM head in `blocks` (and `table`), round to the dtype of x, and write the logits."""
    logits_SV.copy_(_product(x_SD, torch.cat(blocks)).to(x_SD.dtype))


@_operator("tokens_S")
def likeliest(logits_SV: Tensor, tokens_S: Tensor) -> None:
    """Write each row's likeliest token, the first of equal ones, to tokens_S; -1 if the largest logit is not finite."""
    tokens_S.copy_(functions.likeliest(logits_SV))


def _product(x_TD: Tensor, matrix_ND: Tensor) -> Tensor:
    """Multiply rows by the transpose of a matrix in float64: (T, N)."""
    return x_TD.double() @ matrix_ND.double().T


def _matrices(blocks: list[Tensor], table: Tensor, rows: int) -> Iterator[Tensor]:
    """Yield the matrices of a stack, each joined from its row blocks and cut to its first `rows` rows.

    table: (matrices, blocks, 2); only the number of blocks of each matrix is read from this shape.
    """
    count = table.shape[1]
    for start in range(0, len(blocks), count):
        yield torch.cat(blocks[start : start + count])[:rows]


def _rows(starts_E: Tensor) -> Iterator[slice]:
    """Yield the range of rows of each expert or sequence; starts_E: their first rows, then the number of rows."""
    starts = starts_E.tolist()
    return map(slice, starts[:-1], starts[1:])


def _slots(table: Tensor, sequences: int, block: int) -> Iterator[Tensor]:
    """Yield the indices, in the KV cache, of each sequence's tokens, int64; table, block: as for `attend`."""
    lengths, places = table[: 2 * sequences].view(2, -1).tolist()
    for length, place in zip(lengths, places, strict=True):
        first = 2 * sequences + place
        blocks = table[first : first - (-length // block)]
        yield (blocks[:, None] * block + torch.arange(block)).flatten()[:length]
