"""The interface of kernels: operations, the cases of an operation, and the kernels that compute them.

An operation has inputs, weights and outputs; a device runs a task by computing one or several operations. A kernel
computes one operation, for cases that it takes: a number of rows, storage formats of the weights, a dtype, a device. A
kernel is bound to weights once, which gives a function that is called often.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from moesched.models import stored_formats
from moesched.models.layers import GroupedAttention, Layer
from moesched.models.networks import FeedForward

Bound = Callable[..., Any]
"""A kernel bound to its weights and its memory: a function. Its next call may overwrite the results of the last."""

ROWS, COLUMNS, PACKED, STACK = "rows", "columns", "packed", "stack"
"""Storage formats of a plain block of a matrix: row by row, column by column, packed in oneDNN's own order, or in one
array with the same block of other experts.
"""

CODED = frozenset(stored_formats.CODED)
"""Storage formats of a coded block."""


EXPERT_MATRICES = ("gate", "up", "gate_up", "down")
"""The matrices of an expert; gate_up takes the place of gate and up in some models."""


class ExpertOrder(NamedTuple):
    """The rows of experts' inputs, sorted by expert, then by token: one for each pair of token and chosen expert.

    Attributes:
        tokens_n: the token of each row.
        rows_Tk: the row of each pair.
    """

    tokens_n: Any
    rows_Tk: Any


class RouterOutput(NamedTuple):
    """A router's result for T tokens.

    Attributes:
        x_TD: the experts' input: the normalised hidden states.
        experts_Tk: the k experts of each token, ascending integers.
        weights_Tk: the weights of these experts, float32.
        logits_TE: the router's logits, float32; None where another node computed them.
        order: the rows sorted by expert; None if the kernel does not sort them.
    """

    x_TD: Any
    experts_Tk: Any
    weights_Tk: Any
    logits_TE: Any = None
    order: ExpertOrder | None = None


class Operation(NamedTuple):
    """An operation of a model, such as attention or a product with a matrix.

    Attributes:
        matrices: names of the weights whose storage formats are listed in a `Case` of the operation. If empty, the
            formats of all weights except norms are listed; for attention and `combine`, none are.
        call: the arguments and results of a bound kernel's function, in words. `functions.py` explains the letters of
            shapes.
        weights: the names and shapes of the weights that `bind` gets, in words; "" if it gets none.
        parts: operations that together give the same results, to be computed if no kernel takes this operation.
    """

    name: str
    summary: str
    matrices: tuple[str, ...]
    call: str
    weights: str = ""
    parts: tuple[str, ...] = ()


_OPERATIONS = (
    # ids, positions: of each token. steps: the tokens' places in each KV cache, which only Triton's kernels read.
    Operation(
        "embed",
        "embeddings of tokens, and the angles of the rotary embedding",
        ("embedding",),
        "(ids, positions, steps) -> hidden_TD, (cosines, sines)",
        "embedding (V, D)",
    ),
    # angles: the second result of `embed`.
    Operation(
        "attention_inputs",
        "norm, projection and rotation",
        ("qkv",),
        "(hidden_TD, angles) -> (q_THd, k_TKd, v_TKd)",
        "attention_norm (D), qkv (Hd + 2Kd, D); of some models q_norm, k_norm (d or all), q_bias, k_bias, v_bias",
    ),
    # cached: the KV cache of a layer. step: the places of the new tokens in the cache. X: heads times head size.
    Operation(
        "attention",
        "new keys and values into the KV cache, and attention over it",
        (),
        "((q_THd, k_TKd, v_TKd), cached, step) -> attended_TX",
        "of some models sinks (H)",
    ),
    # views: the keys and values of sequences, those of their new tokens included.
    Operation(
        "prompt_attention",
        "attention of new tokens over views of keys and values",
        (),
        "(q_THd, views) -> attended_TX",
        "of some models sinks (H)",
    ),
    Operation(
        "output_projection",
        "output projection and residual",
        ("o",),
        "(attended_TX, residual_TD) -> hidden_TD",
        "o (D, X); of some models o_bias (D)",
    ),
    # The results are a `RouterOutput`.
    Operation(
        "route",
        "norm, router and the choice of experts",
        ("router",),
        "(hidden_TD) -> x_TD, experts_Tk, weights_Tk, logits_TE",
        "ffn_norm (D), router (E, D); of some models router_bias (E)",
    ),
    # Writes the outputs of n rows x to y.
    Operation(
        "expert",
        "one expert on some rows",
        EXPERT_MATRICES,
        "(x_nD, y_nD) -> None",
        "gate, up (I, D), down (D, I); of some models gate_up (2I, D) instead of gate and up, and biases",
    ),
    # rows: the expert of each row of x, in any form that the device's kernels share.
    Operation(
        "experts",
        "experts of one stack, on rows in the order of the experts",
        EXPERT_MATRICES,
        "(x_nD, rows) -> y_nD",
        "gate, up (E, D, I), down (E, I, D)",
        parts=("expert",),
    ),
    # y: outputs of experts. rows: the row of y of each pair of a token and one of its k experts. weights: the router's.
    # The residual may be overwritten.
    Operation(
        "combine",
        "weighted sum of the experts' outputs, and the residual",
        (),
        "(y_nD, rows_Tk, weights_Tk, residual_TD) -> hidden_TD",
    ),
    # experts: those of each token. counts: the rows of each expert that has any; None where the host knows none.
    Operation(
        "moe_layer",
        "all that follows attention",
        (),
        "(attended_TX, hidden_TD) -> hidden_TD, experts_Tk, counts or None",
        "those of output_projection and route, and each expert's, such as experts.0.gate (I, D)",
        parts=("output_projection", "route", "expert", "combine"),
    ),
    Operation(
        "observed_moe_layer",
        "the same, and the activations SiLU(gate x) of the experts' rows in their order, float32",
        (),
        "(attended_TX, hidden_TD) -> hidden_TD, experts_Tk, gated_nI",
        "those of output_projection and route, and each expert's, such as experts.0.gate (I, D)",
        parts=("output_projection", "route", "expert", "combine"),
    ),
    # rows: indices of the S rows of hidden_TD whose logits are wanted; they are float32.
    Operation(
        "logits",
        "last norm and LM head",
        ("lm_head",),
        "(hidden_TD, rows) -> logits_SV",
        "final_norm (D), lm_head (V, D)",
    ),
    Operation(
        "greedy",
        "logits, and the likeliest token of each row: -1 where they are not finite",
        ("lm_head",),
        "(hidden_TD, rows) -> logits_SV, tokens",
        "final_norm (D), lm_head (V, D)",
        parts=("logits",),
    ),
    Operation("product", "rows times a matrix", ("matrix",), "(x_TD) -> y_TN", "matrix (N, D)"),
)

OPERATIONS: Mapping[str, Operation] = MappingProxyType({each.name: each for each in _OPERATIONS})
"""The operations by name, in the order of a step."""


class Case(NamedTuple):
    """A case of an operation: the properties by which a kernel decides if it takes the case.

    Attributes:
        operation: name of the operation.
        rows: number of tokens, or of rows of an expert.
        formats: storage formats of the operation's matrices.
        device: device of the operation's tensors, such as "cpu".
        layer: description of the layer; None outside the layers.
        decodes: True for attention of a decode step, with one new token for each sequence.
    """

    operation: str
    rows: int
    formats: frozenset[str]
    dtype: str
    device: str
    layer: Layer | None = None
    decodes: bool = False

    @property
    def attention(self) -> GroupedAttention:
        """The attention of the case's layer; a case outside the layers has none."""
        assert self.layer is not None, "it is in a layer"
        return self.layer.grouped

    @property
    def network(self) -> FeedForward:
        """The feed-forward network of the case's layer; a case outside the layers has none."""
        assert self.layer is not None, "it is in a layer"
        return self.layer.feed_forward

    def __str__(self) -> str:
        formats = f" by weights in {', '.join(sorted(self.formats))}" if self.formats else ""
        return f"{self.operation} of {self.rows} rows of {self.dtype}{formats} on {self.device}"


