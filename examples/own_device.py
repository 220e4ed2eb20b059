"""A device in numpy for machines with one memory, in float32. Written from `moesched.seams.Device` alone.

    python examples/own_device.py
    moesched run MODEL --policy layer_streaming --dtype float32 --device examples/own_device.py:NumpyDevice

The first command checks the device's promises, and compares its tokens with those of the device `torch`.

Shapes in names: T tokens, D hidden size, H heads, K key-value heads, d head size, L tokens so far, E experts, k experts
per token, n rows of one expert, S sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moesched.errors import BadInput
from moesched.machines.local import unified_machine
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import Page, WeightLayout
from moesched.requests.next_token import sample
from moesched.requests.sampling import Sampling
from moesched.seams import LaneKind
from moesched.steps.memory import Slot
from moesched.steps.plan import Plan
from moesched.steps.views import View
from moesched.tasks import PageTransfer, Task
from moesched.testing import check_device

Array = npt.NDArray[np.float32]


class MicroBatch:
    """The arrays of one micro-batch between its tasks."""

    def __init__(self, requests: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self.requests = requests
        self.new = [list(prompts[request]) for request in requests]
        self.past = [0] * len(requests)
        self.hidden_TD: Array
        self.qkv: tuple[Array, Array, Array]
        self.attended_TX: Array
        self.x_TD: Array
        self.experts_Tk: npt.NDArray[np.int64]
        self.weights_Tk: Array
        self.total_TD: dict[int, Array]


class NumpyDevice:
    """Runs the tasks of one accelerator that shares the host's memory."""

    streams = None

    def __init__(self, checkpoint: Checkpoint, layout: WeightLayout) -> None:
        stored_as = {stored.format.name for stored in checkpoint.tensors.values()}
        if layout.dtype != "float32" or stored_as != {"float32"}:
            raise BadInput("device NumpyDevice computes in float32: give a float32 model and --dtype float32")
        if checkpoint.config.attention.rotary.interleaved:
            raise BadInput(
                "device NumpyDevice rotates halves of heads: give a folder in place of the GGUF file"
            )
        self.layout = layout
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._slots: dict[Slot, dict[str, Array]] = {}
        self._cache: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._micro_batches: list[MicroBatch] = []
        self._sampling = Sampling()
        self._verbs: Mapping[str, Callable[[Any], Any]] = {
            "load": self._bring,
            "fetch": self._bring,
            "embed": self._embed,
            "pre_attention": self._pre_attention,
            "attention": self._attention,
            "cpu_attention": self._attention,
            "post_attention": self._post_attention,
            "route": self._route,
            "run_expert": self._run_expert,
            "combine": self._combine,
            "sample": self._sample,
        }

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        """Empty: all lanes are worker threads."""
        return {}

    def slot_bytes(self, page: Page) -> int:
        """Bytes that a page takes in a slot: its own."""
        return page.nbytes

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Forget the previous batch, and take the prompts of the next."""
        if not plan.machine.unified or plan.batch.chunked or plan.batch.beams > 1:
            raise BadInput(
                "device NumpyDevice needs one memory, whole prompts and no beams: use --device torch"
            )
        if any(not 0 <= token < self.config.vocabulary for prompt in prompts for token in prompt):
            raise BadInput(f"a token id is outside the vocabulary of {self.config.vocabulary}")
        self._slots.clear()
        self._cache.clear()
        self._sampling = sampling
        self._micro_batches = [MicroBatch(requests, prompts) for requests in plan.batch.micro_batches]
        self._first_request = plan.batch.first_request

    def execute(self, task: Task) -> Any:
        """Run a task by its verb."""
        return self._verbs[task.verb](task)

    async def aclose(self) -> None:
        """Release all arrays."""
        self._slots.clear()
        self._cache.clear()
        self._micro_batches.clear()

    # -- weights -----------------------------------------------------------------------------------

    def _bring(self, task: PageTransfer) -> None:
        for page, slot in zip(task.pages, task.slots, strict=True):
            self._slots[slot] = {each.tensor: self._read(each.tensor, each.rows) for each in page.extents}

    def _read(self, name: str, rows: tuple[int, int] | None = None) -> Array:
        stored = self._checkpoint.tensors[name]
        first, stop = rows or (0, stored.shape[0])
        items = math.prod(stored.shape[1:])
        offset = stored.offset + first * items * 4
        read = np.fromfile(stored.file, np.float32, (stop - first) * items, offset=offset)
        return read.reshape(stop - first, *stored.shape[1:])

    def _weights(self, view: View[Any]) -> dict[str, Array]:
        """The matrices of the pages that a task reads, by their names within the layer."""
        blocks: dict[str, list[Array]] = {}
        for slot in view.slots:
            for name, rows in self._slots[slot].items():
                blocks.setdefault(name.split(".", 2)[2], []).append(rows)
        return {name: np.concatenate(parts) for name, parts in blocks.items()}

    # -- a micro-batch through a layer -------------------------------------------------------------

    def _embed(self, task: Task) -> None:
        state = self._micro_batches[task.micro_batch]
        state.hidden_TD = self._read("embedding")[[token for tokens in state.new for token in tokens]]

    def _pre_attention(self, task: Task) -> None:
        config, weights = self.config, self._weights(task.operands)
        state = self._micro_batches[task.micro_batch]
        x_TD = self._norm(state.hidden_TD, weights["attention_norm"])
        q, k, v = (
            (x_TD @ weights[name].T).reshape(len(x_TD), -1, config.attention.head_dim)
            for name in ("q", "k", "v")
        )
        spans = zip(state.past, state.new, strict=True)
        positions_T = np.concatenate([np.arange(past, past + len(new)) for past, new in spans])
        state.qkv = self._turned(q, positions_T), self._turned(k, positions_T), v

    def _attention(self, task: Task) -> None:
        state, outputs, start = self._micro_batches[task.micro_batch], [], 0
        for request, new in zip(state.requests, state.new, strict=True):
            q_THd, k_TKd, v_TKd = (each[start : start + len(new)] for each in state.qkv)
            before = self._cache.get((task.layer, request), (k_TKd[:0], v_TKd[:0]))
            cached = np.concatenate((before[0], k_TKd)), np.concatenate((before[1], v_TKd))
            self._cache[task.layer, request] = cached
            outputs.append(attention(q_THd, *cached))
            start += len(new)
        state.attended_TX = np.concatenate(outputs)

    def _post_attention(self, task: Task) -> dict[int, int]:
        counts = self._route(task)
        weights = self._weights(task.operands)
        for expert in counts:
            self._apply(self._micro_batches[task.micro_batch], expert, weights)
        self._combine(task)
        return counts

    def _route(self, task: Task) -> dict[int, int]:
        """Output projection, norm and router; the rows of each expert that has any."""
        state, weights = self._micro_batches[task.micro_batch], self._weights(task.operands)
        state.hidden_TD = state.hidden_TD + state.attended_TX @ weights["o"].T
        state.x_TD = self._norm(state.hidden_TD, weights["ffn_norm"])
        logits_TE = state.x_TD @ weights["router"].T
        likeliest_TE = np.argsort(-logits_TE, axis=1, kind="stable")
        state.experts_Tk = np.sort(likeliest_TE[:, : self.config.routed.top_k])
        state.weights_Tk = softmax(np.take_along_axis(logits_TE, state.experts_Tk, axis=1))
        state.total_TD = {}
        experts, counts = np.unique(state.experts_Tk, return_counts=True)
        return dict(zip(experts.tolist(), counts.tolist(), strict=True))

    def _run_expert(self, task: Task) -> None:
        weights = self._weights(task.operands)
        for micro_batch, start, stop in task.expert_rows:
            self._apply(self._micro_batches[micro_batch], task.expert, weights, slice(start, stop))

    def _apply(
        self, state: MicroBatch, expert: int, weights: dict[str, Array], rows: slice = slice(None)
    ) -> None:
        """Compute all rows of an expert, as the bits of a product depend on their number, and keep the ones named."""
        gate, up, down = (weights[f"experts.{expert}.{part}"] for part in ("gate", "up", "down"))
        tokens_n, choices_n = np.nonzero(state.experts_Tk == expert)
        x_nD = state.x_TD[tokens_n]
        gated = x_nD @ gate.T
        y_nD = (gated / (1 + np.exp(-gated)) * (x_nD @ up.T)) @ down.T
        weighted_nD = y_nD * state.weights_Tk[tokens_n, choices_n, None]
        total_TD = state.total_TD.setdefault(expert, np.zeros_like(state.x_TD))
        total_TD[tokens_n[rows]] = weighted_nD[rows]

    def _combine(self, task: Task) -> None:
        """Add in ascending order of experts, so that the bits do not depend on the policy."""
        state = self._micro_batches[task.micro_batch]
        for expert in sorted(state.total_TD):
            state.hidden_TD = state.hidden_TD + state.total_TD[expert]

    def _sample(self, task: Task) -> list[int]:
        state = self._micro_batches[task.micro_batch]
        last_SD = state.hidden_TD[np.cumsum([len(new) for new in state.new]) - 1]
        head = self._read("embedding" if self.config.tied_embeddings else "lm_head")
        logits_SV = self._norm(last_SD, self._read("final_norm")) @ head.T
        state.past = [past + len(new) for past, new in zip(state.past, state.new, strict=True)]
        requests = [self._first_request + request for request in state.requests]
        tokens = sample(logits_SV, self._sampling, requests, state.past)
        state.new = [[token] for token in tokens]
        return tokens

    def _norm(self, x_TD: Array, weight_D: Array) -> Array:
        mean_T1 = np.square(x_TD).mean(axis=-1, keepdims=True)
        normalised: Array = x_TD / np.sqrt(mean_T1 + np.float32(self.config.norm_eps)) * weight_D
        return normalised

    def _turned(self, x_THd: Array, positions_T: npt.NDArray[np.int64]) -> Array:
        """Rotary embedding: heads rotated by the angles of their positions; entries i and i + d/2 are a pair."""
        half = self.config.attention.head_dim // 2
        angles = positions_T[:, None] / self.config.attention.rotary.theta ** (np.arange(half) / half)
        cos, sin = (f(angles).astype(np.float32)[:, None] for f in (np.cos, np.sin))
        first, second = x_THd[..., :half], x_THd[..., half:]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def attention(q_THd: Array, k_LKd: Array, v_LKd: Array) -> Array:
    """Causal attention of the last T of L tokens: (T, H * d)."""
    heads_per_key = q_THd.shape[1] // k_LKd.shape[1]
    k_LHd, v_LHd = (np.repeat(each, heads_per_key, axis=1) for each in (k_LKd, v_LKd))
    scores_HTL = np.einsum("thd,lhd->htl", q_THd, k_LHd) / np.float32(math.sqrt(q_THd.shape[2]))
    new, length = scores_HTL.shape[1:]
    future_TL = np.arange(length) > np.arange(length - new, length)[:, None]
    shares_HTL = softmax(np.where(future_TL, np.float32(-np.inf), scores_HTL))
    attended: Array = np.einsum("htl,lhd->thd", shares_HTL, v_LHd).reshape(new, -1)
    return attended


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    raised = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: Array = raised / raised.sum(axis=-1, keepdims=True)
    return shares


def main() -> None:
    """Check the device on a small random model."""
    machine = unified_machine(
        "one memory",
        memory=10**9,
        disk=10**10,
        flops={"float32": 1e11, "bfloat16": 1e11},
        memory_bandwidth=2e10,
        disk_bandwidth=1e9,
    )
    tokens = check_device(NumpyDevice, machine)
    print("NumpyDevice keeps its promises: all policies generate the tokens of torch, batch after batch:")
    print(tokens)


if __name__ == "__main__":
    main()
