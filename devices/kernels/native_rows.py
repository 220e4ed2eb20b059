"""The kernels of the native library for a bfloat16 model on the CPU: each operation is one call.

Roundings to bfloat16 are where torch has them: after each product, norm, rotation and sum.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import torch

from moesched.models.config import ModelConfig

from ..native.arguments import Head, Inputs, Layer, Tokens
from ..native.compiled import formats, library, why_unusable
from ..native.kernels import NativeKernels, address, check, matrix_of, numbers
from . import functions
from .layer_weights import Tensor, Weights
from .memory import Memory
from .native_preparation import Preparation
from .resources import Resources
from .seam import CODED, COLUMNS, ROWS, Bound, Case, Kernel, Routed

BFLOAT16 = torch.bfloat16
MOST_COLUMN_ROWS = 16
MOST_GROUPS = 64
"""Of the experts of a router, as in moe_layer.c."""


class NativeKernel(Kernel):
    """A kernel of the library. A row's bits depend on no other row, and on the instruction set alone."""

    name = "native"
    takes = "rows of bfloat16 by coded weights, and few by bfloat16 ones, on a CPU"
    independent = True
    has_threads = True

    def __init__(self, resources: Resources) -> None:
        assert resources.threads is not None, "the library is there"
        self._threads: NativeKernels = resources.threads
        self._config: ModelConfig = resources.config
        self._prepare = Preparation(resources.config)
        self.name = f"native {self._threads.instruction_set}"

    @classmethod
    def problem(cls) -> str | None:
        """The reason why the native library cannot be used: it is missing or does not load; None if it can."""
        return why_unusable() or None

    def refusal(self, case: Case) -> str:
        """A reason to refuse what the library lacks, and many rows, for which torch is faster; else empty."""
        if case.device != "cpu":
            return "it is for the CPU"
        if case.dtype != "bfloat16":
            return "it multiplies bfloat16 numbers"
        coded = case.formats - {ROWS}
        if not coded <= set(formats()):
            return f"it reads plain rows and {', '.join(sorted(CODED & set(formats())))}"
        if not case.rows:
            return "it multiplies rows"
        if not coded and case.rows > self._threads.most_rows:
            return f"torch is faster from {self._threads.most_rows + 1} rows on"
        if case.layer is not None and case.layer.feed_forward.router.groups > MOST_GROUPS:
            return f"its routers have at most {MOST_GROUPS} groups"
        return ""

    def _bound(self, function: Callable[..., int], arguments: ctypes.Structure) -> Callable[[], int]:
        return self._threads.bound(function, arguments)


class NativeMemoryKernel(NativeKernel):
    """A kernel that writes its results to the memory of a micro-batch."""

    uses_memory = True


class NativeEmbed(NativeMemoryKernel):
    """Embeddings and angles."""

    operation = "embed"

    def bind(self, case: Case, weights: Weights, memory: Memory) -> Bound:
        """Bind the lookup of embeddings: (ids, positions, steps) -> hidden_TD, angles."""
        attention = self._config.attention
        turning = attention.rotary.turning(attention.head_dim)
        hidden_TD = hidden_states(memory, self._config)
        cosines, sines = (
            memory.tensor(name, memory.rows, 1, turning, dtype=torch.float32) for name in ("cosines", "sines")
        )
        frequencies = functions.rotary_frequencies(attention, torch.device("cpu"))
        ids, positions, embedding = (
            numbers(memory.rows),
            numbers(memory.rows),
            matrix_of(weights["embedding"]),
        )
        arguments = Tokens(
            tokens=memory.rows,
            hidden=self._config.hidden,
            turning=turning,
            magnitude=attention.rotary.magnitude,
            factor=self._config.embedding_factor,
            ids=address(ids),
            positions=address(positions),
            embedding=address(embedding),
            frequencies=frequencies.data_ptr(),
            x=hidden_TD.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
        )
        run = self._bound(library().moesched_embed, arguments)
        room = memoryview(ids), memoryview(positions)  # which keep their size
        return partial(_embed, run, room, (hidden_TD, (cosines, sines)), (frequencies, embedding))


