"""The tasks of the host beside an accelerator with a memory of its own: page copies, KV cache, attention on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moesched.models.layout import Page
from moesched.steps.memory import Slot
from moesched.steps.plan import Plan
from moesched.tasks import PageTransfer, Task

from ..products.linear import Tensor
from ..runner.attention import Attention
from ..runner.micro_batch import MicroBatchState
from .compute import Compute
from .device_kv import device_kv_of
from .exchange_rows import AttentionRows, ExchangeRows
from .held_pages import HeldPage, read_page
from .kv_offload import KVOffload
from .loaded_kv import LoadedKV
from .prompt_views import prompt_views
from .weights import WeightStore


class HostSide:
    """Runs the tasks that exist only where accelerator and host have memories of their own.

    Args:
        states: the state of each micro-batch, by the micro-batch's number.
        store: the weights.
        attention: runs attention for micro-batches whose KV cache is on the accelerator.
        exchanged: the host's memory for queries, keys, values and outputs of attention that runs on the host.
        kv_slots: buffers on the accelerator, each for the keys and values of a micro-batch in one layer.
    """

    def __init__(
        self,
        plan: Plan,
        states: Sequence[MicroBatchState],
        compute: Compute,
        store: WeightStore,
        attention: Attention,
        exchanged: ExchangeRows,
        kv_slots: Sequence[Tensor],
    ) -> None:
        self._accelerator = compute.accelerator
        self._store = store
        self._kv_slots = kv_slots
        self._loaded: dict[int, LoadedKV] = {}
        self._exchanged = exchanged
        self._rows: dict[int, AttentionRows] = {}
        """The rows on the host of each micro-batch, from `offload_qkv` to `load_hidden`."""
        self._states = states
        self._cached_here = _cached_on_host(plan)
        self._kv_offload: KVOffload | None = None
        if self._cached_here and not compute.on_cpu:
            self._kv_offload = KVOffload(plan.layout.config, plan.reservations.sizes.most_tokens, compute)
        self._device_kv = device_kv_of(plan, states, compute)
        self._kernels = compute.kernels
        self._there = attention

    def bring(self, task: PageTransfer) -> None:
        """Copy a task's pages to its slots, from the slots in `task.operands`, the host's memory, or the files."""
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
        """Return a page in the host's memory; None if the page is not there.

        source: the slot on the host that has the page. If this is None, or a slot that keeps the same page for the
            whole run, the page is taken from `store.home` instead.
        """
        if source is None or source.fixed:
            return self._store.home.get(page)
        return HeldPage.whole(self._store.bytes(source), locked=self._accelerator.type != "cpu")

    def load_kv(self, task: Task) -> None:
        """Copy cached keys and values of a task's micro-batch and layer from the host to a buffer on the accelerator.

        The buffer also has room for the new token of each sequence.
        """
        cached, step = self._states[task.micro_batch].cached(task.layer)
        self._loaded[task.operands] = LoadedKV(cached, step, self._kv_slots[task.operands])

    def attention(self, task: Task) -> None:
        """Run attention on the accelerator; the KV cache may be there or on the host."""
        if task.layer not in self._cached_here.get(task.micro_batch, ()):
            self._there.attention(task)
        elif task.operands is None:
            self._attend_to_prompt(task)
        else:
            self._attend_to_loaded(task)

    def _attend_to_loaded(self, task: Task) -> None:
        """Attend on the accelerator in a decode step: to keys and values that `load_kv` copied, and to new ones."""
        state = self._states[task.micro_batch]
        attend = self._kernels.attention(task.layer, state.kernel_memory(), decodes=state.decodes)
        loaded = self._loaded[task.operands]
        state.attended_TX = attend(state.qkv, loaded, loaded.step)

    def _attend_to_prompt(self, task: Task) -> None:
        """Run attention of a prefill task on the accelerator, for sequences whose KV cache is on the host."""
        state = self._states[task.micro_batch]
        q_THd, k_TKd, v_TKd = state.qkv
        device_kv = self._device_kv.get(task.micro_batch)
        attend = self._kernels.prompt_attention(task.layer, len(q_THd))
        if device_kv is not None:
            state.attended_TX = attend(q_THd, device_kv.extended(state, k_TKd, v_TKd))
            return
        cached, step = state.cached(task.layer)
        views = prompt_views(step, (cached.keys, cached.values), (k_TKd, v_TKd))
        state.attended_TX = attend(q_THd, views)

    def offload_qkv(self, task: Task) -> None:
        """Copy the queries, keys and values of a task's micro-batch to the host, for attention on the host."""
        state = self._states[task.micro_batch]
        rows = self._exchanged.attention(task.micro_batch, len(state.hidden_TD))
        self._rows[task.micro_batch] = rows
        for on_host, there in zip(rows.qkv, state.qkv, strict=True):
            on_host.copy_(there, non_blocking=True)
        if self._accelerator.type == "cpu":
            del state.qkv  # on CUDA the copy may not have happened yet

    def cpu_attention(self, task: Task) -> None:
        """Run attention on the host, on rows that `offload_qkv` copied; the output stays there for `load_hidden`."""
        state, rows = self._states[task.micro_batch], self._rows[task.micro_batch]
        attend = self._kernels.attention(task.layer, rows.memory, decodes=state.decodes, on_host=True)
        attended_TX = attend(rows.qkv, *state.cached(task.layer))
        if attended_TX is not rows.attended_TX:
            with torch.inference_mode():
                rows.attended_TX.copy_(attended_TX)

    def load_hidden(self, task: Task) -> None:
        """Copy the output of attention on the host to the accelerator, as the micro-batch's `attended_TX`."""
        attended_TX = self._rows.pop(task.micro_batch).attended_TX
        state = self._states[task.micro_batch]
        state.attended_TX = state.kernel_memory().tensor(
            "attended", *attended_TX.shape, dtype=attended_TX.dtype, device=self._accelerator
        )
        state.attended_TX.copy_(attended_TX, non_blocking=True)

    def offload_kv(self, task: Task) -> None:
        """Store the new keys and values of a task's micro-batch and layer in the KV cache on the host."""
        state = self._states[task.micro_batch]
        _, k_TKd, v_TKd = state.qkv
        cached, step = state.cached(task.layer)
        if self._kv_offload is None:
            cached.append(step, k_TKd, v_TKd)
        else:
            self._kv_offload.write(cached, step, k_TKd, v_TKd)
        if task.phase == "prefill":
            del state.qkv  # in decode attention may still need them


def kv_slots_of(plan: Plan, compute: Compute) -> list[Tensor]:
    """Allocate the buffers on the accelerator into which keys and values are loaded from the host's KV cache."""
    elements = plan.kv.slot_bytes // compute.dtype.itemsize
    return [
        torch.empty(elements, dtype=compute.dtype, device=compute.accelerator) for _ in range(plan.kv.slots)
    ]


def _cached_on_host(plan: Plan) -> dict[int, frozenset[int]]:
    """Return the layers whose KV cache is on the host, for each micro-batch and each chunk of prefill that has any.

    The keys are numbers of micro-batches and of chunks, which have one numbering; the values are numbers of layers.
    """
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
