"""The kernels of the native library for attention on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..native.attention import (
    DTYPES,
    PROMPT_INSTRUCTIONS,
    AttentionCall,
    NativeAttention,
    refuses_prompts,
)
from ..native.compiled import instruction_sets
from .layer_weights import Tensor, Weights, sinks_of
from .native_kernel import LibraryKernel
from .resources import Resources
from .seam import Bound, Case
from .workspace import Workspace

QKV = tuple[Tensor, Tensor, Tensor]


class NativeAttentionKernel(LibraryKernel):
    """The base of the native library's kernels for attention; holds the library's threads and the model's dtype."""

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        self._attention = NativeAttention(self._threads)
        self._dtype = resources.dtype


class NativeDecodeAttention(NativeAttentionKernel):
    """Attends in a decode step: from one new token of each sequence to the sequence's KV cache, which is in blocks."""

    operation = "attention"
    takes = "decode steps in float32 or bfloat16 on a CPU"
    uses_memory = True

    def refusal(self, case: Case) -> str:
        """Return the reason to refuse a case: prompts, a GPU, or a dtype that the library lacks; else empty."""
        if case.device != "cpu":
            return "it is for the CPU"
        if self._dtype not in DTYPES:
            return "it attends in float32 and bfloat16"
        return "" if case.decodes else "it takes one new token for each sequence"

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        attention = case.attention
        attended_TX = memory.tensor("attended", memory.rows, attention.attended_width, dtype=self._dtype)
        prepared = partial(self._attention.prepared, sinks_H=sinks_of(weights), scale=attention.scale)
        return _Attention(prepared, attended_TX).attend


class _Attention:
    """A bound kernel of the native library for attention over a KV cache.

    The library's arguments are prepared anew only if the inputs are other tensors or another cache than before.
    """

    __slots__ = ("_attended_TX", "_cached", "_call", "_prepared", "_qkv")

    def __init__(self, prepared: Callable[..., AttentionCall], attended_TX: Tensor) -> None:
        self._prepared = prepared
        self._attended_TX = attended_TX
        self._qkv: QKV | None = None
        self._cached: object = None
        self._call: AttentionCall

    def attend(self, qkv: QKV, cached: Any, step: Any) -> Tensor:
        if qkv is not self._qkv or cached is not self._cached:
            self._qkv, self._cached = qkv, cached
            self._call = self._prepared(*qkv, cached.addresses, self._attended_TX)
        self._call(step.in_blocks)
        return self._attended_TX


class NativePromptAttention(NativeAttentionKernel):
    """Attends in a prefill step: from all new tokens of prompts to the prompts' keys and values."""

    operation = "prompt_attention"
    takes = "bfloat16 on a CPU with AVX512_BF16 and no AMX"

    @classmethod
    def problem(cls) -> str | None:
        """Return the reason why the library cannot attend to prompts, such as missing instructions; None if it can."""
        best = next(iter(instruction_sets()), "")
        return super().problem() or (None if best == PROMPT_INSTRUCTIONS else f"this processor has {best}")

    def refusal(self, case: Case) -> str:
        """Return the reason to refuse a case: a GPU, or a dtype or head size that the library lacks; else empty."""
        if case.device != "cpu":
            return "it is for the CPU"
        if case.dtype != "bfloat16":
            return "it attends in bfloat16"
        attention = case.attention
        heads = attention.heads, attention.kv_heads, attention.head_dim
        return refuses_prompts(self._threads.instruction_set, *heads)

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        attention, sinks_H = case.attention, sinks_of(weights)
        attend = self._attention.attend_prompts
        return partial(attend, window=attention.window, sinks_H=sinks_H, scale=attention.scale)


NATIVE_ATTENTION = (NativeDecodeAttention, NativePromptAttention)
