"""The host's half of a machine whose accelerator has a memory of its own: weights, KV cache and CPU attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from moesched.models.layout import Page
from moesched.requests.batch import KV_BLOCK_TOKENS
from moesched.steps.memory import Slot
from moesched.steps.plan import Plan
from moesched.tasks import PageTransfer, Task

from ..native.attention import SequencesInBlocks, one_after_the_other
from ..products.linear import Tensor
from .attention import Attention
from .compute import Compute
from .device_kv import device_kv_of
from .exchange_rows import AttentionRows, ExchangeRows
from .held_pages import HeldPage, read_page
from .kernels import KVView
from .kv_offload import KVOffload
from .kv_step import KVStep
from .micro_batch import MicroBatchState
from .weights import WeightStore


class HostSide:
    """Runs the verbs that exist only where accelerator and host have memories of their own.

    Args:
        attention: of micro-batches whose KV cache is on the accelerator; attends over views of any other.
        exchanged: memory for the rows of attention on the host.

    Attributes:
        kv_slots: buffers of the accelerator that one layer's keys and values of a micro-batch are loaded to.
    """

    def __init__(
        self,
        plan: Plan,
        states: Sequence[MicroBatchState],
        compute: Compute,
        store: WeightStore,
        attention: Attention,
        exchanged: ExchangeRows,
    ) -> None:
        self._accelerator = compute.accelerator
        self._store = store
        self.kv_slots = [_kv_slot(plan, compute) for _ in range(plan.kv.slots)]
        self._loaded: dict[int, list[KVView]] = {}
        self._exchanged = exchanged
        self._rows: dict[int, AttentionRows] = {}
        """Of micro-batches from `offload_qkv` to `load_hidden`."""
        self._states = states
        self._cached_here = _cached_on_host(plan)
        self._kv_offload: KVOffload | None = None
        if self._cached_here and not compute.on_cpu:
            self._kv_offload = KVOffload(plan.layout.config, plan.reservations.sizes.most_tokens, compute)
        self._device_kv = device_kv_of(plan, states, compute)
        self._there = attention
        self._attend = attention.attend

    def bring(self, task: PageTransfer) -> None:
        """Copy pages into slots: from the slots that the task reads, from their home, or from the files."""
        store = self._store
        sources: Sequence[Slot | None] = task.operands or [None] * len(task.pages)
        for page, source, slot in zip(task.pages, sources, task.slots, strict=True):
            target, held = store.bytes(slot), self._held(page, source)
            if held is None and target.is_cpu:
                store.reader.read(page, target)
                continue
            held = held or HeldPage.whole(read_page(store.reader, page), locked=False)
            if target.is_cpu:
                store.copies.to_host(held, target)
            else:
                store.copies.to_accelerator(page, held, target)

    def _held(self, page: Page, source: Slot | None) -> HeldPage | None:
        """A page in a slot of a pool, or at home; None where it is not there."""
        if source is None or source.fixed:
            return self._store.home.get(page)
        return HeldPage.whole(self._store.bytes(source), locked=self._accelerator.type != "cpu")

    def load_kv(self, task: Task) -> None:
        """Copy a micro-batch's cached keys and values, each sequence with room for its new token at the end."""
        state = self._states[task.micro_batch]
        cache, step = state.cached(task.layer)
        halves = zip(
            self.kv_slots[task.operands].chunk(2), cache.slots[cache.places[task.layer]], strict=True
        )
        keys, values = ([*_loaded(memory, cached, step)] for memory, cached in halves)
        queries = (part.queries for part in step.parts)
        self._loaded[task.operands] = list(map(KVView, keys, values, queries))

    def attention(self, task: Task) -> None:
        if task.layer not in self._cached_here.get(task.micro_batch, ()):
            self._there.attention(task)
        elif task.operands is None:
            self._attend_to_prompt(task)
        else:
            self._attend_to_loaded(task)

    def _attend_to_loaded(self, task: Task) -> None:
        """Attention over loaded keys and values, and those of the new tokens."""
        state = self._states[task.micro_batch]
        q_THd, k_TKd, v_TKd = state.qkv
        native = self._there.native_for(task, state, q_THd)
        if native:
            keys, values = (half.data_ptr() for half in self.kv_slots[task.operands].chunk(2))
            cache, step = state.cached(task.layer)
            lengths, blocks = step.in_blocks
            loaded = cache.layer(task.layer)._replace(keys=keys, values=values)
            in_blocks = SequencesInBlocks(lengths, one_after_the_other(len(blocks)))
            state.attended_TX = native.attend(q_THd, k_TKd, v_TKd, loaded, in_blocks)
            return
        views = self._loaded[task.operands]
        start = 0
        for keys_SLKd, values_SLKd, new in views:
            end = start + len(keys_SLKd) * new
            shape = keys_SLKd[:, -new:].shape
            keys_SLKd[:, -new:].copy_(k_TKd[start:end].reshape(shape))
            values_SLKd[:, -new:].copy_(v_TKd[start:end].reshape(shape))
            start = end
        state.attended_TX = self._attend(task, state, q_THd, views)

    def _attend_to_prompt(self, task: Task) -> None:
        """Attention within the prompts, over keys and values on the accelerator, while the cache is on the host.

        They have the same layout as in the cache, with prompts of one length as one view, so that the bits are equal.
        """
        state = self._states[task.micro_batch]
        q_THd, k_TKd, v_TKd = state.qkv
        device_kv = self._device_kv.get(task.micro_batch)
        if device_kv is not None:
            state.attended_TX = self._attend(task, state, q_THd, device_kv.extended(state, k_TKd, v_TKd))
            return
        views = []
        start = 0
        for new, sequences in _runs(state.step.new):
            end = start + new * sequences
            keys, values = (_laid_out(tensor[start:end], sequences) for tensor in (k_TKd, v_TKd))
            views.append(KVView(keys, values, new))
            start = end
        state.attended_TX = self._attend(task, state, q_THd, views)

    def offload_qkv(self, task: Task) -> None:
        state = self._states[task.micro_batch]
        rows = self._exchanged.attention(task.micro_batch, len(state.hidden_TD))
        self._rows[task.micro_batch] = rows
        for on_host, there in zip(rows.qkv, state.qkv, strict=True):
            on_host.copy_(there, non_blocking=True)
        if self._accelerator.type == "cpu":
            del state.qkv  # on CUDA the copy may not have happened yet

    def cpu_attention(self, task: Task) -> None:
        """Attend on the host; in decode by a native call from and to the memory of the copies."""
        state, rows = self._states[task.micro_batch], self._rows[task.micro_batch]
        native = self._there.native_for(task, state, rows.qkv[0])
        if native is None:
            self._attend_by_torch(task, state, rows)
            return
        cache, step = state.cached(task.layer)
        call = rows.calls.get(task.layer)
        if call is None:
            call = native.prepared(*rows.qkv, cache.layer(task.layer), rows.attended_TX)
            rows.calls[task.layer] = call
        call(step.in_blocks)

    @torch.inference_mode()
    def _attend_by_torch(self, task: Task, state: MicroBatchState, rows: AttentionRows) -> None:
        rows.attended_TX.copy_(self._there.attend_cached(task, state, *rows.qkv))

    def load_hidden(self, task: Task) -> None:
        attended_TX = self._rows.pop(task.micro_batch).attended_TX
        state = self._states[task.micro_batch]
        state.attended_TX = attended_TX.to(self._accelerator, non_blocking=True, copy=True)

    def offload_kv(self, task: Task) -> None:
        state = self._states[task.micro_batch]
        _, k_TKd, v_TKd = state.qkv
        cache, step = state.cached(task.layer)
        if self._kv_offload is None:
            cache.append(task.layer, step, k_TKd, v_TKd)
        else:
            self._kv_offload.write(cache, task.layer, step, k_TKd, v_TKd)
        if not task.step:
            del state.qkv  # in decode attention may still need them


