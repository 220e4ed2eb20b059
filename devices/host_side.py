"""The host's half of a machine whose accelerator has a memory of its own: weights, KV cache and CPU attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moesched.models.config import ModelConfig
from moesched.models.layout import Page
from moesched.tasks import PageTransfer, Task

from . import torch_kernels as kernels
from .arena import aligned_bytes
from .kv_cache import BlockedKV
from .micro_batch import MicroBatchState
from .page_reader import PageReader
from .torch_kernels import KVView, Tensor

HOST = torch.device("cpu")


class HostSide:
    """Runs the verbs that exist only where accelerator and host have memories of their own.

    Args:
        accelerator: where the accelerator's tensors are.
        home: the bytes of the pages that stream, by their id, as `bring_home` reads them.
        slot: the bytes of a slot, by its task's slots.
        cache: the KV cache, on the host if `cache_on_host`.
    """

    def __init__(
        self,
        accelerator: torch.device,
        config: ModelConfig,
        home: Mapping[int, Tensor],
        slot: Callable[[Any], Tensor],
        cache: BlockedKV,
        cache_on_host: bool,
        states: Sequence[MicroBatchState],
    ) -> None:
        self._accelerator = accelerator
        self._config = config
        self._slot = slot
        self._cache = cache
        self._states = states
        self._home = home
        self.verbs: Mapping[str, Callable[[Any], Any]] = {
            "pin": self._bring,
            "fetch": self._bring,
            "offload_qkv": self._offload_qkv,
            "cpu_attention": self._cpu_attention,
            "load_hidden": self._load_hidden,
            "offload_kv": self._offload_kv,
        }
        if cache_on_host:
            self.verbs = {**self.verbs, "attention": self._attend_to_prompt}

    def _bring(self, task: PageTransfer) -> None:
        """Copy pages into slots: from the slots that the task reads, or from their home."""
        sources = [self._slot(slot) for slot in task.operands or ()] or [
            self._home[page.id] for page in task.pages
        ]
        for source, slot in zip(sources, task.slots, strict=True):
            target = self._slot(slot)
            nbytes = min(len(source), len(target))
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)

    def _attend_to_prompt(self, task: Task) -> None:
        """Attention within the prompts, from the keys and values at hand: the cache is on the host."""
        state = self._states[task.micro_batch]
        q_THd, k_TKd, v_TKd = state.qkv
        ends = [sum(state.step.new[: count + 1]) for count in range(len(state.step.new))]
        views = [
            KVView(k_TKd[None, end - new : end], v_TKd[None, end - new : end], new)
            for end, new in zip(ends, state.step.new, strict=True)
        ]
        state.attended_TX = kernels.attention(q_THd, views, self._config.sliding_window)

    def _offload_qkv(self, task: Task) -> None:
        state = self._states[task.micro_batch]
        q_THd, k_TKd, v_TKd = state.qkv
        state.qkv_on_host = (_copy(q_THd, HOST), _copy(k_TKd, HOST), _copy(v_TKd, HOST))

    def _cpu_attention(self, task: Task) -> None:
        state = self._states[task.micro_batch]
        q_THd, k_TKd, v_TKd = state.qkv_on_host
        self._cache.append(task.layer, state.step, k_TKd, v_TKd)
        views = self._cache.views(task.layer, state.step)
        state.attended_on_host = kernels.attention(q_THd, views, self._config.sliding_window)

    def _load_hidden(self, task: Task) -> None:
        state = self._states[task.micro_batch]
        state.attended_TX = _copy(state.attended_on_host, self._accelerator)

    def _offload_kv(self, task: Task) -> None:
        state = self._states[task.micro_batch]
        _, k_TKd, v_TKd = state.qkv
        self._cache.append(task.layer, state.step, _copy(k_TKd, HOST), _copy(v_TKd, HOST))


def bring_home(home: Mapping[int, Tensor], reader: PageReader, pages: Sequence[Page]) -> dict[int, Tensor]:
    """The bytes of these pages in host memory, by their id; only those that are not at home yet are read."""
    stays = {page.id: home[page.id] for page in pages if page.id in home}
    return stays | {page.id: _read(reader, page) for page in pages if page.id not in stays}


def _read(reader: PageReader, page: Page) -> Tensor:
    memory = aligned_bytes(reader.bytes_in_slot(page))
    reader.read(page, memory)
    return memory


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of its own on the device, there when this returns."""
    return tensor.to(device, copy=True)
