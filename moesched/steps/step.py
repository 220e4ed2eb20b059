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

Where several nodes share the experts, `assign` says which node runs which, between `route` and `run_expert`.

In a pipeline a micro-batch is at one stage at a time, and so are its verbs: `pre_attention` of a stage's first layer
takes its hidden state there. Token ids come from the host in any case.
"""

from __future__ import annotations

from moesched.errors import OutOfOrder, PolicyError
from moesched.steps.run_state import STRIDE, MicroBatch
from moesched.steps.verbs.attention import AttentionVerbs
from moesched.steps.verbs.base import ATTENDED
from moesched.steps.verbs.experts import ExpertVerbs
from moesched.steps.verbs.pages import PageVerbs
from moesched.tasks import Decision, HostKernel, Kernel, Task


class Step(PageVerbs, AttentionVerbs, ExpertVerbs):
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

    def kv_on_accelerator(self, micro_batch: int) -> bool:
        """Whether the plan has the accelerator hold a micro-batch's KV cache, rather than the host."""
        return self._batches[micro_batch].kv_on_accelerator

    def goes_on(self, micro_batch: int) -> bool:
        """Whether it is a chunk that goes on from the one before it, in prefill."""
        return self._batches[micro_batch].before is not None

    def embed(self, micro_batch: int) -> Task:
        """Look up the embeddings of the micro-batch's tokens: its prompts, or the tokens sampled last."""
        batch = self._batches[micro_batch]
        if batch.tag != self._base - 1 or not self.attends:
            raise self._out_of_order("embed", 0, batch, self._base - 1)
        if batch.before is not None and batch.before.tag < self._base:
            raise OutOfOrder(f"embed: mb{micro_batch} goes on from mb{micro_batch - 1}: embed that first")
        batch.tag = self._base
        lane = batch.stage.lane
        if self.index and self._run.plan.batch.beams > 1:
            at_home, kernel = (lane, Kernel) if batch.kv_on_accelerator else (self._host, HostKernel)
            work = batch.works["reorder"]
            reorder = kernel(at_home, work, "reorder", -1, batch.index, -1, None, self.index)
            self._submit(reorder, (batch.tokens,), (batch.positions, *batch.kv))
        batch.last = task = Kernel(lane, batch.works["embed"], "embed", -1, batch.index, -1, None, self.index)
        return self._submit(task, (batch.tokens,), (batch.hidden, batch.positions))

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
        if batch.room is not None:
            reads = self._leaving(batch, reads)
        return self._submit(task, reads, (batch.hidden,))

    def sample(self, micro_batch: int) -> Task:
        """LM head and the choice of each sequence's next token; the value is the list of tokens."""
        batch = self._batches[micro_batch]
        tag = self._base + len(self.layers) * STRIDE
        if batch.tag != tag or batch.unsaved >= 0:
            raise self._out_of_order("sample", len(self.layers), batch, tag)
        batch.tag = self._base + self._run.stride - 1
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
            if batch.tag != self._base + self._run.stride - 1 or batch.last is None:
                last = f", where {batch.last.line} left it" if batch.last is not None else ""
                raise OutOfOrder(
                    f"{self.kind} step {self.index} ended before mb{batch.index} was sampled: "
                    f"it is at {self._where(batch)}{last}"
                )
            if batch.ends:
                samples.append((batch, batch.last))
        if self.chunked:
            self._run.end_prefill()
        return samples