def _kv_slot(plan: Plan, compute: Compute) -> Tensor:
    """Allocate a buffer for keys and values that are loaded from the host's KV cache."""
    elements = plan.kv.slot_bytes // compute.dtype.itemsize
    return torch.empty(elements, dtype=compute.dtype, device=compute.accelerator)


def _cached_on_host(plan: Plan) -> dict[int, frozenset[int]]:
    """The layers whose KV cache is on the host, by micro-batch, including chunks of prefill."""
    kv = plan.kv
    if not plan.nodes.attends:
        return {}
    wholes = {number: frozenset(kv.layers_held_by("host", number)) for number in kv.held_by("host")}
    chunks = {
        number: wholes[chunk.micro_batch]
        for number, chunk in plan.chunks.items()
        if chunk.micro_batch in wholes
    }
    return wholes | chunks


def _loaded(memory: Tensor, cached_NKd: Tensor, step: KVStep) -> Iterator[Tensor]:
    """Keys or values of a step's parts, (S, L, K, d), in flat memory, to which those before the step are copied.

    Only whole pieces of both memories are copied: anything else takes memory of the GPU beside the plan's.
    """
    for part in step.parts:
        there_SLKd, memory = _carved(memory, (part.sequences, part.length, *cached_NKd.shape[1:]))
        for there_LKd, spans in zip(there_SLKd, step.past_slots(part), strict=True):
            start = 0
            for span in spans:
                stop = start + len(span)
                there_LKd[start:stop].copy_(cached_NKd[span.start : span.stop], non_blocking=True)
                start = stop
        yield there_SLKd


def _carved(memory: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys or values of a shape (S, L, K, d) at the start of flat memory, and the memory behind them.

    Each sequence begins with a block of its own, as in the cache, for the same bits as from there.
    """
    sequences, length, kv_heads, head_dim = shape
    room = _room(length)
    count = sequences * room * kv_heads * head_dim
    return memory[:count].view(sequences, room, kv_heads, head_dim)[:, :length], memory[count:]


def _runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of neighbours with equal length, as (length, count)."""
    return [(length, len(list(neighbours))) for length, neighbours in groupby(lengths)]


def _laid_out(tensor_TKd: Tensor, sequences: int) -> Tensor:
    """Keys or values of sequences of one length, (S, L, K, d), each from the start of a block on."""
    like_SLKd = tensor_TKd.reshape(sequences, -1, *tensor_TKd.shape[1:])
    memory = tensor_TKd.new_empty(sequences * _room(like_SLKd.shape[1]) * like_SLKd[0, 0].numel())
    laid_out, _ = _carved(memory, like_SLKd.shape)
    return laid_out.copy_(like_SLKd)


def _room(length: int) -> int:
    """The tokens that fit in the blocks that hold `length`."""
    return -(-length // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
