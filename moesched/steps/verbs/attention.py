"""The verbs of the first half of a layer: from a hidden state to attention's output, on either processor."""

from __future__ import annotations

from moesched.errors import OutOfOrder, OverBudget, PolicyError
from moesched.steps.run_state import STRIDE, MicroBatch
from moesched.steps.verbs.base import ATTENDED, ATTENDED_HOST, QKV, QKV_HOST, Verbs
from moesched.tasks import Block, HostKernel, Kernel, PageTransfer, Task


class AttentionVerbs(Verbs):
    """Attention, and what brings queries, keys and values to where it is done."""

    def pre_attention(self, layer: int, micro_batch: int) -> Task:
        """Norm, QKV projection and rotary embedding, on the accelerator."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE
        if batch.tag != tag or batch.unsaved >= 0 or not self.attends:
            raise self._out_of_order("pre_attention", layer, batch, tag)
        stage = batch.stage
        if layer == stage.end:
            for hop in self._run.pass_on(batch, layer, self.index):
                self._submit(hop, (batch.hidden,), (batch.hidden,))
            stage = batch.stage
        view = stage.dense.open.get(layer) or self._view(stage.dense, layer)
        writes: tuple[Block, ...] = (batch.qkv,)
        if self._limited:
            batch.room = self._place_in_layer(micro_batch)
            writes = (batch.qkv, batch.room)
        batch.tag = tag + QKV
        batch.last = task = Kernel(
            stage.lane,
            batch.works["pre_attention"],
            "pre_attention",
            layer,
            batch.index,
            -1,
            view,
            self.index,
        )
        return self._submit(task, (batch.hidden, *view.reads), writes)

    def attention(self, layer: int, micro_batch: int) -> Task:
        """Attention on the accelerator.

        Where the KV cache lives on the host, a decode step must `load_kv` before; in prefill the prompt's keys and
        values are at hand. In both `offload_kv` must follow.
        """
        run_state = self._run
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + QKV
        if batch.tag != tag:
            raise self._out_of_order("attention", layer, batch, tag)
        cache = batch.kv[layer]
        slot = None
        if self.chunked:
            self._require_before("attention", layer, micro_batch)
        if not batch.kv_on_accelerator:
            if self.chunked and not run_state.unified:
                cache = self._put_in_device_kv(layer, micro_batch)
            if self.index:
                slot = self._take_staged(batch, layer)
                cache = cache if run_state.unified else run_state.kv_slots[slot]
            batch.unsaved = layer
        batch.tag = tag - QKV + ATTENDED
        lane = batch.stage.lane
        batch.last = task = Kernel(
            lane, batch.works["attention"], "attention", layer, batch.index, -1, slot, self.index
        )
        return self._submit(task, (batch.qkv, cache), (batch.attention, cache))

    def load_kv(self, layer: int, micro_batch: int) -> Task:
        """Bring a micro-batch's cached keys and values of a layer to the accelerator, for `attention` in decode.

        This is D4 of MoE-Lightning, and what FlexGen prefetches for the next micro-batch. A slot of
        `Plan.reserve_kv_buffers` is taken until that `attention`.
        """
        run_state = self._run
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + QKV
        if not self.index or batch.kv_on_accelerator:
            where = "the KV cache lives on the accelerator" if self.index else "a prompt has nothing cached"
            raise PolicyError(f"load_kv: {where}: leave it out")
        if not self._base <= batch.tag <= tag:
            raise self._out_of_order("load_kv", layer, batch, tag)
        if layer in batch.staged:
            raise OutOfOrder(f"load_kv: keys and values of L{layer} mb{micro_batch} were loaded already")
        stage = run_state.stage_of[layer]
        if not stage.empty_kv_slots:
            raise OverBudget(
                f"load_kv: all {run_state.plan.kv_slots} slots for keys and values are taken: call attention for one "
                "of them first, or plan.reserve_kv_buffers more"
            )
        slot = batch.staged[layer] = stage.empty_kv_slots.popleft()
        if run_state.unified:
            return batch.last  # type: ignore[return-value]  # the step has begun, so that a task was submitted
        work = batch.works_at[stage.number]["load_kv"]
        task = PageTransfer(stage.from_host, work, "load_kv", layer, batch.index, -1, slot, self.index)
        # The positions say where in the cache the keys and values lie.
        return self._submit(task, (batch.kv[layer], batch.positions), (run_state.kv_slots[slot],))

    def offload_qkv(self, layer: int, micro_batch: int) -> Task:
        """Move queries, keys and values to the host (D1 of MoE-Lightning)."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + QKV
        if batch.tag != tag:
            raise self._out_of_order("offload_qkv", layer, batch, tag)
        batch.tag = tag - QKV + QKV_HOST
        if self._run.unified:
            return batch.last  # type: ignore[return-value]  # a tag past INPUT means that a task was submitted
        lane, work = batch.stage.to_host, batch.works["offload_qkv"]
        batch.last = task = PageTransfer(lane, work, "offload_qkv", layer, batch.index, -1, None, self.index)
        return self._submit(task, (batch.qkv,), (batch.qkv_host,))

    def cpu_attention(self, layer: int, micro_batch: int) -> Task:
        """Attention on the host, over the KV cache in host memory."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + QKV_HOST
        if batch.tag != tag:
            raise self._out_of_order("cpu_attention", layer, batch, tag)
        if self.chunked:
            self._require_before("cpu_attention", layer, micro_batch)
            if batch.before is not None and batch.before.unsaved == layer:
                raise OutOfOrder(
                    f"cpu_attention: offload_kv the keys and values of mb{micro_batch - 1} before"
                )
        if batch.kv_on_accelerator and not self._run.unified:
            raise PolicyError("cpu_attention: the KV cache lives on the accelerator: use attention")
        if layer in batch.staged:
            raise OutOfOrder(f"cpu_attention: L{layer} mb{micro_batch} was loaded by load_kv: use attention")
        batch.tag = tag - QKV_HOST + ATTENDED_HOST
        cache = batch.kv[layer]
        batch.last = task = HostKernel(
            self._host,
            batch.works["cpu_attention"],
            "cpu_attention",
            layer,
            batch.index,
            -1,
            None,
            self.index,
        )
        return self._submit(task, (batch.qkv_host, cache), (batch.attention_host, cache))

    def load_hidden(self, layer: int, micro_batch: int) -> Task:
        """Move the host's attention output to the accelerator (D2 of MoE-Lightning)."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + ATTENDED_HOST
        if batch.tag != tag:
            raise self._out_of_order("load_hidden", layer, batch, tag)
        batch.tag = tag - ATTENDED_HOST + ATTENDED
        if self._run.unified:
            return batch.last  # type: ignore[return-value]  # a tag past INPUT means that a task was submitted
        lane, work = batch.stage.from_host, batch.works["load_hidden"]
        batch.last = task = PageTransfer(lane, work, "load_hidden", layer, batch.index, -1, None, self.index)
        return self._submit(task, (batch.attention_host,), (batch.attention,))

    def offload_kv(self, layer: int, micro_batch: int) -> Task:
        """Move the new tokens' keys and values to the cache on the host, after `attention`."""
        batch = self._batches[micro_batch]
        if batch.unsaved != layer:
            raise OutOfOrder(f"offload_kv: L{layer} mb{micro_batch} has no keys and values to save")
        batch.unsaved = -1
        if self._run.unified:
            self._leaving(batch, ())
            return batch.last  # type: ignore[return-value]  # a layer to save means that a task was submitted
        lane, work = batch.stage.to_host, batch.works["offload_kv"]
        task = PageTransfer(lane, work, "offload_kv", layer, batch.index, -1, None, self.index)
        # All else that uses the positions lies between this step's `embed` and the next one's; this alone may be late.
        reads: tuple[Block, ...] = (batch.qkv, batch.kv[layer], batch.positions)
        if self.chunked:  # attention was over keys and values at hand, and has touched no cache
            reads = (*reads, batch.attention)
        return self._submit(task, self._leaving(batch, reads), (batch.kv[layer],))

    def _place_in_layer(self, micro_batch: int) -> Block:
        """Room for what a micro-batch has within a layer, which is another's when it leaves the layer."""
        places = self._run.rooms
        if not places:
            raise OverBudget(
                f"pre_attention: mb{micro_batch} finds no room: the plan limits the micro-batches within a layer to "
                f"{self._run.plan.in_flight}: finish one of them first, or raise plan.limit_in_flight"
            )
        return places.popleft()

    def _require_before(self, verb: str, layer: int, micro_batch: int) -> None:
        """Check that the chunk that a chunk goes on from was attended to in that layer."""
        before = self._batches[micro_batch].before
        if before is not None and before.tag < self._base + layer * STRIDE + ATTENDED_HOST:
            raise OutOfOrder(
                f"{verb}(L{layer}, mb{micro_batch}) goes on from mb{micro_batch - 1}, which has not been attended to "
                "in that layer: take micro-batches in their order"
            )

    def _put_in_device_kv(self, layer: int, micro_batch: int) -> Block:
        """Where a chunk finds the keys and values of those before it, since the KV cache is on the host.

        There is room for those of one layer: all chunks pass it, on the same processor, before the next one.
        """
        batch = self._batches[micro_batch]
        before = batch.before
        if before is None:
            following = self._batches[micro_batch + 1 :]
            others = [each for each in following if each.device_kv is batch.device_kv]
            if any(each.tag < self._base + (layer - 1) * STRIDE + ATTENDED_HOST for each in others if layer):
                raise OutOfOrder(
                    f"attention(L{layer}, mb{micro_batch}): its prompts go on in later micro-batches, which have to "
                    f"pass L{layer - 1} before, as the KV cache is on the host: take all of them layer by layer"
                )
        elif before.attended_in_device_kv != layer:
            raise PolicyError(
                f"attention(L{layer}, mb{micro_batch}): mb{micro_batch - 1}, which it goes on from, was attended to on "
                "the host: use cpu_attention here too"
            )
        batch.attended_in_device_kv = layer
        return batch.device_kv

    def _take_staged(self, batch: MicroBatch, layer: int) -> int:
        """The slot with a layer's keys and values, which is empty for the next `load_kv` from here on."""
        slot = batch.staged.pop(layer, None)
        if slot is None:
            raise PolicyError(
                "attention: the KV cache lives on the host: load_kv before, or use cpu_attention in decode"
            )
        batch.stage.empty_kv_slots.append(slot)
        return slot
