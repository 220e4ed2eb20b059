"""The operators of a step as rows of the table: on GPUs by kernels in Triton, whose rows depend on no others.

Results stay in the memory of the micro-batch, which later layers and steps use again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch

from moesched.models.layers import FeedForward

from . import functions, operators
from .kernel_weights import EXPERT_PARTS
from .layer_weights import Blocks, Tensor, Weights
from .memory import Memory, SharedMemory
from .resources import Resources, as_it_is
from .seam import ROWS, Bound, Case, Kernel, Routed

T = TypeVar("T")

ALIGNED_BYTES = 16
"""Rows of matrices begin at multiples of this, so that a GPU reads them in its widest loads."""
GROUPED_BYTES = 1 << 13
"""Bytes of one column of the experts' rows in a grouped call: their results fit into the plan's workspace."""
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
SPLIT = 512
"""Tokens of a part of a sequence, each of which a program attends over."""
MOST_TABLES = 1024
"""Tables of row blocks that are kept on the GPU. Streamed weights come back to the same addresses."""


class Matrix(NamedTuple):
    """A matrix, or a stack of one for each expert, as operators take it: its table and its row blocks."""

    table: Tensor
    blocks: list[Tensor]


class TritonKernel(Kernel):
    """A kernel whose rows depend on no others: every sum has one order."""

    name = "triton"
    takes = "plain weights on GPUs of compute capability 8.0 and above"
    independent = True
    uses_memory = True

    def __init__(self, resources: Resources) -> None:
        self._config = resources.config
        self._dtype = resources.dtype
        self._device = resources.device
        self._indices = resources.indices
        self._upload = resources.upload
        self._captured = resources.captured
        self._layer_norm = self._config.norm == "layer"
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def refusal(self, case: Case) -> str:
        """Refuses the CPU, other formats than row blocks, and rows that are not aligned."""
        if case.device == "cpu":
            return "it is for GPUs"
        if not case.formats <= {ROWS}:
            return "it takes row blocks"
        if case.dtype not in DTYPES:
            return f"it computes in {', '.join(DTYPES)}"
        widths = [self._config.hidden]
        if case.layer is not None:
            widths += case.layer.attention.attended_width, case.layer.feed_forward.intermediate
        if any(width * DTYPES[case.dtype] % ALIGNED_BYTES for width in widths):
            return f"its rows are multiples of {ALIGNED_BYTES} bytes"
        return ""

    def _result(self, memory: Memory, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The memory for a result, by default of the hidden states' dtype."""
        return memory.tensor(name, *shape, dtype=dtype or self._dtype, device=self._device)

    def _scratch(self, memory: Memory, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The memory for an intermediate result, by default of the hidden states' dtype."""
        return memory.scratch.tensor(name, *shape, dtype=dtype or self._dtype, device=self._device)

    def _normed(self, norm_D: Tensor, rows: int, memory: Memory) -> Callable[[Tensor], Tensor]:
        """Bind a norm, whose result no other task reads."""
        x_TD = self._scratch(memory, "normed", rows, self._config.hidden)
        settings = self._config.norm_eps, self._layer_norm

        def normed(hidden_TD: Tensor) -> Tensor:
            operators.norm(hidden_TD, norm_D, *settings, x_TD)
            return x_TD

        return normed

    def _matrix(self, *matrices: Blocks) -> Matrix:
        """Describe a matrix or a stack for the operators."""
        most = max(map(len, matrices))
        numbers: list[int] = []
        for blocks in matrices:
            first = 0
            for block in blocks:
                numbers += first, block.data_ptr()
                first += len(block)
            numbers += [first, blocks[-1].data_ptr()] * (most - len(blocks))
        padded = (chain(blocks, [blocks[-1]] * (most - len(blocks))) for blocks in matrices)
        return Matrix(self._table(tuple(numbers)).view(-1, most, 2), [*chain.from_iterable(padded)])

    def _table(self, numbers: tuple[int, ...]) -> Tensor:
        table = self._tables.get(numbers)
        if table is None:
            if len(self._tables) == MOST_TABLES:
                self._tables.clear()
            table = self._tables[numbers] = self._indices(numbers)
        return table


class TritonEmbed(TritonKernel):
    """Embeddings and angles."""

    operation = "embed"

    def refusal(self, case: Case) -> str:
        """Refuses angles with a magnitude as well."""
        plain = self._config.attention.rotary.magnitude == 1
        return super().refusal(case) or ("" if plain else "its cosines and sines have magnitude 1")

    def bind(self, case: Case, weights: Weights, memory: Memory) -> Bound:
        """Bind the lookup of embeddings: (ids, positions) -> hidden_TD, angles."""
        attention = self._config.attention
        numbers = self._result(memory, "ids and positions", 2, case.rows, dtype=torch.int64)
        frequencies_h = functions.rotary_frequencies(attention, self._device)
        hidden_TD = self._result(memory, "hidden", case.rows, self._config.hidden)
        shape = case.rows, 1, attention.head_dim
        angles = tuple(
            self._result(memory, name, *shape, dtype=torch.float32) for name in ("cosines", "sines")
        )
        look_up = self._captured(
            partial(operators.embed, *numbers, weights["embedding"][0], frequencies_h, hidden_TD, *angles)
        )

        def embed(ids: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
            self._upload([*ids, *positions], numbers)
            look_up()
            return hidden_TD, angles

        return embed


class TritonAttentionInputs(TritonKernel):
    """Norm, projection and rotation."""

    operation = "attention_inputs"

    def refusal(self, case: Case) -> str:
        """Refuses norms of whole projections, and heads that rotate in part, as well."""
        assert case.layer is not None, "it is in a layer"
        attention = case.layer.grouped
        if attention.rotary.width is not None:
            return super().refusal(case) or "it rotates whole heads"
        if attention.biases:
            return super().refusal(case) or "it adds no biases"
        whole = attention.qk_norm not in (None, "head")
        return super().refusal(case) or ("it norms heads one by one" if whole else "")

    def bind(self, case: Case, weights: Weights, memory: Memory) -> Bound:
        """Bind norm, projection and rotation: (hidden_TD, angles) -> q_THd, k_TKd, v_TKd."""
        assert case.layer is not None, "it is in a layer"
        attention = case.layer.grouped
        normed = self._normed(weights["attention_norm"][0], case.rows, memory)
        matrix = self._matrix(weights["qkv"])
        head_norms = [weights[name][0] for name in ("q_norm", "k_norm") if attention.qk_norm]
        numbers = {"q": attention.heads, "k": attention.kv_heads, "v": attention.kv_heads}
        qkv = tuple(
            self._result(memory, name, case.rows, heads, attention.head_dim)
            for name, heads in numbers.items()
        )

        def project(hidden_TD: Tensor, angles: Sequence[Tensor]) -> tuple[Tensor, ...]:
            settings = self._config.norm_eps, attention.rotary.interleaved, attention.clip
            operators.attention_inputs(normed(hidden_TD), *matrix, head_norms, *angles, *settings, *qkv)
            return qkv

        return self._captured(project)


class TritonAttention(TritonKernel):
    """Attention of new tokens over a KV cache in blocks."""

    operation = "attention"
    takes = "GPUs of compute capability 8.0 and above"

    def bind(self, case: Case, weights: object, memory: Memory) -> Bound:
        """Bind attention over the KV cache: (qkv, cached, step) -> attended_TX."""
        return (self._decode_step if case.decodes else self._prompts)(case, memory)

    def _prompts(self, case: Case, memory: Memory) -> Bound:
        """Bind attention of any number of new tokens for each sequence."""
        assert case.layer is not None, "it is in a layer"
        attention = case.layer.grouped
        window = attention.window or operators.UNLIMITED
        attended_TX = self._result(memory, "attended", case.rows, attention.attended_width)

        def attend(qkv: Sequence[Tensor], cached: Any, step: Any) -> Tensor:
            q_THd, *new = qkv
            cached.append(step, *new)
            tiles = sum(map(operators.tiles_of_queries, step.new))
            table = step.table(self._indices)
            places = cached.block_size, window, cached.keys, cached.values
            operators.attend_prompts(q_THd, step.starts, tiles, table, *places, attended_TX)
            return attended_TX

        return attend

    def _decode_step(self, case: Case, memory: Memory) -> Bound:
        """Bind attention of one new token for each sequence."""
        assert case.layer is not None, "it is in a layer"
        attention = case.layer.grouped
        heads, head_dim = attention.heads, attention.head_dim
        window = attention.window or operators.UNLIMITED
        # Another layer may be in another cache, with another table.
        upload = partial(self._uploaded, Memory(case.rows))
        attended_SX = self._result(memory, "attended", case.rows, heads * head_dim)

        @lru_cache(maxsize=1)
        def parts(count: int) -> list[Tensor]:
            """Memory for the sums, peaks and values of that many parts."""
            return [
                self._scratch(memory, name, case.rows, heads, count, *width, dtype=torch.float32)
                for name, width in (("sums", ()), ("peaks", ()), ("parts", (head_dim,)))
            ]

        def launch(qkv: Blocks, table: Tensor, block: int, cached: Blocks, *parts: Tensor) -> Tensor:
            operators.attend(*qkv, table, block, window, SPLIT, *cached, *parts)
            operators.join_parts(*parts, table, SPLIT, attended_SX)
            return attended_SX

        launch = self._captured(launch)

        def attend(qkv: Sequence[Tensor], cached: Any, step: Any) -> Tensor:
            own = parts(_power_of_two(-(-max(step.in_blocks.lengths) // SPLIT)))
            table = step.table(upload)
            return launch(qkv, table, cached.block_size, (cached.keys, cached.values), *own)

        return attend

    def _uploaded(self, memory: Memory, numbers: Sequence[int]) -> Tensor:
        """The numbers on the accelerator, in memory that lasts while sequences grow."""
        table = self._result(memory, "blocks", _power_of_two(len(numbers)), dtype=torch.int64)
        self._upload(numbers, table)
        return table


class TritonPromptAttention(TritonKernel):
    """Attention of new tokens over views of keys and values, with the bits that it has over a KV cache."""

    operation = "prompt_attention"
    takes = "GPUs of compute capability 8.0 and above"
    uses_memory = False

    def bind(self, case: Case, weights: object, memory: object) -> Bound:
        """Bind attention of prompts: (q_THd, views) -> attended_TX."""
        assert case.layer is not None, "it is in a layer"
        return partial(self._attend, case.layer.grouped.window or operators.UNLIMITED)

    def _attend(self, window: int, q_THd: Tensor, views: Sequence[functions.KVView]) -> Tensor:
        out_TX = q_THd.new_empty(len(q_THd), q_THd[0].numel())
        parts = [len(view.keys_SLKd) * view.queries for view in views]
        for view, *part in zip(views, q_THd.split(parts), out_TX.split(parts), strict=True):
            self._attend_view(window, view, *part)
        return out_TX

    def _attend_view(self, window: int, view: functions.KVView, q_THd: Tensor, out_TX: Tensor) -> None:
        """Attend over a view as over a cache in which each sequence has one block."""
        sequences, length, kv_heads, head_dim = view.keys_SLKd.shape
        block = view.keys_SLKd.stride(0) // (kv_heads * head_dim) if sequences > 1 else length
        slots = (sequences - 1) * block + length
        keys, values = (
            each.as_strided((slots, kv_heads, head_dim), (kv_heads * head_dim, head_dim, 1))
            for each in (view.keys_SLKd, view.values_SLKd)
        )
        starts = range(0, sequences * view.queries + 1, view.queries)
        numbers = self._indices([*[length] * sequences, *range(sequences), *range(sequences), *starts])
        table, starts_S = numbers.split([3 * sequences, sequences + 1])
        tiles = sequences * operators.tiles_of_queries(view.queries)
        operators.attend_prompts(q_THd, starts_S, tiles, table, block, window, keys, values, out_TX)


def _power_of_two(least: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (least - 1).bit_length()


class TritonOutputProjection(TritonKernel):
    """Output projection and residual."""

    operation = "output_projection"

    def bind(self, case: Case, weights: Weights, memory: Memory) -> Bound:
        """Bind the output projection with the residual: (attended_TX, residual_TD) -> hidden_TD."""
        matrix = self._matrix(weights["o"])
        out_TD = self._result(memory, "projected", case.rows, self._config.hidden)

        def project(attended_TX: Tensor, residual_TD: Tensor) -> Tensor:
            operators.output_projection(attended_TX, *matrix, residual_TD, out_TD)
            return out_TD

        return self._captured(project)


class TritonRoute(TritonKernel):
    """Norm, router, and the choice of experts."""

    operation = "route"

    def refusal(self, case: Case) -> str:
        """Refuses a network without a router as well."""
        assert case.layer is not None, "it is in a layer"
        network = case.layer.feed_forward
        plain = network.experts > 1 and network.router.score == "softmax" and not network.router.corrected
        return super().refusal(case) or ("" if plain else "it takes a router with softmax")

    def bind(self, case: Case, weights: Weights, memory: Memory) -> Bound:
        """Bind norm, router and the choice of experts: (hidden_TD) -> Routed."""
        assert case.layer is not None, "it is in a layer"
        network, rows = case.layer.feed_forward, case.rows
        norm_D, matrix = weights["ffn_norm"][0], self._matrix(weights["router"])
        routed = Routed(
            self._result(memory, "normed", rows, self._config.hidden),
            self._result(memory, "experts", rows, network.top_k, dtype=torch.int64),
            self._result(memory, "weights", rows, network.top_k, dtype=torch.float32),
            self._result(memory, "router logits", rows, network.experts, dtype=torch.float32),
        )
        settings = self._config.norm_eps, self._layer_norm, network.router.normalised

        def route(hidden_TD: Tensor) -> Routed:
            operators.route(hidden_TD, norm_D, *matrix, *settings, *routed)
            return routed

        return self._captured(route)


class TritonExpert(TritonKernel):
    """One expert on its rows."""

    operation = "expert"
    uses_memory = False

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind one expert: (x_nD, y_nD) -> None."""
        assert case.layer is not None, "it is in a layer"
        intermediate = case.layer.feed_forward.intermediate
        gate, up, down = (self._matrix(weights[part]) for part in EXPERT_PARTS)

        def run(x_nD: Tensor, y_nD: Tensor) -> None:
            starts = self._indices([0, len(x_nD)])
            inner_nI = x_nD.new_empty(len(x_nD), intermediate)
            operators.gate_and_up(x_nD, None, starts, *gate, *up, inner_nI)
            operators.down(inner_nI, starts, *down, y_nD)

        return run


class TritonCombine(TritonKernel):
    """Weighted sum of the experts' outputs, and the residual."""

    operation = "combine"

    def bind(self, case: Case, weights: object, memory: Memory) -> Bound:
        """Bind the weighted sum of the experts' outputs: (y_nD, rows_Tk, weights_Tk, residual_TD) -> hidden_TD."""
        out_TD = self._result(memory, "hidden", case.rows, self._config.hidden)

        def combine(y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor) -> Tensor:
            operators.combine(y_nD, rows_Tk, weights_Tk, residual_TD, out_TD)
            return out_TD

        return combine


class TritonMoELayer(TritonKernel):
    """All that follows attention, in six launches; the host need not know the routing before its end.

    The experts of many tokens are computed for one part of the tokens after the other, as memory is limited.
    """

    operation = "moe_layer"

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        parts = replace(resources, captured=as_it_is)
        self._project = TritonOutputProjection(parts)
        self._route = TritonRoute(parts)

    def refusal(self, case: Case) -> str:
        """Refuses what the router's kernel does."""
        return self._route.refusal(case)

    def bind(self, case: Case, weights: Weights, memory: Memory) -> Bound:
        """Bind all that follows attention: (attended_TX, hidden_TD) -> hidden_TD, experts_Tk, None."""
        assert case.layer is not None, "it is in a layer"
        network = case.layer.feed_forward
        shared = SharedMemory(case.rows, memory.scratch)
        project, route = (part.bind(case, weights, shared) for part in (self._project, self._route))
        tokens = min(case.rows, max(1, GROUPED_BYTES // DTYPES[case.dtype] // network.top_k))
        add_experts = self._experts(tokens, network, weights, memory)
        out_TD = self._result(memory, "hidden", case.rows, self._config.hidden)

        def run(attended_TX: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor, None]:
            projected_TD = project(attended_TX, hidden_TD)
            routed = route(projected_TD)
            whole = routed.x_TD, routed.experts_Tk, routed.weights_Tk, projected_TD, out_TD
            for part in zip(*(each.split(tokens) for each in whole), strict=True):
                add_experts(*part)
            return out_TD, routed.experts_Tk, None

        return self._captured(run)

    def _experts(
        self, tokens: int, network: FeedForward, weights: Weights, memory: Memory
    ) -> Callable[..., None]:
        """Bind the experts of up to so many tokens: (x_TD, experts_Tk, weights_Tk, residual_TD, out_TD) -> None."""
        gates, ups, downs = (
            self._matrix(*(weights[f"experts.{expert}.{part}"] for expert in range(network.experts)))
            for part in EXPERT_PARTS
        )
        rows = tokens * network.top_k
        most_Tk = self._scratch(memory, "rows", tokens, network.top_k, dtype=torch.int64)
        pairs_n = self._scratch(memory, "pairs", rows, dtype=torch.int32)
        starts_E = self._scratch(memory, "starts", network.experts + 1, dtype=torch.int64)
        inner_nI = self._scratch(memory, "inner", rows, network.intermediate)
        y_nD = self._scratch(memory, "outputs", rows, self._config.hidden)

        def add(
            x_TD: Tensor, experts_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor, out_TD: Tensor
        ) -> None:
            rows_Tk, n = most_Tk[: len(x_TD)], experts_Tk.numel()
            operators.sort_rows(experts_Tk, rows_Tk, pairs_n[:n], starts_E)
            operators.gate_and_up(x_TD, pairs_n[:n], starts_E, *gates, *ups, inner_nI[:n])
            operators.down(inner_nI[:n], starts_E, *downs, y_nD[:n])
            operators.combine(y_nD[:n], rows_Tk, weights_Tk, residual_TD, out_TD)

        return add


class TritonLogits(TritonKernel):
    """Last norm and LM head."""

    operation = "logits"

    def bind(self, case: Case, weights: Weights, memory: Memory) -> Bound:
        """Bind last norm and LM head: (hidden_TD, rows) -> logits_SV."""
        return partial(self._on_rows, self._captured(self._logits(case, weights, memory)))

    def _logits(self, case: Case, weights: Weights, memory: Memory) -> Callable[[Tensor], Tensor]:
        normed = self._normed(weights["final_norm"][0], case.rows, memory)
        matrix = self._matrix(weights["lm_head"])
        vocabulary = sum(map(len, weights["lm_head"]))
        logits_SV = self._scratch(memory, "logits", case.rows, vocabulary, dtype=torch.float32)

        def compute(hidden_SD: Tensor) -> Tensor:
            operators.logits(normed(hidden_SD), *matrix, logits_SV)
            return logits_SV

        return compute

    def _on_rows(self, run: Callable[[Tensor], T], hidden_TD: Tensor, rows: Sequence[int]) -> T:
        whole = len(rows) == len(hidden_TD)
        return run(hidden_TD if whole else hidden_TD.index_select(0, self._indices(rows)))


class TritonGreedy(TritonLogits):
    """Logits, and the token with the largest one."""

    operation = "greedy"

    def bind(self, case: Case, weights: Weights, memory: Memory) -> Bound:
        """Bind logits and the likeliest tokens: (hidden_TD, rows) -> logits_SV, tokens."""
        logits = self._logits(case, weights, memory)
        tokens_S = self._scratch(memory, "tokens", case.rows, dtype=torch.int64)

        def compute(hidden_SD: Tensor) -> tuple[Tensor, Tensor]:
            logits_SV = logits(hidden_SD)
            operators.likeliest(logits_SV, tokens_S)
            return logits_SV, tokens_S

        launch = partial(self._on_rows, self._captured(compute))

        def choose(hidden_TD: Tensor, rows: Sequence[int]) -> tuple[Tensor, list[int]]:
            logits_SV, tokens_S = launch(hidden_TD, rows)
            return logits_SV, tokens_S.tolist()

        return choose


TRITON = (
    TritonEmbed,
    TritonAttentionInputs,
    TritonAttention,
    TritonPromptAttention,
    TritonOutputProjection,
    TritonRoute,
    TritonExpert,
    TritonCombine,
    TritonMoELayer,
    TritonLogits,
    TritonGreedy,
)
