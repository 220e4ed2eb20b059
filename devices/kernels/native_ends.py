"""The beginning and the end of a step by the native library: embeddings and angles, logits and the likeliest tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..native.arguments import Head, Tokens
from ..native.compiled import library
from ..native.kernels import NativeKernels, address, matrix_of, no_memory, numbers
from . import qkv_functions
from .layer_weights import Tensor, Weights
from .native_kernel import NativeKernel, NativeMemoryKernel, hidden_states
from .seam import Bound, Case
from .workspace import Workspace


class NativeEmbed(NativeMemoryKernel):
    """Looks up the embeddings of tokens, and computes cosines and sines of rotary angles for their positions."""

    operation = "embed"

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        attention = self._config.attention
        turning = attention.rotary.turning(attention.head_dim)
        hidden_TD = hidden_states(memory, self._config)
        cosines, sines = (
            memory.tensor(name, memory.rows, 1, turning, dtype=torch.float32) for name in ("cosines", "sines")
        )
        frequencies = qkv_functions.rotary_frequencies(attention, torch.device("cpu"))
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
    if run():
        raise no_memory()
    return results


class NativeLogits(NativeKernel):
    """Computes the logits of the rows of hidden states that a call asks for, into new memory at each call."""

    operation = "logits"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        return partial(_logits, self._threads, weights.arguments(Head, self._prepare.head))


def _logits(threads: NativeKernels, head: Head, hidden_TD: Tensor, rows: Sequence[int]) -> Tensor:
    call = HeadCall(threads, head, rows)
    call(hidden_TD)
    return call.logits_SV


class NativeGreedy(NativeMemoryKernel):
    """Computes the logits and the likeliest token of each row of hidden states that a call asks for.

    A call with the same row indices as the call before overwrites the results of that call.
    """

    operation = "greedy"

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        return _Greedy(self._threads, weights.arguments(Head, self._prepare.head))


class _Greedy:
    """A bound kernel that computes logits and likeliest tokens; it makes a new `HeadCall` only if `rows` changed."""

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
    """A native call that computes the logits of some rows of hidden states, with memory for the results.

    Args:
        head: struct with the native arguments that the weights of norm and LM head determine; the call keeps a copy.
        rows: indices of the rows of the hidden states.

    Attributes:
        logits_SV: logits, float32: a row for each of `rows`, a column for each token of the vocabulary.
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
        """Compute the logits; returns the likeliest token of each row, -1 where the largest logit is not finite."""
        if hidden_TD is not self._hidden_TD:
            self._hidden_TD, self._head.x = hidden_TD, hidden_TD.data_ptr()
        if self._run():
            raise no_memory()
        return self._likeliest.tolist()


NATIVE_ENDS = (NativeEmbed, NativeLogits, NativeGreedy)
