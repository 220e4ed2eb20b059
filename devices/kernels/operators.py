"""The operators of a step, `torch.ops.moesched`: each writes to tensors that it is given, and is one launch.

Here are their schemas, and what each computes in plain torch with sums in float64. That is the reference for kernels,
and runs on the host's tensors. A kernel for a GPU registers itself beside it.

Shapes in names are those of `functions.py`; N slots of a KV cache, P parts of a sequence, h half of a head. A matrix
comes as its row blocks, and as a table of them, which kernels read: (matrices, blocks, 2), int64, with the first row
and the address of each block. A stack is one matrix for each expert. Those with fewer blocks than others repeat the
last.
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
"""The window of attention that sees all earlier tokens."""
QUERIES = 64
"""New tokens of a sequence that a program attends from."""


Operator = Callable[..., None]

_LIBRARY = Library("moesched", "DEF")  # a call takes a quarter of the time of a `custom_op`


def _operator(*written: str) -> Callable[[Operator], Operator]:
    """Define an operator by its reference, which writes to these of its arguments."""

    def define(reference: Operator) -> Operator:
        name = reference.__name__
        _LIBRARY.define(name + infer_schema(reference, mutates_args=written))
        _LIBRARY.impl(name, reference, "CPU")
        defined: Operator = getattr(torch.ops.moesched, name).default
        return defined

    return define


def on_gpu(launch: Operator) -> Operator:
    """Register the launch of the operator of the same name, for tensors on a GPU."""
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
    """The embeddings of tokens, and the cosines and signed sines of their positions."""
    hidden_TD.copy_(functions.embed(ids_T, embedding_VD))
    angles = qkv_functions.angles(positions_T, frequencies_h)
    for out, values in zip((cosines_T1d, sines_T1d), angles, strict=True):
        out.copy_(values)


@_operator("x_TD")
def norm(hidden_TD: Tensor, norm_D: Tensor, eps: float, layer_norm: bool, x_TD: Tensor) -> None:
    """Each token normalised in float64, rounded to its dtype."""
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
    """Projection and rotation.

    Args:
        head_norms: those of queries and keys, if the layer has them.
        interleaved: whether the rows of a pair are neighbours in the matrix; in q and k they are in both halves.
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
    """Store one new token of each sequence in a KV cache, and attend over parts of the sequences.

    Args:
        table: the tokens of each sequence, the place of its first block in the list of blocks, and that list.
        block: tokens of a block.
        window: tokens that a query sees.
        split: tokens of a part.
        sums_SHP: for each part, the sum of the powers of e of its scores, less the peak.
        peaks_SHP: its largest score; minus infinity if none is seen.
        parts_SHPd: its values, weighted by these powers.
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
    """Attend from all new tokens of sequences, which are in the KV cache; other arguments as for `attend`.

    Args:
        starts_S: the first row of each sequence, and the number of rows.
        tiles: tiles of `QUERIES` rows of all sequences.
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
    """The number of tiles that a sequence's new tokens make."""
    return -(-tokens // QUERIES)


@_operator("out_SX")
def join_parts(
    sums_SHP: Tensor, peaks_SHP: Tensor, parts_SHPd: Tensor, table: Tensor, split: int, out_SX: Tensor
) -> None:
    """The attention over all parts of each sequence; arguments as for `attend`."""
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
    """The product with a matrix (D, X), and the residual."""
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
    """Norm, router, and the choice of experts."""
    norm(hidden_TD, norm_D, eps, layer_norm, x_TD)
    logits_TE.copy_(_product(x_TD, torch.cat(blocks)))
    network = FeedForward(top_k=experts_Tk.shape[1], router=Router(normalised=sum_to_one))
    chosen = expert_functions.choose_experts(logits_TE, network)
    for out, values in zip((experts_Tk, weights_Tk), chosen, strict=True):
        out.copy_(values)


@_operator("rows_Tk", "pairs_n", "starts_E")
def sort_rows(experts_Tk: Tensor, rows_Tk: Tensor, pairs_n: Tensor, starts_E: Tensor) -> None:
    """Order the rows of experts by expert and then by token.

    Args:
        rows_Tk: the row of each pair of token and expert.
        pairs_n: the pair of each row, int32.
        starts_E: the first row of each expert, and the number of rows.
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
    """silu(gate x) * up x of all experts, on rows in the order of `sort_rows`; without pairs, on x as it is.

    gated_nI: becomes silu(gate x), float32, for an observer.
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
    """The products of all experts' rows with their matrices down."""
    for rows, matrix in zip(_rows(starts_E), _matrices(blocks, table, y_nD.shape[1]), strict=True):
        y_nD[rows] = _product(inner_nI[rows], matrix).to(y_nD.dtype)


@_operator("out_TD")
def combine(y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor, out_TD: Tensor) -> None:
    """The residual plus the weighted sum of each token's expert outputs."""
    out_TD.copy_(expert_functions.sum_experts(y_nD.double(), rows_Tk, weights_Tk.double()).add_(residual_TD))


@_operator("logits_SV")
def logits(x_SD: Tensor, table: Tensor, blocks: list[Tensor], logits_SV: Tensor) -> None:
    """LM head, rounded to the dtype of x."""
    logits_SV.copy_(_product(x_SD, torch.cat(blocks)).to(x_SD.dtype))


@_operator("tokens_S")
def likeliest(logits_SV: Tensor, tokens_S: Tensor) -> None:
    """The likeliest token of each row, the first of equal ones; -1 if the largest logit is not finite."""
    tokens_S.copy_(functions.likeliest(logits_SV))


def _product(x_TD: Tensor, matrix_ND: Tensor) -> Tensor:
    """The product with a matrix, float64."""
    return x_TD.double() @ matrix_ND.double().T


def _matrices(blocks: list[Tensor], table: Tensor, rows: int) -> Iterator[Tensor]:
    """The matrices of a stack, of `rows` rows each."""
    count = table.shape[1]
    for start in range(0, len(blocks), count):
        yield torch.cat(blocks[start : start + count])[:rows]


def _rows(starts_E: Tensor) -> Iterator[slice]:
    """The rows of each expert."""
    starts = starts_E.tolist()
    return map(slice, starts[:-1], starts[1:])


def _slots(table: Tensor, sequences: int, block: int) -> Iterator[Tensor]:
    """The slots of each sequence's tokens in a KV cache."""
    lengths, places = table[: 2 * sequences].view(2, -1).tolist()
    for length, place in zip(lengths, places, strict=True):
        first = 2 * sequences + place
        blocks = table[first : first - (-length // block)]
        yield (blocks[:, None] * block + torch.arange(block)).flatten()[:length]
