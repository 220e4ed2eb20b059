"""Random inputs and weights for each operation, with the exact results, by which `check.py` checks kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from moesched.models.config import ModelConfig
from moesched.models.encoding import encoded
from moesched.models.stored_formats import StoredFormat
from moesched.models.tensor_shapes import Shape

from ..products.linear import linear
from ..shared.coded import Block, CodedRows, plain_block
from . import expert_functions, functions, qkv_functions
from .expert_of_products import expert_of
from .layer_weights import Tensor, Weights
from .seam import EXPERT_MATRICES, Bound

SCALE = 0.2
"""Standard deviation of random weights."""


class Sample(NamedTuple):
    """Random inputs and weights for an operation, with the exact results.

    Attributes:
        inputs: the inputs for all rows, as the operation's function takes them.
        call: function that calls a bound kernel on a range of rows; returns the results as one tensor, (rows, X).
        exact: function that computes the exact results for all rows, (rows, X), float64.
    """

    weights: Weights
    inputs: tuple[Any, ...]
    call: Callable[[Bound, range], Tensor]
    exact: Callable[[], Tensor]

    def plain(self, dtype: torch.dtype) -> Weights:
        """Return a copy of the weights in which quantised blocks are decoded and rounded to a dtype."""
        blocks = {name: [plain_block(block, dtype) for block in each] for name, each in self.weights.items()}
        return Weights(blocks, self.weights.layer)

    def run(self, bound: Bound, rows: range) -> Tensor:
        """Call a bound kernel on a range of rows; returns its results (rows, width of a result), float64."""
        return self.call(bound, rows).double()


class Cut(NamedTuple):
    """The number and storage format of the row blocks that a matrix is cut into.

    Attributes:
        blocks: number of row blocks.
        coded: quantised format of the blocks; None for plain ones. Routers, and matrices that do not fit the format,
            are plain.
    """

    blocks: int
    coded: StoredFormat | None = None

    def of(self, name: str, matrix: Tensor) -> list[Block]:
        """Cut a matrix into row blocks of uneven sizes, each in memory of its own; `name` is the matrix's name."""
        parts = matrix.split(len(matrix) // self.blocks + 1)
        if self.coded is None or not self.coded.fits(tuple(matrix.shape)) or name == "router":
            return [part.clone() for part in parts]
        return [coded_block(part, self.coded) for part in parts]


def coded_block(rows_ND: Tensor, stored: StoredFormat) -> CodedRows:
    """Quantise rows (N, D) to a storage format."""
    raw = torch.from_numpy(encoded(rows_ND.float().numpy().reshape(-1), stored))
    return CodedRows(raw.view(len(rows_ND), -1), stored)


Maker = Callable[[ModelConfig, torch.dtype, int, Cut], Sample]


def _random(dtype: torch.dtype, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


Exact = dict[str, list[Tensor]]
"""The row blocks of weights in float64, by name."""


def _weights(
    config: ModelConfig, dtype: torch.dtype, cut: Cut, shapes: Mapping[str, Shape]
) -> tuple[Weights, Exact]:
    """Make random weights of the given shapes, by name; returns them and their values in float64, both by name.

    The results for the last eight sets of arguments are kept, and returned again for equal arguments.
    """
    return _made(config, dtype, cut, tuple(shapes.items()))


@lru_cache(maxsize=8)
def _made(
    config: ModelConfig, dtype: torch.dtype, cut: Cut, shapes: tuple[tuple[str, Shape], ...]
) -> tuple[Weights, Exact]:
    tensors = {
        name: _random(dtype, *shape, seed=seed, scale=SCALE) for seed, (name, shape) in enumerate(shapes)
    }
    weights = {name: cut.of(name, each) if each.dim() == 2 else [each] for name, each in tensors.items()}
    exact = {
        name: [plain_block(block, torch.float64).double() for block in blocks]
        for name, blocks in weights.items()
    }
    return Weights(weights, config.layer(0)), exact


def _rows_of(tensor: Tensor, rows: range) -> Tensor:
    return tensor if len(rows) == len(tensor) else tensor[rows.start : rows.stop].clone()


def _product(config: ModelConfig, dtype: torch.dtype, rows: int, cut: Cut) -> Sample:
    weights, doubled = _weights(config, dtype, cut, {"matrix": (200, config.hidden)})
    x_TD = _random(dtype, rows, config.hidden, seed=7)
    return Sample(
        weights,
        (x_TD,),
        lambda bound, part: bound(_rows_of(x_TD, part)),
        lambda: linear(x_TD.double(), doubled["matrix"]),
    )


def _expert(config: ModelConfig, dtype: torch.dtype, rows: int, cut: Cut) -> Sample:
    network = config.routed
    weights, doubled = _weights(config, dtype, cut, network.expert_shapes(config.hidden))
    x_nD = _random(dtype, rows, config.hidden, seed=8)

    def exact() -> Tensor:
        matrices = {
            name: partial(linear, blocks=doubled[name]) for name in EXPERT_MATRICES if name in weights
        }
        return expert_of(matrices, doubled, network.activation)(x_nD.double())

    def call(bound: Bound, part: range) -> Tensor:
        y_nD = torch.full((len(part), config.hidden), torch.nan, dtype=dtype)
        bound(_rows_of(x_nD, part), y_nD)
        return y_nD

    return Sample(weights, (x_nD,), call, exact)


def _attention_inputs(config: ModelConfig, dtype: torch.dtype, rows: int, cut: Cut) -> Sample:
    attention = config.attention
    shapes: dict[str, Shape] = {
        "attention_norm": (config.hidden,),
        "qkv": (attention.qkv_width, config.hidden),
    }
    widths = {"q": attention.query_width, "k": attention.key_width, "v": attention.key_width}
    shapes |= {f"{name}_bias": (width,) for name, width in widths.items() if name in attention.biases}
    if attention.qk_norm:
        shapes |= dict.fromkeys(("q_norm", "k_norm"), (attention.head_dim,))
    weights, doubled = _weights(config, dtype, cut, shapes)
    hidden_TD = _random(dtype, rows, config.hidden, seed=9)
    angles = qkv_functions.rotary_angles(torch.arange(rows) * 3, attention)

    def exact() -> Tensor:
        exact_angles = angles[0].double(), angles[1].double()
        return _beside(
            qkv_functions.project_qkv(hidden_TD.double(), doubled, exact_angles, config, attention)
        )

    def call(bound: Bound, part: range) -> Tensor:
        own = _rows_of(angles[0], part), _rows_of(angles[1], part)
        return _beside(bound(_rows_of(hidden_TD, part), own))

    return Sample(weights, (hidden_TD, angles), call, exact)


def _beside(qkv: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten(1) for part in qkv], dim=1)


def _output_projection(config: ModelConfig, dtype: torch.dtype, rows: int, cut: Cut) -> Sample:
    width = config.attention.attended_width
    weights, doubled = _weights(config, dtype, cut, config.attention.shapes_after(config.hidden))
    attended_TX, residual_TD = (
        _random(dtype, rows, width, seed=10),
        _random(dtype, rows, config.hidden, seed=11),
    )
    return Sample(
        weights,
        (attended_TX, residual_TD),
        lambda bound, part: bound(_rows_of(attended_TX, part), _rows_of(residual_TD, part)),
        lambda: functions.output_projection(
            attended_TX.double(), doubled["o"], residual_TD.double(), doubled.get("o_bias")
        ),
    )


def _route(config: ModelConfig, dtype: torch.dtype, rows: int, cut: Cut) -> Sample:
    network = config.routed
    shapes: dict[str, Shape] = {
        "ffn_norm": (config.hidden,),
        "router": (network.experts, config.hidden),
    }
    if network.router.corrected or network.biases:
        shapes["router_bias"] = (network.experts,)
    weights, doubled = _weights(config, dtype, cut, shapes)
    hidden_TD = _random(dtype, rows, config.hidden, seed=12)

    def exact() -> Tensor:
        norm_D = doubled["ffn_norm"][0]
        x_TD = functions.norm(hidden_TD.double(), norm_D, config.norm_eps, config.norm)
        added_E, correction_E = expert_functions.router_biases(doubled, network)
        logits_TE = linear(x_TD, doubled["router"])
        if added_E is not None:
            logits_TE = logits_TE + added_E
        chosen = expert_functions.choose_experts(logits_TE, network, correction_E)
        return _by_expert(network.experts, x_TD, *chosen)

    def call(bound: Bound, part: range) -> Tensor:
        return _by_expert(network.experts, *list(bound(_rows_of(hidden_TD, part)))[:3])

    return Sample(weights, (hidden_TD,), call, exact)


def _by_expert(experts: int, x_TD: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """Join a router's result into one tensor (T, D + E), float64: the router's input, and each expert's weight or 0.

    Raises:
        AssertionError: a token chose an expert that does not exist.
    """
    assert ((experts_Tk >= 0) & (experts_Tk < experts)).all(), (
        f"experts are numbered 0 to {experts - 1}, and the result names {experts_Tk.unique().tolist()}"
    )
    weights_TE = weights_Tk.new_zeros(len(x_TD), experts).scatter(1, experts_Tk, weights_Tk)
    return torch.cat([x_TD.double(), weights_TE.double()], dim=1)


def _combine(config: ModelConfig, dtype: torch.dtype, rows: int, cut: Cut) -> Sample:
    top_k = config.routed.top_k
    y_nD = _random(dtype, rows * top_k, config.hidden, seed=13)
    residual_TD = _random(dtype, rows, config.hidden, seed=14)
    order = torch.randperm(rows * top_k, generator=torch.Generator().manual_seed(15))
    rows_Tk = order.view(rows, top_k)
    weights_Tk = _random(torch.float32, rows, top_k, seed=16).softmax(-1)

    def call(bound: Bound, part: range) -> Tensor:
        own = (_rows_of(each, part) for each in (rows_Tk, weights_Tk, residual_TD))
        total_TD: Tensor = bound(y_nD, *own)
        return total_TD

    return Sample(
        Weights(layer=config.layer(0)),
        (y_nD, rows_Tk, weights_Tk, residual_TD),
        call,
        lambda: residual_TD.double() + (y_nD[rows_Tk].double() * weights_Tk[..., None].double()).sum(dim=1),
    )


def _logits(config: ModelConfig, dtype: torch.dtype, rows: int, cut: Cut) -> Sample:
    shapes = {"final_norm": (config.hidden,), "lm_head": (config.vocabulary, config.hidden)}
    weights, doubled = _weights(config, dtype, cut, shapes)
    hidden_TD = _random(dtype, rows, config.hidden, seed=17)

    def exact() -> Tensor:
        norm_D, head = doubled["final_norm"][0], doubled["lm_head"]
        return linear(functions.norm(hidden_TD.double(), norm_D, config.norm_eps, config.norm), head)

    return Sample(weights, (hidden_TD,), lambda bound, part: bound(hidden_TD, list(part)), exact)


MAKERS: Mapping[str, Maker] = MappingProxyType(
    {
        "attention_inputs": _attention_inputs,
        "output_projection": _output_projection,
        "route": _route,
        "expert": _expert,
        "combine": _combine,
        "logits": _logits,
        "product": _product,
    }
)
"""For each operation, the function that makes a sample, given a model, a dtype, a number of rows, and a cut."""
