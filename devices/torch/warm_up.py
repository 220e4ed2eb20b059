"""Warm-up of a GPU: runs the kernels of a plan once on made-up data, so that the first step is as fast as the second.

CUDA loads a kernel when it is first launched, cuBLAS takes a workspace for each stream, and torch's allocator maps
memory as it grows. Together that takes more than half a second, which would count as prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple

import torch

from moesched.models.config import ModelConfig
from moesched.models.footprint import EXPERT_TILE
from moesched.models.kv_blocks import KV_BLOCK_TOKENS, cached_tokens
from moesched.models.layout import WeightLayout
from moesched.requests.sampling import Sampling
from moesched.steps.plan import Plan
from moesched.tasks import Kernel, Lane, PageTransfer
from moesched.work import Work

from ..kernels import attention_functions
from ..kernels.layer_weights import Weights
from ..kernels.resources import host_indices
from ..products.linear import Tensor
from ..runner.attention import Attention, identity
from ..runner.micro_batch import MicroBatchState
from ..runner.moe_layer import MoELayer
from ..runner.next_tokens import Choice, NextTokens
from ..runner.observers import DeviceObservers
from .at_once import library_of
from .compute import Compute
from .copies import HOST
from .experts import TorchExperts
from .global_weights import GlobalWeights
from .kv_cache import BlockedKV
from .resident_pages import ResidentPages
from .weights import WeightStore, merged_tensors

MOST_TOKENS = 4096
"""Largest number of tokens of a micro-batch in a warm-up; for more tokens, the same kernels run."""

_PREFILL, _DECODE = (
    Kernel(
        Lane("accelerator"), Work("warm_up", "gpu"), "warm_up", layer=0, micro_batch=0, generated=generated
    )
    for generated in range(2)
)


class WarmUpSizes(NamedTuple):
    """The sizes of the micro-batches of a warm-up, in which all sequences are equally long.

    They follow from a plan's largest micro-batches, with at most `MOST_TOKENS` tokens in prefill.

    Attributes:
        prompts: number of sequences in prefill.
        length: number of tokens of each sequence in prefill.
        sequences: number of sequences in decode.
        cached: number of cached tokens that each sequence in decode attends to; 0 where only the host runs attention.
        workspace: bytes that the plan reserves for kernels' intermediate results.
    """

    prompts: int
    length: int
    sequences: int
    cached: int
    workspace: int


def shapes_of(plan: Plan, kv: Tensor | None) -> WarmUpSizes:
    """Return the sizes of a plan's largest micro-batches for a warm-up.

    kv: memory of the accelerator for keys and values, which limits the number of cached tokens; None if it has none.
    """
    chunks = plan.chunks.values()
    tokens = min(MOST_TOKENS, max(sum(chunk.tokens) for chunk in chunks))
    length = min(tokens, max(max(chunk.tokens) for chunk in chunks))
    sequences = max(map(plan.batch.sequences, plan.batch.micro_batches))
    blocks = 0 if kv is None else _blocks_in(kv, plan.layout.config) // sequences
    cached = max(0, min(max(plan.batch.prompts), blocks * KV_BLOCK_TOKENS - 1))
    return WarmUpSizes(tokens // length, length, sequences, cached, plan.reservations.sizes.workspace)


def memory_for_kv(states: Sequence[MicroBatchState], kv_slots: Sequence[Tensor]) -> Tensor | None:
    """Return the accelerator's largest tensor for keys and values: a KV cache or a slot; None if there is none.

    Args:
        states: the states of micro-batches, with their KV caches.
        kv_slots: buffers that keys and values are loaded into from a cache on the host.
    """
    caches = [cache.slots for state in states for cache in state.caches]
    there = (memory for memory in (*caches, *kv_slots) if not memory.is_cpu)
    return max(there, key=torch.Tensor.numel, default=None)


class ExpertWarmUp:
    """Warms up a node that has only experts: runs their kernels once at a plan's sizes, and drops the results.

    Args:
        config: the model's configuration, cut to one layer.
        weights: the tensors of that layer, with any contents.
    """

    def __init__(self, config: ModelConfig, compute: Compute, weights: Weights) -> None:
        self._config = config
        self._compute = compute
        self._weights = weights

    @torch.inference_mode()
    def run(self, shapes: WarmUpSizes) -> None:
        """Let torch's allocator map memory for the workspace, and run all kernels once, on the current stream.

        shapes: the sizes that the kernels run at.
        """
        torch.empty(shapes.workspace, dtype=torch.uint8, device=self._compute.accelerator)
        self._layer(shapes)
        self._expert(max(shapes.prompts * shapes.length, shapes.sequences))

    def _layer(self, shapes: WarmUpSizes) -> None:
        """Do nothing: a node that has only experts runs none of a layer's other kernels."""

    def _expert(self, most: int) -> None:
        """Run an expert on 1, 2, 4, ... up to `most` rows, as the number of rows in a step is not known in advance."""
        compute, most = self._compute, min(most, EXPERT_TILE)
        x_nD = torch.zeros((most, self._config.hidden), dtype=compute.dtype, device=compute.accelerator)
        y_nD = torch.empty_like(x_nD)
        for power in range(most.bit_length()):
            rows = 1 << power
            compute.kernels.expert(self._weights, 0, rows)[1](x_nD[:rows], y_nD[:rows])