class Kernel(ABC):
    """A row of the kernel table: computes one operation, for the cases that it does not refuse.

    Attributes:
        operation: name of one of `OPERATIONS`.
        name: name of the kernel, unique among the kernels for its operation.
        takes: the cases that the kernel takes, in words.
        independent: True if the bits of a row's results depend on no other row.
        made_of: names of operations whose kernels this kernel calls. If all those kernels are independent, this kernel
            counts as independent, too, even if its own `independent` is False.
        has_threads: True if the kernel runs on threads of its own, False if on torch's.
        uses_memory: True if the function that `bind` returns writes each time to the same memory for results, so that
            another micro-batch needs another call of `bind`.
    """

    operation: str
    name: str
    takes: str
    independent = False
    made_of: tuple[str, ...] = ()
    has_threads = False
    uses_memory = False

    @abstractmethod
    def refusal(self, case: Case) -> str:
        """Return the reason why the kernel does not take a case of its operation; empty if it takes the case."""

    @classmethod
    def problem(cls) -> str | None:
        """Return the reason why the kernel can take no case at all on this machine; None if it can take some."""
        return None

    @abstractmethod
    def bind(self, case: Case, weights: Any, memory: Any) -> Bound:
        """Return the function that computes a case with its weights; called only for cases that the kernel takes.

        `Operation.call` names the function's arguments and results; comments in `_OPERATIONS` explain them.

        Args:
            weights: a mapping from names to lists of row blocks, top to bottom. `Operation.weights` has names and
                shapes, and there may be others. A norm or bias is one block (N); a block of a matrix (N, D) is a tensor
                (some of N, D) in the case's dtype or, in a coded format, `CodedRows`.
            memory: a `Workspace`, whose `tensor(name, *shape, dtype=...)` holds results for `memory.rows` rows. Kernels
                with `uses_memory` write to it; others ignore it.
        """