def _embed(
    run: Callable[[], int],
    room: tuple[memoryview, memoryview],
    results: tuple[Tensor, tuple[Tensor, Tensor]],
    held: object,
    ids: Sequence[int],
    positions: Sequence[int],
    _: object,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    room[0][:], room[1][:] = array("q", ids), array("q", positions)
    check(run())
    return results


class NativeAttentionInputs(NativeMemoryKernel):
    """Norm, projection and rotation."""

    operation = "attention_inputs"

    def bind(self, case: Case, weights: Weights, memory: Memory) -> Bound:
        """Bind norm, projection and rotation: (hidden_TD, angles) -> q_THd, k_TKd, v_TKd."""
        assert case.layer is not None, "it is in a layer"
        attention = case.layer.grouped
        queries, keys, values = (
            memory.tensor(name, memory.rows, heads, attention.head_dim, dtype=BFLOAT16)
            for name, heads in (
                ("queries", attention.heads),
                ("keys", attention.kv_heads),
                ("values", attention.kv_heads),
            )
        )
        inputs = weights.arguments(Inputs, self._prepare.inputs)
        inputs.tokens = memory.rows
        inputs.queries, inputs.keys, inputs.values = (each.data_ptr() for each in (queries, keys, values))
        run = self._bound(library().moesched_attention_inputs, inputs)
        return _AttentionInputs(run, inputs, (queries, keys, values))


class _AttentionInputs:
    """A bound call; it reads addresses again only when its inputs are other tensors than in the last call."""

    __slots__ = ("_angles", "_arguments", "_hidden_TD", "_qkv", "_run")

    def __init__(self, run: Callable[[], int], arguments: Inputs, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
        self._run = run
        self._arguments = arguments
        self._qkv = qkv
        self._hidden_TD: Tensor | None = None
        self._angles: tuple[Tensor, Tensor] | None = None

    def __call__(self, hidden_TD: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        if hidden_TD is not self._hidden_TD or angles is not self._angles:
            self._hidden_TD, self._angles = hidden_TD, angles
            self._arguments.x = hidden_TD.data_ptr()
            self._arguments.cosines, self._arguments.sines = (each.data_ptr() for each in angles)
        check(self._run())
        return self._qkv


class NativeRoute(NativeMemoryKernel):
    """Norm and router."""

    operation = "route"

    def refusal(self, case: Case) -> str:
        """Refuses layers without experts, too."""
        assert case.layer is not None, "it is in a layer"
        return super().refusal(case) or ("" if case.layer.feed_forward.experts else "it chooses experts")

    def bind(self, case: Case, weights: Weights, memory: Memory) -> Bound:
        """Bind norm, router and the choice of experts: (hidden_TD) -> Routed."""
        choices = choices_in(memory, self._config)
        layer = weights.arguments(Layer, self._prepare.layer)
        layer.tokens, layer.output_weights = memory.rows, None
        scores_TE = _write_choices(layer, choices, memory, case)
        run = self._bound(library().moesched_route, layer)
        return partial(_route, run, layer, choices, scores_TE)


def _route(
    run: Callable[[], int], layer: Layer, choices: Routed, held: Tensor | None, hidden_TD: Tensor
) -> Routed:
    layer.residual = hidden_TD.data_ptr()
    check(run())
    return choices


class NativeExpert(NativeKernel):
    """One expert."""

    operation = "expert"

    def refusal(self, case: Case) -> str:
        """Refuses experts that are more than three matrices, too."""
        assert case.layer is not None, "it is in a layer"
        usual = case.layer.feed_forward.is_usual
        return super().refusal(case) or ("" if usual else "it runs experts of three matrices")

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind one expert: (x_nD, y_nD) -> None."""
        return self._threads.prepared_expert(weights["gate"], weights["up"], weights["down"])


class NativeCombine(NativeMemoryKernel):
    """Weighted sum of the experts' outputs, and the residual."""

    operation = "combine"

    def bind(self, case: Case, weights: object, memory: Memory) -> Bound:
        """Bind the weighted sum of the experts' outputs: (y_nD, rows_Tk, weights_Tk, residual_TD) -> hidden_TD.

        The result may be in the memory of the residual.
        """
        return partial(_combine, hidden_states(memory, self._config))


def _combine(
    out_TD: Tensor, y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor
) -> Tensor:
    tensors = (y_nD, rows_Tk, weights_Tk, residual_TD, out_TD)
    sizes = (len(residual_TD), residual_TD.shape[1], rows_Tk.shape[1])
    library().moesched_combine(*sizes, *(each.data_ptr() for each in tensors))
    return out_TD


class NativeMoELayer(NativeMemoryKernel):
    """The operations of a layer after attention: output projection, norm, router, experts, and their weighted sum."""

    operation = "moe_layer"

    def refusal(self, case: Case) -> str:
        """Refuses networks that every token uses, experts that are more than three matrices, and a bias, too."""
        assert case.layer is not None, "it is in a layer"
        network = case.layer.feed_forward
        usual = network.is_usual and "o" not in case.layer.grouped.biases
        return super().refusal(case) or (
            "it runs routed experts"
            if network.shared
            else ("" if usual else "it runs experts of three matrices, and adds no bias")
        )

    def bind(self, case: Case, weights: Weights, memory: Memory) -> Bound:
        """Bind all that follows attention: (attended_TX, hidden_TD) -> hidden_TD, experts_Tk, counts."""
        hidden_TD, choices = hidden_states(memory, self._config), choices_in(memory, self._config)
        projected_TD = memory.tensor("projected", *hidden_TD.shape, dtype=BFLOAT16)
        counts = numbers(self._config.routed.experts)
        layer = weights.arguments(Layer, self._prepare.layer)
        layer.tokens, layer.projected = memory.rows, projected_TD.data_ptr()
        layer.out, layer.counts = hidden_TD.data_ptr(), address(counts)
        scores_TE = _write_choices(layer, choices, memory, case)
        run = self._bound(library().moesched_moe_layer, layer)
        return _MoELayer(run, layer, hidden_TD, choices, (projected_TD, scores_TE), counts)


class _MoELayer:
    """A bound call; it reads addresses again only when its inputs are other tensors than in the last call."""

    __slots__ = (
        "_attended_TX",
        "_between",
        "_counts",
        "_experts_Tk",
        "_layer",
        "_out_TD",
        "_residual_TD",
        "_run",
    )

    def __init__(
        self,
        run: Callable[[], int],
        layer: Layer,
        out_TD: Tensor,
        choices: Routed,
        between: tuple[Tensor | None, ...],
        counts: array[int],
    ) -> None:
        self._run = run
        self._layer = layer
        self._out_TD = out_TD
        self._between = choices, between  # which C writes
        self._experts_Tk = choices.experts_Tk
        self._counts = counts
        self._attended_TX: Tensor | None = None
        self._residual_TD: Tensor | None = None

    def __call__(self, attended_TX: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor, dict[int, int]]:
        if attended_TX is not self._attended_TX or residual_TD is not self._residual_TD:
            self._attended_TX, self._residual_TD = attended_TX, residual_TD
            self._layer.attended, self._layer.residual = attended_TX.data_ptr(), residual_TD.data_ptr()
        check(self._run())
        counts = {expert: rows for expert, rows in enumerate(self._counts) if rows}
        return self._out_TD, self._experts_Tk, counts


class NativeLogits(NativeKernel):
    """Logits of some rows, each time in new memory."""

    operation = "logits"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind last norm and LM head: (hidden_TD, rows) -> logits_SV."""
        return partial(_logits, self._threads, weights.arguments(Head, self._prepare.head))


def _logits(threads: NativeKernels, head: Head, hidden_TD: Tensor, rows: Sequence[int]) -> Tensor:
    call = HeadCall(threads, head, rows)
    call(hidden_TD)
    return call.logits_SV


class NativeGreedy(NativeMemoryKernel):
    """Logits and the likeliest tokens, in memory that the next call for the same number of rows overwrites."""

    operation = "greedy"

    def bind(self, case: Case, weights: Weights, memory: Memory) -> Bound:
        """Bind logits and the likeliest tokens: (hidden_TD, rows) -> logits_SV, tokens."""
        return _Greedy(self._threads, weights.arguments(Head, self._prepare.head))


class _Greedy:
    """A bound call; it makes a new `HeadCall` only when the rows differ from the last call's."""

    def __init__(self, threads: NativeKernels, head: Head) -> None:
        self._threads = threads
        self._head = head
        self._rows: Sequence[int] = ()
        self._call: HeadCall | None = None

    def __call__(self, hidden_TD: Tensor, rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        call = self._call
        if call is None or rows != self._rows:
            call = self._call = HeadCall(self._threads, self._head, rows)
            self._rows = rows
        return call.logits_SV, call(hidden_TD)


class HeadCall:
    """The call for the logits of some rows, with memory for them.

    Args:
        head: the prepared arguments, which are copied.

    Attributes:
        logits_SV: logits of each row, float32.
    """

    def __init__(self, threads: NativeKernels, head: Head, rows: Sequence[int]) -> None:
        head = Head.from_buffer_copy(head)
        self._chosen = array("q", rows)
        self._likeliest = numbers(len(rows))
        self._head = head
        self._hidden_TD: Tensor | None = None
        self.logits_SV = torch.empty(len(rows), head.vocabulary)
        head.rows, head.chosen = len(rows), address(self._chosen)
        head.logits, head.likeliest = self.logits_SV.data_ptr(), address(self._likeliest)
        self._run = threads.bound(library().moesched_logits, head)

    def __call__(self, hidden_TD: Tensor) -> list[int]:
        """Compute the logits; returns the likeliest token of each row, -1 if its logits are not finite."""
        if hidden_TD is not self._hidden_TD:
            self._hidden_TD, self._head.x = hidden_TD, hidden_TD.data_ptr()
        check(self._run())
        return self._likeliest.tolist()


class NativeProduct(NativeKernel):
    """A product by the row blocks of a matrix."""

    operation = "product"

    def refusal(self, case: Case) -> str:
        """Refuse row blocks in several formats, too."""
        several = len(case.formats) > 1
        return super().refusal(case) or ("it reads row blocks in one format" if several else "")

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind the product with a matrix: (x_TD) -> y_TN."""
        return partial(self._threads.linear, blocks=weights["matrix"])


class NativeColumns(NativeProduct):
    """A product by a matrix that is stored transposed."""

    takes = f"{MOST_COLUMN_ROWS} rows of bfloat16 and less by matrices that are stored transposed, on a CPU"

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        self.name = f"{self.name}, columns"

    def refusal(self, case: Case) -> str:
        """Refuse many rows, and other matrices."""
        if case.formats != {COLUMNS}:
            return "it reads matrices that are stored transposed"
        if case.rows > MOST_COLUMN_ROWS:
            return f"torch is faster from {MOST_COLUMN_ROWS + 1} rows on"
        return super().refusal(case._replace(formats=frozenset({ROWS})))

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind the product with a matrix: (x_TD) -> y_TN."""
        return partial(self._threads.linear_by_columns, blocks=weights["matrix"])


def hidden_states(memory: Memory, config: ModelConfig) -> Tensor:
    """The tensor for hidden states, which all layers share."""
    return memory.tensor("hidden", memory.rows, config.hidden, dtype=BFLOAT16)


def choices_in(memory: Memory, config: ModelConfig) -> Routed:
    """The tensors for a router's result; logits begin as zeros, which a single expert keeps."""
    rows, routed = memory.rows, config.routed
    return Routed(
        memory.tensor("experts' input", rows, config.hidden, dtype=BFLOAT16),
        memory.tensor("experts", rows, routed.top_k, dtype=torch.int64),
        memory.tensor("weights", rows, routed.top_k, dtype=torch.float32),
        memory.tensor("router logits", rows, routed.experts, dtype=torch.float32, zero=True),
    )


def _write_choices(layer: Layer, choices: Routed, memory: Memory, case: Case) -> Tensor | None:
    """Write the addresses of a router's result; returns the tensor for its scores, which only C reads."""
    assert case.layer is not None, "it is in a layer"
    layer.x, layer.chosen, layer.weights, layer.logits = (
        each.data_ptr() for each in choices if each is not None
    )
    network = case.layer.feed_forward
    if network.router.score == "softmax":
        return None
    scores_TE = memory.tensor("router scores", memory.rows, network.experts, dtype=torch.float32)
    layer.scores = scores_TE.data_ptr()
    return scores_TE


NATIVE = (
    NativeEmbed,
    NativeAttentionInputs,
    NativeRoute,
    NativeExpert,
    NativeCombine,
    NativeMoELayer,
    NativeLogits,
    NativeGreedy,
    NativeProduct,
    NativeColumns,
)