class WarmUp(ExpertWarmUp):
    """Warms up a GPU: runs all kernels of a layer and of sampling once at a plan's sizes, and drops the results.

    Args:
        global_weights: the weights outside the layers.
        rank: number of this rank, from 0.
        kv: memory of the accelerator for keys and values, which the warm-up overwrites; None if it has none.
    """

    def __init__(
        self,
        config: ModelConfig,
        compute: Compute,
        weights: Weights,
        global_weights: GlobalWeights,
        rank: int,
        kv: Tensor | None,
    ) -> None:
        super().__init__(config, compute, weights)
        self._kv = kv
        states: list[MicroBatchState] = []
        kernels, observers = compute.kernels, DeviceObservers()
        library = library_of(compute.accelerator)
        experts = TorchExperts(config, states, self._shown, compute, library, observers)
        choice = Choice(Sampling(), first_request=0, keep=None)
        self._states = states
        self._attention = Attention(
            states,
            self._shown,
            global_weights.embedding,
            kernels,
            residual_of=torch.zeros_like if rank else identity,
            keeps_attended=True,
        )
        self._moe = MoELayer(
            config, states, self._shown, self._attention, kernels, experts, library, observers
        )
        self._tokens = NextTokens(global_weights.head, states, kernels, library, choice, lambda _: "")

    def _layer(self, shapes: WarmUpSizes) -> None:
        """Run the kernels of a layer and of sampling at these sizes, once as in prefill and once as in decode."""
        self._prefill(shapes.prompts, shapes.length)
        self._decode(shapes.sequences, shapes.cached)
        self._states.clear()

    def _prefill(self, sequences: int, length: int) -> None:
        state = self._state(sequences, length, length, self._compute.accelerator)
        self._attention.embed(_PREFILL)
        self._attention.pre_attention(_PREFILL)
        self._attention.attention(_PREFILL)
        self._moe.post_attention(_PREFILL)
        self._tokens.likeliest(state)

    def _decode(self, sequences: int, cached: int) -> None:
        device = self._compute.accelerator if cached else HOST
        state = self._state(sequences, cached, cached + 1, device)
        state.extend()
        state.new = [[0]] * sequences
        self._attention.embed(_DECODE)
        self._attention.pre_attention(_DECODE)
        if cached:
            self._attention.attention(_DECODE)
        else:
            state.attended_TX = state.qkv[0].flatten(1)
        attention_functions.beside([state.attended_TX[:1]] * 2)  # as for sequences of several lengths
        self._moe.post_attention(_DECODE)
        self._tokens.likeliest(state)

    def _state(self, sequences: int, new: int, room: int, device: torch.device) -> MicroBatchState:
        """Make the state of a micro-batch, with a KV cache.

        Args:
            sequences: number of sequences.
            new: number of new tokens of each sequence.
            room: number of tokens of each sequence that the cache has room for.
            device: torch device of the cache.
        """
        state = MicroBatchState(range(sequences), [[0] * new] * sequences)
        blocks = sequences * cached_tokens(room) // KV_BLOCK_TOKENS
        borrowed = device != HOST and self._kv is not None and _blocks_in(self._kv, self._config) >= blocks
        cache = BlockedKV(
            self._config,
            blocks,
            block_size=KV_BLOCK_TOKENS,
            dtype=self._compute.dtype,
            device=device,
            layers=[0],
            indices=host_indices if device == HOST else self._compute.indices,
            allocate=self._of_kv if borrowed else None,
        )
        for sequence in state.sequences:
            cache.open(sequence, room)
        state.add_cache(cache)
        self._states[:] = [state]
        return state

    def _of_kv(self, nbytes: int) -> Tensor:
        assert self._kv is not None
        return self._kv.view(-1).view(torch.uint8)[:nbytes]

    def _shown(self, view: object) -> Weights:
        return self._weights


