"""The kernel table's kernels in Triton that come before the experts: projections, and attention over the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from moesched.models.replayed import PART_TOKENS

from . import attention_functions, operators
from .layer_weights import Blocks, Tensor, Weights
from .resources import Resources
from .seam import Bound, Case
from .triton_kernel import TritonKernel, power_of_two
from .workspace import Workspace


class TritonAttentionInputs(TritonKernel):
    """Normalises hidden states, projects them to queries, keys and values, and rotates queries and keys."""

    operation = "attention_inputs"

    def refusal(self, case: Case) -> str:
        """Return the reason why a case is refused; empty if the kernel takes the case.

        Refused are norms of whole projections, partial rotation, biases, and all that `TritonKernel` refuses.
        """
        attention = case.attention
        refusals = {
            "it norms heads one by one": attention.qk_norm not in (None, "head"),
            "it rotates whole heads": attention.rotary.width is not None,
            "it adds no biases": bool(attention.biases),
        }
        return super().refusal(case) or next((reason for reason, true in refusals.items() if true), "")

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        attention = case.attention
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

        return self._captured(project, memory)


class TritonAttention(TritonKernel):
    """Computes attention of new tokens over a KV cache that is stored in blocks, in decode steps and for prompts."""

    operation = "attention"
    takes = "GPUs of compute capability 8.0 and above"

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        self._bind = resources.table.bind

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        return self._decode_step(case, memory) if case.decodes else self._prompts(case, weights, memory)

    def _prompts(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        """Return the function that attends in a prefill step, from any number of new tokens of each sequence."""
        attention = case.attention
        window = attention.window or operators.UNLIMITED
        attended_TX = self._result(memory, "attended", case.rows, attention.attended_width)
        over_views = self._bind(case._replace(operation="prompt_attention"), weights)

        def attend(qkv: Sequence[Tensor], cached: Any, step: Any) -> Tensor:
            q_THd, *new = qkv
            if not step.in_place:
                attended: Tensor = over_views(q_THd, cached.extended(step, *new))
                return attended
            cached.append(step, *new)
            tiles = sum(map(operators.tiles_of_queries, step.new))
            table = step.table(self._indices)
            places = cached.block_size, window, cached.keys, cached.values
            operators.attend_prompts(q_THd, step.starts, tiles, table, *places, attended_TX)
            return attended_TX

        return attend

    def _decode_step(self, case: Case, memory: Workspace) -> Bound:
        """Return the function that attends in a decode step, from one new token of each sequence."""
        attention = case.attention
        heads, head_dim = attention.heads, attention.head_dim
        window = attention.window or operators.UNLIMITED
        # Another layer may be in another cache, with another table.
        upload = partial(self._uploaded, Workspace(case.rows))
        attended_SX = self._result(memory, "attended", case.rows, heads * head_dim)

        @lru_cache(maxsize=1)
        def parts(count: int) -> list[Tensor]:
            """Return memory for the results of `operators.attend` for `count` parts: sums, peaks, weighted values."""
            return [
                self._scratch(memory, name, case.rows, heads, count, *width, dtype=torch.float32)
                for name, width in (("sums", ()), ("peaks", ()), ("parts", (head_dim,)))
            ]

        def launch(qkv: Blocks, table: Tensor, block: int, cached: Blocks, *parts: Tensor) -> Tensor:
            operators.attend(*qkv, table, block, window, PART_TOKENS, *cached, *parts)
            operators.join_parts(*parts, table, PART_TOKENS, attended_SX)
            return attended_SX

        launch = self._captured(launch, memory)

        def attend(qkv: Sequence[Tensor], cached: Any, step: Any) -> Tensor:
            own = parts(parts_of(step))
            table = step.table(upload)
            return launch(qkv, table, cached.block_size, (cached.keys, cached.values), *own)

        return attend

    def _uploaded(self, memory: Workspace, numbers: Sequence[int]) -> Tensor:
        """Copy numbers to an int64 tensor of `memory` on the accelerator, and return the tensor.

        The tensor's size is rounded up to a power of two, so the tensor seldom moves while sequences grow.
        """
        table = self._result(memory, "blocks", power_of_two(len(numbers)), dtype=torch.int64)
        self._upload(numbers, table)
        return table


def parts_of(step: Any) -> int:
    """Return the number of parts that attention cuts a step's longest sequence into, rounded up to a power of two."""
    return power_of_two(-(-max(step.in_blocks.lengths) // PART_TOKENS))


class TritonPromptAttention(TritonKernel):
    """Attends from new tokens over views of keys and values, with the same bits as attention over a KV cache."""

    operation = "prompt_attention"
    takes = "GPUs of compute capability 8.0 and above"
    uses_memory = False

    def bind(self, case: Case, weights: object, memory: object) -> Bound:
        return partial(self._attend, case.attention.window or operators.UNLIMITED)

    def _attend(self, window: int, q_THd: Tensor, views: Sequence[attention_functions.KVView]) -> Tensor:
        out_TX = q_THd.new_empty(len(q_THd), q_THd[0].numel())
        parts = [len(view.keys_SLKd) * view.queries for view in views]
        for view, *part in zip(views, q_THd.split(parts), out_TX.split(parts), strict=True):
            self._attend_view(window, view, *part)
        return out_TX

    def _attend_view(
        self, window: int, view: attention_functions.KVView, q_THd: Tensor, out_TX: Tensor
    ) -> None:
        """Attend over a view, as if over a KV cache with one block for each sequence; write the result to out_TX."""
        sequences, length, kv_heads, head_dim = view.keys_SLKd.shape
        block = view.keys_SLKd.stride(0) // (kv_heads * head_dim) if sequences > 1 else length
        slots = (sequences - 1) * block + length
        keys, values = (
            each.as_strided((slots, kv_heads, head_dim), (kv_heads * head_dim, head_dim, 1))
            for each in (view.keys_SLKd, view.values_SLKd)
        )
        starts = range(0, sequences * view.queries + 1, view.queries)
        numbers = self._table((*[length] * sequences, *range(sequences), *range(sequences), *starts))
        table, starts_S = numbers.split([3 * sequences, sequences + 1])
        tiles = sequences * operators.tiles_of_queries(view.queries)
        operators.attend_prompts(q_THd, starts_S, tiles, table, block, window, keys, values, out_TX)
