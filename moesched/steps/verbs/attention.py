"""The verbs of the first half of a layer: from a hidden state to attention's output, on accelerator or host."""

from __future__ import annotations

from moesched.errors import OutOfOrder, OverBudget, PolicyError
from moesched.steps.micro_batch import MicroBatch
from moesched.steps.verbs.base import Verbs
from moesched.steps.verbs.table import (
    ATTENDED_HOST,
    ATTENTION,
    CPU_ATTENTION,
    INPUT,
    LOAD_HIDDEN,
    LOAD_KV,
    OFFLOAD_KV,
    OFFLOAD_QKV,
    PRE_ATTENTION,
    STRIDE,
)
from moesched.tasks import Block, Task


class AttentionVerbs(Verbs):
    """The verbs of attention, on accelerator or host, and of the copies that attention needs between the two."""

    def pre_attention(self, layer: int, micro_batch: int) -> Task:
        """Norm, QKV projection and rotary embedding, on the accelerator.

        Submits this task for a micro-batch and returns its handle.
        """
        batch = self._at(PRE_ATTENTION, layer, micro_batch)
        if layer == batch.stage.end:
            hidden = (batch.blocks.hidden,)
            for hop in self._state.pass_on(batch, layer, self._number):
                self._enter(hop, hidden, hidden)
        self._enter_layer(PRE_ATTENTION, batch, layer)
        dense = batch.stage.dense
        view = dense.open.get(layer) or self._view(dense, layer)
        if view.moving and view.noted != self._number:
            view.use(self._number, batch.works["pre_attention"].tokens)
        activations: tuple[Block, ...] = ()
        if batch.phase == "prefill" and self._state.limited:
            batch.activations = self._free_activations(micro_batch)
            activations = (batch.activations,)
        return self._run(PRE_ATTENTION, layer, batch, view, view.reads, activations)

    def attention(self, layer: int, micro_batch: int) -> Task:
        """Attention on the accelerator.

        Submits this task for a micro-batch and returns its handle. If the KV cache is on the host, a decode step
        must call `load_kv` before; in prefill the prompt's keys and values are still on the accelerator. With the cache
        on the host, `offload_kv` must follow in prefill and in decode.
        """
        batch = self._at(ATTENTION, layer, micro_batch)
        kv, unified = batch.kv, self._state.unified
        cache = kv.layers[layer]
        buffer = None
        if batch.is_chunk:
            self._require_before("attention", layer, micro_batch)
        if not kv.on_accelerator[layer]:
            if batch.is_chunk and not unified:
                cache = self._chunks_kv(layer, micro_batch)
            if batch.phase == "decode":
                buffer = self._take_loaded(batch, layer)
                cache = cache if unified else self._state.kv_slots[buffer]
            kv.unsaved = layer
        return self._run(ATTENTION, layer, batch, buffer, (cache,), (cache,))

    def load_kv(self, layer: int, micro_batch: int) -> Task:
        """Copy a micro-batch's cached keys and values of a layer to the accelerator, for `attention` in decode.

        The copy takes one of the buffers of `Plan.reserve_kv_buffers`, which `attention` of this layer and micro-batch
        frees. It is transfer D4 of the MoE-Lightning paper, and FlexGen's prefetch for the next micro-batch.
        """
        state = self._state
        batch = self._in_time(LOAD_KV, layer, micro_batch)
        kv = batch.kv
        if batch.phase == "prefill" or kv.on_accelerator[layer]:
            cached = batch.phase == "decode"
            where = "the KV cache lives on the accelerator" if cached else "a prompt has nothing cached"
            raise PolicyError(f"load_kv: {where}: omit it")
        if layer in kv.loaded:
            raise OutOfOrder(f"load_kv: keys and values of L{layer} mb{micro_batch} were loaded already")
        stage = state.stage_of[layer]
        if not stage.empty_kv_slots:
            raise OverBudget(
                f"load_kv: all {state.plan.kv.slots} slots for keys and values are taken: call attention for one "
                "of them first, or plan.reserve_kv_buffers more"
            )
        buffer = kv.loaded[layer] = stage.empty_kv_slots.popleft()
        lane = stage.lanes[LOAD_KV.number]
        if lane is None:
            return batch.last  # type: ignore[return-value]  # the step has begun, so that a task was submitted
        # The micro-batch may still be at an earlier stage, so `_run` would take the wrong lane.
        work = batch.works_at[stage.number][state.works.kind_of[layer]][LOAD_KV.name]
        task = LOAD_KV.task(
            lane, work, LOAD_KV.name, layer, batch.index, -1, buffer, self._number, batch.generated
        )
        reads = (kv.layers[layer], *batch.blocks.reads[LOAD_KV.number])
        return self._enter(task, reads, (state.kv_slots[buffer],))

    def offload_qkv(self, layer: int, micro_batch: int) -> Task:
        """Copy queries, keys and values to the host (transfer D1 of the MoE-Lightning paper)."""
        return self._run(OFFLOAD_QKV, layer, self._at(OFFLOAD_QKV, layer, micro_batch))

    def cpu_attention(self, layer: int, micro_batch: int) -> Task:
        """Attention on the host, over the KV cache in host memory.

        Submits this task for a micro-batch and returns its handle.
        """
        batch = self._at(CPU_ATTENTION, layer, micro_batch)
        kv = batch.kv
        if batch.is_chunk:
            self._require_before("cpu_attention", layer, micro_batch)
            if batch.before is not None and batch.before.kv.unsaved == layer:
                raise OutOfOrder(
                    f"cpu_attention: offload_kv the keys and values of mb{micro_batch - 1} before"
                )
        if kv.on_accelerator[layer] and not self._state.unified:
            raise PolicyError("cpu_attention: the KV cache lives on the accelerator: use attention")
        if layer in kv.loaded:
            raise OutOfOrder(f"cpu_attention: L{layer} mb{micro_batch} was loaded by load_kv: use attention")
        cache = (kv.layers[layer],)
        return self._run(CPU_ATTENTION, layer, batch, None, cache, cache)

    def load_hidden(self, layer: int, micro_batch: int) -> Task:
        """Copy the host's attention output to the accelerator (transfer D2 of the MoE-Lightning paper)."""
        return self._run(LOAD_HIDDEN, layer, self._at(LOAD_HIDDEN, layer, micro_batch))

    def offload_kv(self, layer: int, micro_batch: int) -> Task:
        """Copy the new tokens' keys and values to the cache on the host, after `attention`."""
        batch = self._in_time(OFFLOAD_KV, layer, micro_batch)
        batch.kv.unsaved = -1
        cache = batch.kv.layers[layer]
        # All other readers of the positions lie between this step's `embed` and the next one's; this one may be late.
        reads: tuple[Block, ...] = (cache,)
        if batch.is_chunk:
            # `attention` was over the chunks' keys and values on the accelerator, and touched no cache.
            reads = (cache, batch.blocks.attention)
        reads += self._activations(batch, leaves=batch.progress % STRIDE == INPUT)
        return self._run(OFFLOAD_KV, layer, batch, None, reads, (cache,))

    def _free_activations(self, micro_batch: int) -> Block:
        """Take a free block of memory for a micro-batch's activations, which it uses until it leaves the layer.

        Raises:
            OverBudget: no block is free, since as many micro-batches as the plan allows have one.
        """
        free = self._state.free_activations
        if not free:
            raise OverBudget(
                f"pre_attention: mb{micro_batch} finds no room: the plan limits the micro-batches within a layer to "
                f"{self._state.plan.declared.in_flight}: finish one of them first, or raise plan.limit_in_flight"
            )
        return free.popleft()

    def _attended(self, batch: MicroBatch, layer: int) -> bool:
        """Test whether a micro-batch has had attention in a layer, on either processor."""
        return batch.progress >= layer * STRIDE + ATTENDED_HOST

    def _require_before(self, verb: str, layer: int, micro_batch: int) -> None:
        """Check that the chunk which a micro-batch continues, if any, has had attention in the layer.

        Raises:
            OutOfOrder: that chunk has not had attention there.
        """
        before = self._batches[micro_batch].before
        if before is not None and not self._attended(before, layer):
            raise OutOfOrder(
                f"{verb}(L{layer}, mb{micro_batch}) continues mb{micro_batch - 1}, which has not been attended to "
                "in that layer: take micro-batches in their order"
            )

    def _chunks_kv(self, layer: int, micro_batch: int) -> Block:
        """Return the accelerator's block for keys and values of chunked prompts whose KV cache is on the host.

        The block holds the keys and values of one layer. So all chunks of the same prompts have attention in a layer,
        on the same processor, before the first of them has attention in the next layer.

        Raises:
            OutOfOrder: later chunks of the same prompts have not passed the previous layer.
            PolicyError: the previous chunk was attended to on the host.
        """
        batch = self._batches[micro_batch]
        before = batch.before
        if before is None:
            others = [
                each
                for number, each in self._batches.items()
                if number > micro_batch and each.kv.device is batch.kv.device
            ]
            if layer and not all(self._attended(each, layer - 1) for each in others):
                raise OutOfOrder(
                    f"attention(L{layer}, mb{micro_batch}): its prompts continue in later micro-batches, which have to "
                    f"pass L{layer - 1} before, as the KV cache is on the host: take all of them layer by layer"
                )
        elif before.kv.attended_in_device != layer:
            raise PolicyError(
                f"attention(L{layer}, mb{micro_batch}): mb{micro_batch - 1}, which it continues, was attended to on "
                "the host: use cpu_attention here too"
            )
        batch.kv.attended_in_device = layer
        return batch.kv.device

    def _take_loaded(self, batch: MicroBatch, layer: int) -> int:
        """Free the buffer with a layer's loaded keys and values for the next `load_kv`, and return the buffer's number.

        Raises:
            PolicyError: nothing was loaded.
        """
        buffer = batch.kv.loaded.pop(layer, None)
        if buffer is None:
            raise PolicyError(
                "attention: the KV cache lives on the host: load_kv before, or use cpu_attention in decode"
            )
        batch.stage.empty_kv_slots.append(buffer)
        return buffer