def _blocks_in(kv: Tensor, config: ModelConfig) -> int:
    """Return the number of blocks of one layer's KV cache that fit in the memory of the tensor `kv`."""
    return kv.numel() // (KV_BLOCK_TOKENS * config.attention.cache_width)


class WarmUps:
    """Runs a warm-up of a GPU for each batch with new sizes, while resident pages are loaded.

    A warm-up has a thread of its own. Once it ends, torch gives that thread's cuBLAS handle to the next thread that
    computes a product.

    Attributes:
        on_thread: a function that the warm-up's thread calls first; None for none.
    """

    def __init__(self) -> None:
        self.on_thread: Callable[[], object] | None = None
        self._known: set[WarmUpSizes] = set()
        self._thread: ThreadPoolExecutor | None = None
        self._seconds: Future[float] | None = None

    def is_new(self, shapes: WarmUpSizes) -> bool:
        """Test whether these sizes are new, and remember them."""
        before = len(self._known)
        self._known.add(shapes)
        return len(self._known) > before

    def start(self, work: Callable[[], object], loading: ResidentPages) -> Callable[[PageTransfer], None]:
        """Start a warm-up on a thread of its own; an earlier warm-up must have ended.

        If no pages are to be loaded, this waits until the warm-up has ended.

        Args:
            work: runs the warm-up.
            loading: the resident pages; the warm-up borrows the memory of pages that are not loaded yet.

        Returns:
            a function to call before each task `load`. Before the task that loads the last pages, it waits until the
            warm-up has ended.
        """
        self._thread = ThreadPoolExecutor(1, "warm-up", self.on_thread)
        self._seconds = self._thread.submit(_timed, work)
        if not loading.awaited:
            self._wait()

        def end_before_the_last(load: PageTransfer) -> None:
            if loading.awaited <= len(load.pages):
                self._wait()

        return end_before_the_last

    def end(self) -> None:
        """Wait until the warm-up, if there is one, has ended and freed its memory."""
        if self._thread is not None:
            self._thread.shutdown()

    def _wait(self) -> None:
        """Wait until the warm-up has ended, and raise its error if it failed."""
        self.end()
        if self._seconds is not None:
            self._seconds.result()

    def seconds(self) -> float | None:
        """Wait for the warm-up, and return the seconds that it took; None if there was no warm-up, or if it failed."""
        self.end()
        return None if self._seconds is None or self._seconds.exception() else self._seconds.result()

    def forget(self) -> None:
        """Wait until the warm-up of the previous batch has ended, and forget its time."""
        self.end()
        self._seconds = None


def stand_in(layout: WeightLayout, store: WeightStore) -> Weights | None:
    """Return tensors with any contents as the weights of a layer in a warm-up; None if there is no memory for them.

    They are views of memory that is reserved for weights. Pages that will be resident have their own memory there, in
    which all rows of a matrix are adjacent; all other pages share one slot.
    """
    size = store.reader.slot_bytes
    arenas = (arena for arena in store.arenas.values() if not arena.on_cpu and len(arena))
    slot = next((arena.slot(0) for arena in arenas if arena.slot_bytes >= size), None)
    if slot is None and not store.resident.awaited:
        return None
    for layer, described in enumerate(layout.config.pattern):
        if not described.feed_forward.experts:
            continue
        pages = layout.layer(layer)
        memory = [store.resident.memory(page, slot) for page in pages]
        shown = [
            store.reader.views(each, page, aligned=True)
            for each, page in zip(memory, pages, strict=True)
            if each is not None
        ]
        if len(shown) == len(pages):
            return merged_tensors(shown, joins=True, layer=described)
    return None


def _timed(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started
