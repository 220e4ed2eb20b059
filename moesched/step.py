"""The verbs: what a policy says while it schedules one prefill or decode step.

Each verb submits one task and returns its handle. A verb checks that its input is there and leaves its output's
value tag, so a schedule that drops, repeats or swaps a verb is refused at the policy's own line, on a virtual clock
exactly as on hardware. Order, place and look-ahead belong to the policy; nothing here chooses them.

A micro-batch passes these stages in every layer, and its tag says which it has reached:

    INPUT --pre_attention--> QKV --attention----------------------------------------------> ATTENDED
                              `--offload_qkv--> QKV_HOST --cpu_attention--> ATTENDED_HOST --load_hidden--> ATTENDED
    ATTENDED --post_attention--> INPUT of the next layer
    ATTENDED --route--> ROUTED --run_expert for each expert, then combine--> INPUT of the next layer

In prefill a micro-batch may be a chunk of long prompts (see `chunks.py`). It goes on from the chunk before it, in the
order of `Step.micro_batches`: that one is embedded, and in each layer attended to, before it is. `sample` of a chunk in
which no prompt ends has nothing to do.

With several beams, `embed` of a decode step is preceded by a task that has every beam continue the one it came from.

What a layer's router will choose may be guessed one layer earlier: `preview_route` reads a routed micro-batch's hidden
state and changes nothing.

Experts may run on the host, between `offload_routed`, which takes all routed rows there, and `load_routed`, which
brings back what those experts made of them.

On a machine whose accelerator and host share a memory, `offload_qkv`, `load_hidden`, `offload_kv`, `offload_routed`
and `load_routed` have nothing to move: they check and set tags, and return the task that made the data.

In a pipeline a micro-batch is at one stage at a time, and so are its verbs: `pre_attention` of a stage's first layer
takes its hidden state there. Token ids come from the host in any case.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, TypeVar

from moesched.errors import NotResident, OutOfOrder, OverBudget, PolicyError
from moesched.memory import Pool, Slot, View, Views, describe, held_slots
from moesched.models.layout import Page
from moesched.parallel.node_experts import ownership_problem
from moesched.schedule import STRIDE, HostOutput, Kind, MicroBatch, Schedule
from moesched.tasks import (
    DEMAND,
    DONE,
    IDLE,
    PREFETCH,
    Block,
    Decision,
    HostKernel,
    Kernel,
    PageTransfer,
    Task,
)

INPUT, QKV, QKV_HOST, ATTENDED_HOST, ATTENDED, ROUTED = range(6)
STAGES = ("input", "qkv", "qkv on the host", "attended on the host", "attended", "routed")

At = Literal["accelerator", "host"]
K = TypeVar("K", bound=Hashable)


class Step:
    """One prefill or decode step, as a policy sees it.

    Attributes:
        kind: "prefill" or "decode".
        index: 0 for prefill, then 1, 2, ... for the decode steps.
        layers: the model's layers.
        micro_batches: the micro-batches. Prefill may have more of them than decode steps, where long prompts are cut.
        last: whether no step follows, so that nothing need be fetched for one.
        chunked: whether it is a prefill in which prompts are cut.
        nodes, node: how many nodes share the experts, and which one this is, from 0.
        attends: whether this node has attention, router and sampling. Where it has not, `route` and `sample` tell what
            the first node found, and there are no verbs before `route`.
    """

    def __init__(self, schedule: Schedule, index: int, *, last: bool = False) -> None:
        self._schedule = schedule
        self._engine = schedule.engine
        self._submit = schedule.submit
        self._batches = schedule.batches(index)
        self._base = index * schedule.stride
        self._limited = schedule.limited and not index
        self._host = schedule.lanes["host"]
        self._weights = schedule.plan.machine.roles.weights
        self._placement = schedule.plan.placement
        self.nodes, self.node = schedule.plan.nodes, schedule.plan.node
        self.attends = schedule.plan.attends
        self.kind: Kind = "decode" if index else "prefill"
        self.index = index
        self.last = last
        self.chunked = not index and schedule.plan.chunked
        self.layers = schedule.plan.layers
        self.micro_batches = range(len(self._batches))
        schedule.size(index)

    def kv_on_accelerator(self, micro_batch: int) -> bool:
        """Whether the plan has the accelerator hold a micro-batch's KV cache, rather than the host."""
        return self._batches[micro_batch].kv_on_accelerator

    def goes_on(self, micro_batch: int) -> bool:
        """Whether it is a chunk that goes on from the one before it, in prefill."""
        return self._batches[micro_batch].before is not None

    # -- pages -------------------------------------------------------------------------------------

    def pages(self, layer: int) -> tuple[Page, ...]:
        """All pages of a layer."""
        return self._schedule.plan.layout.layer(layer)

    def dense_pages(self, layer: int) -> tuple[Page, ...]:
        """The pages of a layer that every token needs: norms, attention's projections, the router."""
        return self._schedule.plan.layout.dense(layer)

    def expert_pages(self, layer: int, expert: int) -> tuple[Page, ...]:
        """The pages of one expert."""
        return self._schedule.plan.layout.expert(layer, expert)

    def fetch(
        self,
        pages: Sequence[Page],
        pool: Pool,
        *,
        source: Pool | None = None,
        urgent: bool = False,
        speculative: bool = False,
    ) -> Task:
        """Move pages into slots of `pool` in one transfer, from `source` or from where the weights live.

        On its link an urgent transfer goes before those that are not, and a speculative one after all others.

        Raises:
            PolicyError: a page is in that memory already, or there are no pages to move.
            NotResident: `source` does not hold a page.
        """
        task, reads = self._transfer("fetch", pages, pool, source)
        transfer_class = DEMAND if urgent else IDLE if speculative else PREFETCH
        return self._submit(task, reads, task.slots, (), transfer_class)

    def pin(self, pages: Sequence[Page], pool: Pool, *, source: Pool | None = None) -> Task:
        """Move pages into pinned memory, the first hop to the accelerator, from `source` or where the weights live."""
        task, reads = self._transfer("pin", pages, pool, source)
        return self._submit(task, reads, task.slots, (), PREFETCH)

    def lift(self, pages: Sequence[Page], pool: Pool) -> None:
        """Make transfers of these pages that have not started urgent: the pages are needed now."""
        for slot in held_slots("lift", pages, pool):
            if slot.writer is not None:
                self._engine.lift(slot.writer, DEMAND)

    def cancel(self, pages: Sequence[Page], pool: Pool) -> bool:
        """Give up pages that nobody uses and whose transfer has not started: it is cancelled, and moves no bytes.

        Returns:
            whether that is so. Otherwise nothing has changed, and `evict` gives them up.

        Raises:
            NotResident: a page is not in the pool.
            PolicyError: they are not the pages of one fetch, or a task that was submitted uses one of them.
        """
        return pool.cancel(pages, self._engine)

    def evict(self, pages: Sequence[Page], pool: Pool) -> None:
        """Give up pages; their slots are free for the next fetch."""
        for page in pages:
            slot = pool.memory.table.get(page.id)
            if slot is None or slot.pool is not pool:
                raise NotResident(f"evict: page {describe(page)} is not in pool {pool.name}")
            if slot.fixed:
                raise PolicyError(
                    f"evict: page {describe(page)} is kept for the whole run: keep fewer in the plan"
                )
            pool.vacate(slot, self._engine)

    # -- a micro-batch through a layer -------------------------------------------------------------

    def embed(self, micro_batch: int) -> Task:
        """Look up the embeddings of the micro-batch's tokens: its prompts, or the tokens sampled last."""
        batch = self._batches[micro_batch]
        if batch.tag != self._base - 1 or not self.attends:
            raise self._out_of_order("embed", 0, batch, self._base - 1)
        if batch.before is not None and batch.before.tag < self._base:
            raise OutOfOrder(f"embed: mb{micro_batch} goes on from mb{micro_batch - 1}: embed that first")
        batch.tag = self._base
        lane = batch.stage.lane
        if self.index and self._schedule.plan.batch.beams > 1:
            at_home, kernel = (lane, Kernel) if batch.kv_on_accelerator else (self._host, HostKernel)
            work = batch.works["reorder"]
            reorder = kernel(at_home, work, "reorder", -1, batch.index, -1, None, self.index)
            self._submit(reorder, (batch.tokens,), (batch.positions, *batch.kv))
        batch.last = task = Kernel(lane, batch.works["embed"], "embed", -1, batch.index, -1, None, self.index)
        return self._submit(task, (batch.tokens,), (batch.hidden, batch.positions))

    def pre_attention(self, layer: int, micro_batch: int) -> Task:
        """Norm, QKV projection and rotary embedding, on the accelerator."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE
        if batch.tag != tag or batch.unsaved >= 0 or not self.attends:
            raise self._out_of_order("pre_attention", layer, batch, tag)
        stage = batch.stage
        if layer == stage.end:
            for hop in self._schedule.pass_on(batch, layer, self.index):
                self._submit(hop, (batch.hidden,), (batch.hidden,))
            stage = batch.stage
        view = stage.dense.open.get(layer) or self._view(stage.dense, layer)
        writes: tuple[Block, ...] = (batch.qkv,)
        if self._limited:
            batch.place = self._place_in_layer(micro_batch)
            writes = (batch.qkv, batch.place)
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
        schedule = self._schedule
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + QKV
        if batch.tag != tag:
            raise self._out_of_order("attention", layer, batch, tag)
        cache = batch.kv[layer]
        slot = None
        if self.chunked:
            self._require_before("attention", layer, micro_batch)
        if not batch.kv_on_accelerator:
            if self.chunked and not schedule.unified:
                cache = self._put_at_hand(layer, micro_batch)
            if self.index:
                slot = self._take_staged(batch, layer)
                cache = cache if schedule.unified else schedule.kv_slots[slot]
            batch.unsaved = layer
        batch.tag = tag - QKV + ATTENDED
        lane = batch.stage.lane
        batch.last = task = Kernel(
            lane, batch.works["attention"], "attention", layer, batch.index, -1, slot, self.index
        )
        return self._submit(task, (batch.qkv, cache), (batch.attention, cache))

    def load_kv(self, layer: int, micro_batch: int) -> Task:
        """Bring a micro-batch's cached keys and values of a layer to the accelerator, for `attention` in decode.

        This is D4 of MoE-Lightning, and what FlexGen prefetches for the next micro-batch. A slot of `Plan.stage_kv`
        is taken until that `attention`.
        """
        schedule = self._schedule
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + QKV
        if not self.index or batch.kv_on_accelerator:
            where = "the KV cache lives on the accelerator" if self.index else "a prompt has nothing cached"
            raise PolicyError(f"load_kv: {where}: leave it out")
        if not self._base <= batch.tag <= tag:
            raise self._out_of_order("load_kv", layer, batch, tag)
        if layer in batch.staged:
            raise OutOfOrder(f"load_kv: keys and values of L{layer} mb{micro_batch} were loaded already")
        stage = schedule.stage_of[layer]
        if not stage.empty_kv_slots:
            raise OverBudget(
                f"load_kv: all {schedule.plan.kv_slots} slots for keys and values are taken: call attention for one "
                "of them first, or plan.stage_kv more"
            )
        slot = batch.staged[layer] = stage.empty_kv_slots.popleft()
        if schedule.unified:
            return batch.last  # type: ignore[return-value]  # the step has begun, so that a task was submitted
        work = batch.works_at[stage.number]["load_kv"]
        task = PageTransfer(stage.from_host, work, "load_kv", layer, batch.index, -1, slot, self.index)
        # The positions say where in the cache the keys and values lie.
        return self._submit(task, (batch.kv[layer], batch.positions), (schedule.kv_slots[slot],))

    def offload_qkv(self, layer: int, micro_batch: int) -> Task:
        """Move queries, keys and values to the host (D1 of MoE-Lightning)."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + QKV
        if batch.tag != tag:
            raise self._out_of_order("offload_qkv", layer, batch, tag)
        batch.tag = tag - QKV + QKV_HOST
        if self._schedule.unified:
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
        if batch.kv_on_accelerator and not self._schedule.unified:
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
        if self._schedule.unified:
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
        if self._schedule.unified:
            self._leaving(batch, ())
            return batch.last  # type: ignore[return-value]  # a layer to save means that a task was submitted
        lane, work = batch.stage.to_host, batch.works["offload_kv"]
        task = PageTransfer(lane, work, "offload_kv", layer, batch.index, -1, None, self.index)
        # All else that uses the positions lies between this step's `embed` and the next one's; this alone may be late.
        reads: tuple[Block, ...] = (batch.qkv, batch.kv[layer], batch.positions)
        if self.chunked:  # attention was over keys and values at hand, and has touched no cache
            reads = (*reads, batch.attention)
        return self._submit(task, self._leaving(batch, reads), (batch.kv[layer],))

    def post_attention(self, layer: int, micro_batch: int) -> Task:
        """Output projection, router, all experts and combine as one kernel over the whole layer's pages."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + ATTENDED
        if batch.tag != tag:
            raise self._out_of_order("post_attention", layer, batch, tag)
        if self.nodes > 1:
            raise PolicyError(
                "post_attention: other nodes run experts of this layer: use route and run_expert"
            )
        stage = batch.stage
        view = stage.whole.open.get(layer) or self._view(stage.whole, layer)
        batch.tag = tag - ATTENDED + STRIDE
        batch.last = task = Kernel(
            stage.lane,
            batch.works["post_attention"],
            "post_attention",
            layer,
            batch.index,
            -1,
            view,
            self.index,
        )
        reads = (batch.attention, batch.hidden, *view.reads)
        if batch.place is not None:
            reads = self._leaving(batch, reads)
        return self._submit(task, reads, (batch.hidden,))

    def route(self, layer: int, micro_batch: int) -> Task:
        """Output projection, norm and router; await it for {expert: tokens}, every one of which must then run."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE
        needed = tag + ATTENDED if self.attends else tag if layer else tag - 1
        if batch.tag != needed:
            raise self._out_of_order("route", layer, batch, needed)
        stage = batch.stage
        view = None
        reads: tuple[Block, ...] = ()
        if self.attends:
            view = stage.dense.open.get(layer) or self._view(stage.dense, layer)
            reads = (batch.attention, batch.hidden, *view.reads)
        batch.tag = tag + ROUTED
        batch.pending = None
        batch.last = batch.routed = task = Decision(
            stage.lane, batch.works["route"], "route", layer, batch.index, -1, view, self.index
        )
        return self._submit(task, reads, (batch.hidden, batch.normed))

    def preview_route(self, layer: int, micro_batch: int) -> Task:
        """Norm and router of `layer` on the hidden state of the layer before, once that was routed.

        Await it for {expert: tokens}: a guess of what `route` will choose there, which binds nobody (speculative expert
        loading, Eliseev and Mazur 2023).
        """
        batch = self._batches[micro_batch]
        tag = self._base + (layer - 1) * STRIDE + ROUTED
        if not self.attends:
            raise self._out_of_order("preview_route", layer, batch, tag)
        if batch.tag != tag or layer not in self.layers:
            raise OutOfOrder(
                f"preview_route(L{layer}, mb{micro_batch}) needs mb{micro_batch} at step {self.index} L{layer - 1} "
                f"{STAGES[ROUTED]}, of a layer that another one follows, but it is at {self._where(batch)}"
            )
        stage = batch.stage
        view = stage.dense.open.get(layer) or self._view(stage.dense, layer)
        work = batch.works["preview_route"]
        task = Decision(stage.lane, work, "preview_route", layer, batch.index, -1, view, self.index)
        return self._submit(task, (batch.hidden, *view.reads), ())

    def offload_routed(self, layer: int, micro_batch: int) -> Task:
        """Move a routed micro-batch's hidden states to the host, for all experts that are to run there.

        Which experts those are need not be known: it may be called as soon as `route` was.
        """
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + ROUTED
        if batch.tag != tag:
            raise self._out_of_order("offload_routed", layer, batch, tag)
        if not self._schedule.plan.experts_on_host:
            raise PolicyError(
                "offload_routed: the plan has no room for experts on the host: call plan.run_experts_on_host"
            )
        if batch.on_host is not None:
            raise OutOfOrder(f"offload_routed: the rows of L{layer} mb{micro_batch} are on the host already")
        batch.on_host = []
        if self._schedule.unified:
            return batch.last  # type: ignore[return-value]  # a tag past INPUT means that a task was submitted
        lane, work = batch.stage.to_host, batch.works["offload_routed"]
        batch.last = task = PageTransfer(
            lane, work, "offload_routed", layer, batch.index, -1, None, self.index
        )
        return self._submit(task, (batch.normed,), (batch.normed_host,))

    def load_routed(self, layer: int, micro_batch: int) -> Task:
        """Move what experts have made on the host to the accelerator, all of it at once, for `combine`."""
        schedule = self._schedule
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + ROUTED
        if batch.tag != tag:
            raise self._out_of_order("load_routed", layer, batch, tag)
        if not batch.on_host:
            raise OutOfOrder(f"load_routed: no expert of L{layer} mb{micro_batch} has run on the host")
        outputs, batch.on_host = batch.on_host, None
        if schedule.unified:
            return batch.last  # type: ignore[return-value]  # a tag past INPUT means that a task was submitted
        rows = sum(output.tokens for output in outputs)
        source, destination = schedule.plan.memory("host").name, batch.stage.memory
        lane, work = schedule.move(source, destination, rows * schedule.operations.hidden_bytes)
        experts = tuple(output.expert for output in outputs)
        loaded = Block(f"outputs from the host mb{micro_batch}")
        batch.expert_outputs.append(loaded)
        batch.last = task = PageTransfer(
            lane, work, "load_routed", layer, batch.index, -1, experts, self.index
        )
        return self._submit(task, tuple(output.block for output in outputs), (loaded,))

    def run_expert(self, layer: int, expert: int, micro_batch: int, *, at: At = "accelerator") -> Task:
        """One expert on those tokens of the micro-batch that were routed to it.

        On the host it reads weights where they lie in the host's memory (`Plan.run_experts_on_host`). Processors round
        alike where they run the same kernels: on the torch device with one memory or two, not beside CUDA.
        """
        schedule = self._schedule
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + ROUTED
        routed = batch.routed
        if batch.tag != tag or routed is None:
            raise self._out_of_order("run_expert", layer, batch, tag)
        if batch.pending is None:
            if routed.state != DONE:
                raise OutOfOrder(f"run_expert: await route({layer}, {micro_batch}) before its experts")
            if self._placement:
                raise OutOfOrder(
                    f"run_expert: say which node runs which experts of L{layer} mb{micro_batch} before: assign them"
                )
            batch.pending = set(routed.value)
        if expert not in batch.pending:
            if batch.owners is not None and batch.owners.get(expert, self.node) != self.node:
                raise PolicyError(
                    f"run_expert: E{expert} of L{layer} mb{micro_batch} was assigned to node {batch.owners[expert]}, "
                    f"and this is node {self.node}"
                )
            raise OutOfOrder(
                f"run_expert: L{layer} mb{micro_batch} has no tokens for E{expert}, or it has run already"
            )
        if at == "host" and batch.on_host is None:
            raise OutOfOrder(
                f"run_expert: L{layer} mb{micro_batch} is not on the host: call offload_routed before"
            )
        stage = batch.stage
        views = stage.expert[at]
        view = views.open.get((layer, expert)) or self._view(views, (layer, expert))
        view.touch()
        batch.pending.discard(expert)
        output = Block(f"output E{expert} mb{micro_batch}")
        tokens = routed.value[expert]
        if at == "host" and batch.on_host is not None:
            batch.on_host.append(HostOutput(expert, tokens, output))
        if at == "accelerator" or schedule.unified:
            batch.expert_outputs.append(output)
        operations = schedule.operations
        kind, amount = f"expert at {at}", operations.fetched_expert
        if view.slots[0].fixed and (at == "accelerator" or schedule.unified):
            kind, amount = f"kept expert at {at}", operations.kept_expert
        work = schedule.work(kind, stage.processors[at], tokens, amount)
        lane, kernel = (stage.lane, Kernel) if at == "accelerator" else (self._host, HostKernel)
        task = kernel(lane, work, "run_expert", layer, batch.index, expert, view, self.index)
        rows = batch.normed if at == "accelerator" else batch.normed_host
        return self._submit(task, (rows, *view.reads), (output,))

    def assign(self, layer: int, micro_batch: int, owners: Mapping[int, int]) -> None:
        """Say which node runs each expert that the micro-batch was routed to, on every node the same.

        Needed in a plan that places experts, once `route` was awaited. This node then runs just its own.

        owners: nodes by expert.
        """
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + ROUTED
        routed = batch.routed
        if batch.tag != tag or routed is None:
            raise self._out_of_order("assign", layer, batch, tag)
        if not self._placement:
            raise PolicyError(
                "assign: the plan places no experts on nodes: leave it out, or call place_experts"
            )
        if routed.state != DONE:
            raise OutOfOrder(f"assign: await route({layer}, {micro_batch}) before")
        if batch.owners is not None:
            raise OutOfOrder(f"assign: the experts of L{layer} mb{micro_batch} were assigned already")
        if problem := ownership_problem(owners, routed.value, self._placement):
            raise PolicyError(f"assign(L{layer}, mb{micro_batch}): {problem}")
        batch.owners = dict(owners)
        batch.pending = {expert for expert, node in owners.items() if node == self.node}

    def touch_expert(self, layer: int, expert: int, micro_batch: int) -> Task:
        """One expert that this node holds on a row of zeros: its weights are read, and its result counts for nothing.

        It belongs to the layer of a routed micro-batch, whose `combine` waits for it (busy full loading, and the spare
        quota of router-aided dynamic loading: section 4.2 of the paper on a cluster of Apple silicon, RACS'24).
        """
        schedule = self._schedule
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + ROUTED
        if batch.tag != tag:
            raise self._out_of_order("touch_expert", layer, batch, tag)
        stage = batch.stage
        views = stage.expert["accelerator"]
        view = views.open.get((layer, expert)) or self._view(views, (layer, expert))
        view.touch()
        touched = Block(f"touched E{expert} mb{micro_batch}")
        batch.expert_outputs.append(touched)
        operations = schedule.operations
        kept = view.slots[0].fixed
        kind, amount = (
            ("kept expert at accelerator", operations.kept_expert)
            if kept
            else ("expert at accelerator", operations.fetched_expert)
        )
        work = schedule.work(kind, stage.processors["accelerator"], 1, amount)
        task = Kernel(stage.lane, work, "touch_expert", layer, batch.index, expert, view, self.index)
        return self._submit(task, (batch.normed, *view.reads), (touched,))

    def combine(self, layer: int, micro_batch: int) -> Task:
        """The weighted sum of the experts' outputs, in ascending order of expert, and the residual.

        With several nodes each sums up what its own experts made, and the nodes' sums are added in their order.
        """
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + ROUTED
        if batch.tag == tag and self._placement and batch.owners is None:
            raise OutOfOrder(
                f"combine: the experts of L{layer} mb{micro_batch} were not assigned: assign them"
            )
        if batch.tag != tag or batch.pending is None:
            raise self._out_of_order("combine", layer, batch, tag)
        if batch.pending:
            missing = ", ".join(f"E{expert}" for expert in sorted(batch.pending))
            raise OutOfOrder(f"combine: L{layer} mb{micro_batch} was routed to {missing}, which did not run")
        if batch.on_host:
            left = ", ".join(f"E{output.expert}" for output in batch.on_host)
            raise OutOfOrder(
                f"combine: L{layer} mb{micro_batch} lacks what {left} left on the host: call load_routed before"
            )
        batch.tag = tag - ROUTED + STRIDE
        batch.pending = batch.routed = None
        owners, batch.owners = batch.owners, None
        outputs, batch.expert_outputs = batch.expert_outputs, []
        lane = batch.stage.lane
        batch.last = task = Kernel(
            lane, batch.works["combine"], "combine", layer, batch.index, -1, owners, self.index
        )
        reads = (batch.normed, batch.hidden, *outputs)
        if batch.on_host is not None:  # the rows went to the host, and no expert ran there
            batch.on_host = None
            reads = (batch.normed_host, *reads)
        return self._submit(task, self._leaving(batch, reads), (batch.hidden,))

    def sample(self, micro_batch: int) -> Task:
        """LM head and the choice of each sequence's next token; the value is the list of tokens."""
        batch = self._batches[micro_batch]
        tag = self._base + len(self.layers) * STRIDE
        if batch.tag != tag or batch.unsaved >= 0:
            raise self._out_of_order("sample", len(self.layers), batch, tag)
        batch.tag = self._base + self._schedule.stride - 1
        if not batch.ends:
            return batch.last  # type: ignore[return-value]  # the tag means that tasks were submitted
        lane = batch.stage.lane
        batch.last = task = Decision(
            lane, batch.works["sample"], "sample", -1, batch.index, -1, None, self.index
        )
        return self._submit(task, (batch.hidden,), (batch.tokens,))

    def close(self) -> list[tuple[MicroBatch, Task]]:
        """End the step; returns the micro-batches that sampled tokens, and each one's `sample`, whose values these are.

        Raises:
            OutOfOrder: a micro-batch was not sampled.
        """
        samples = []
        for batch in self._batches:
            if batch.tag != self._base + self._schedule.stride - 1 or batch.last is None:
                last = f", where {batch.last.line} left it" if batch.last is not None else ""
                raise OutOfOrder(
                    f"{self.kind} step {self.index} ended before mb{batch.index} was sampled: "
                    f"it is at {self._where(batch)}{last}"
                )
            if batch.ends:
                samples.append((batch, batch.last))
        if self.chunked:
            self._schedule.end_prefill()
        return samples

    # -- helpers -----------------------------------------------------------------------------------

    def _transfer(
        self, verb: str, pages: Sequence[Page], pool: Pool, source: Pool | None
    ) -> tuple[PageTransfer, tuple[Slot, ...]]:
        """The task that moves pages into slots of a pool, and the slots that it reads them from."""
        if not pages:
            raise PolicyError(f"{verb}: no pages to move into pool {pool.name}: skip the call")
        reads = () if source is None else held_slots(verb, pages, source)
        if len(pages) > len(pool.slots):
            raise OverBudget(
                f"{verb}: {len(pages)} pages do not fit pool {pool.name} of {len(pool.slots)} slots"
            )
        slots = pool.place_all(pages, self._engine)
        nbytes = 0
        for page in pages:
            nbytes += page.nbytes
        origin = self._weights if source is None else source.memory.name
        lane, work = self._schedule.move(origin, pool.memory.name, nbytes, len(slots))
        first = pages[0]
        task = PageTransfer(lane, work, verb, first.layer, -1, first.expert, reads, self.index)
        task.pages, task.slots = tuple(pages), slots
        return task, reads

    def _place_in_layer(self, micro_batch: int) -> Block:
        """Room for what a micro-batch has within a layer, which is another's when it leaves the layer."""
        places = self._schedule.places
        if not places:
            raise OverBudget(
                f"pre_attention: mb{micro_batch} finds no room: the plan limits the micro-batches within a layer to "
                f"{self._schedule.plan.in_flight}: finish one of them first, or raise plan.limit_in_flight"
            )
        return places.popleft()

    def _leaving(self, batch: MicroBatch, reads: tuple[Block, ...]) -> tuple[Block, ...]:
        """What a verb reads that may be the micro-batch's last in the layer; its room is free for another then."""
        place = batch.place
        if place is None:
            return reads
        if batch.unsaved < 0 and batch.tag % STRIDE == self._base % STRIDE:
            batch.place = None
            self._schedule.places.append(place)
        return (*reads, place)

    def _require_before(self, verb: str, layer: int, micro_batch: int) -> None:
        """Check that the chunk that a chunk goes on from was attended to in that layer."""
        before = self._batches[micro_batch].before
        if before is not None and before.tag < self._base + layer * STRIDE + ATTENDED_HOST:
            raise OutOfOrder(
                f"{verb}(L{layer}, mb{micro_batch}) goes on from mb{micro_batch - 1}, which has not been attended to "
                "in that layer: take micro-batches in their order"
            )

    def _put_at_hand(self, layer: int, micro_batch: int) -> Block:
        """Where a chunk finds the keys and values of those before it, since the KV cache is on the host.

        There is room for those of one layer: all chunks pass it, on the same processor, before the next one.
        """
        batch = self._batches[micro_batch]
        before = batch.before
        if before is None:
            following = self._batches[micro_batch + 1 :]
            others = [each for each in following if each.at_hand is batch.at_hand]
            if any(each.tag < self._base + (layer - 1) * STRIDE + ATTENDED_HOST for each in others if layer):
                raise OutOfOrder(
                    f"attention(L{layer}, mb{micro_batch}): its prompts go on in later micro-batches, which have to "
                    f"pass L{layer - 1} before, as the KV cache is on the host: take all of them layer by layer"
                )
        elif before.attended_at_hand != layer:
            raise PolicyError(
                f"attention(L{layer}, mb{micro_batch}): mb{micro_batch - 1}, which it goes on from, was attended to on "
                "the host: use cpu_attention here too"
            )
        batch.attended_at_hand = layer
        return batch.at_hand

    def _take_staged(self, batch: MicroBatch, layer: int) -> int:
        """The slot with a layer's keys and values, which is empty for the next `load_kv` from here on."""
        slot = batch.staged.pop(layer, None)
        if slot is None:
            raise PolicyError(
                "attention: the KV cache lives on the host: load_kv before, or use cpu_attention in decode"
            )
        batch.stage.empty_kv_slots.append(slot)
        return slot

    def _view(self, views: Views[K], key: K) -> View[K]:
        return views.show(key, self._engine)

    def _where(self, batch: MicroBatch) -> str:
        step, rest = divmod(batch.tag + 1, self._schedule.stride)
        if not rest:
            return f"the end of step {step - 1}" if step else "the start"
        layer, stage = divmod(rest - 1, STRIDE)
        unsaved = ", its keys and values not saved: offload_kv them" if batch.unsaved >= 0 else ""
        return f"step {step} L{layer} {STAGES[stage]}{unsaved}"

    def _out_of_order(self, verb: str, layer: int, batch: MicroBatch, needed: int) -> OutOfOrder:
        if not self.attends and verb not in (
            "route",
            "assign",
            "run_expert",
            "touch_expert",
            "combine",
            "sample",
        ):
            return OutOfOrder(
                f"{verb}: node {self.node} does not attend, as the plan is centralised: leave it out where not "
                "step.attends"
            )
        needs = (
            "the end of the step before"
            if needed == self._base - 1
            else f"step {self.index} L{layer} {STAGES[needed % STRIDE]}"
        )
        where = self._where(batch)
        return OutOfOrder(
            f"{verb}(L{layer}, mb{batch.index}) needs mb{batch.index} at {needs}, but it is at {where}"
        )
