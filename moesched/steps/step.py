"""The verbs with which a policy schedules one prefill or decode step.

A verb usually submits one task and returns its handle. A verb checks that its input is there, and notes the progress of
the micro-batch. So a schedule that drops, repeats or swaps a verb is refused at the policy's own line, in simulations
as on hardware. The policy alone chooses the order of verbs, the processors and the look-ahead.

In every layer a micro-batch takes one of these paths (from the table in `verbs/table.py`; see docs/verbs.md):

    input --pre_attention--> qkv
    qkv --attention--> attended
    qkv --offload_qkv--> qkv on the host --cpu_attention--> attended on the host --load_hidden--> attended
    attended --post_attention--> input of the next layer
    attended --route--> routed --combine--> input of the next layer
    output of the last layer --sample--> sampled --embed--> input of the first layer

Between `route` and `combine`, `run_expert` must be called for every expert that tokens were routed to. A call computes
all rows of the expert, a range of its rows, or its rows of several micro-batches; each row is computed exactly once.

In prefill a micro-batch may be a chunk: a part of long prompts. It continues the chunk before it in
`Step.micro_batches`. The earlier chunk must be embedded first, and its attention must come first in each layer.
`sample` does nothing for a chunk in which no prompt ends.

With several beams, a decode step's `embed` first submits a task that gives every beam the KV cache of the beam that it
continues.

`preview_route` guesses the choices of a later layer's router: it reads a routed micro-batch's hidden state and changes
nothing.

Experts may run on the host, between `offload_routed`, which copies all routed rows there, and `load_routed`, which
brings back the outputs computed there.

On a machine whose accelerator and host share a memory, the verbs that copy between the two have nothing to move: they
check and note progress, and return the task that made the data.

Where several nodes share the experts, `assign` comes between `route` and `run_expert`: it says which expert runs where.

In a pipeline a micro-batch and its verbs are at one stage at a time: `pre_attention` of a stage's first layer moves
the hidden state there. Token ids always come from the host.
"""

from __future__ import annotations

from moesched.errors import OutOfOrder, PolicyError
from moesched.steps.verb_gate import NOBODY
from moesched.steps.verbs.attention import AttentionVerbs
from moesched.steps.verbs.experts import ExpertVerbs
from moesched.steps.verbs.outlook import Outlook
from moesched.steps.verbs.pages import PageVerbs
from moesched.steps.verbs.table import EMBED, POST_ATTENTION, SAMPLE, START
from moesched.tasks import HostKernel, Kernel, Phase, Task


class Step(PageVerbs, AttentionVerbs, ExpertVerbs, Outlook):
    """One prefill or decode step, as a policy sees it.

    The attributes cannot be changed. Verbs may be called while `prefill` or `decode` runs, and only on its thread.

    Attributes:
        kind: "prefill" or "decode", the phase of its micro-batches; "mixed" where some hold prompts and others decode.
        layers: the model's layers.
        micro_batches: the numbers of the micro-batches. Prefill may have more of them than decode steps, where long
            prompts are cut; micro-batches whose sequences have all ended are left out.
        last: whether this is the last step, so that nothing need be fetched for a later one.
        chunked: whether some of its micro-batches are chunks, which hold parts of prompts.
        nodes: the number of nodes that share the experts.
        node: this node's number, from 0.
        attends: whether this node has attention, router and sampling. Otherwise `route` and `sample` have the results
            of the first node, and there are no verbs before `route`.
    """

    def __repr__(self) -> str:
        numbers = ", ".join(map(str, self.micro_batches))
        return f"<Step {self._number}: {self.kind} of {len(self.layers)} layers, micro-batches {numbers}>"

    def kv_on_accelerator(self, micro_batch: int, layer: int | None = None) -> bool:
        """Test whether a micro-batch's KV cache of a layer (None: of all layers) is on the accelerator."""
        here = self._present("kv_on_accelerator", micro_batch).kv.on_accelerator
        if layer is None:
            return all(here)
        self._require_layer("kv_on_accelerator", layer)
        return here[layer]

    def phase(self, micro_batch: int) -> Phase:
        """Return the phase of a micro-batch: "prefill" if it holds prompts, else "decode"."""
        return self._present("phase", micro_batch).phase

    def tokens(self, micro_batch: int) -> int:
        """Return the number of a micro-batch's new tokens in this step.

        In prefill they are the tokens of its prompts, or of the parts of prompts that it takes in this step. In decode
        each sequence has one.
        """
        batch = self._present("tokens", micro_batch)
        return sum(batch.tokens) if batch.phase == "prefill" else batch.works["embed"].tokens

    def goes_on(self, micro_batch: int) -> bool:
        """Test whether a micro-batch of prefill is a chunk that continues the prompts of the micro-batch before it."""
        return self._present("goes_on", micro_batch).before is not None

    def embed(self, micro_batch: int) -> Task:
        """Look up the embeddings of the micro-batch's tokens: its prompts, or the tokens sampled last."""
        batch = self._at(EMBED, -1, micro_batch)
        if batch.before is not None and batch.before.progress == START:
            raise OutOfOrder(f"embed: mb{micro_batch} continues mb{micro_batch - 1}: embed that first")
        if batch.phase == "decode" and self._state.plan.batch.beams > 1:
            stage, blocks, kv = batch.stage, batch.blocks, batch.kv
            lane, kernel = (stage.lane, Kernel) if kv.on_accelerator[0] else (stage.host, HostKernel)
            work = batch.works["reorder"]
            reorder = kernel(lane, work, "reorder", -1, batch.index, -1, None, self._number, batch.generated)
            self._enter(reorder, (blocks.tokens,), (blocks.positions, *kv.layers))
        return self._run(EMBED, -1, batch, batch.embeds)

    def post_attention(self, layer: int, micro_batch: int) -> Task:
        """Output projection, router, all experts and combine as one kernel over the whole layer's pages.

        Submits this task for a micro-batch and returns its handle.
        """
        batch = self._at(POST_ATTENTION, layer, micro_batch)
        if self.nodes > 1:
            raise PolicyError(
                "post_attention: other nodes run experts of this layer: use route and run_expert"
            )
        whole = batch.stage.whole
        view = whole.open.get(layer) or self._view(whole, layer)
        if view.moving and view.noted != self._number:
            view.use(self._number, batch.works["post_attention"].tokens)
        reads = (
            view.reads if batch.activations is None else (*view.reads, *self._activations(batch, leaves=True))
        )
        return self._run(POST_ATTENTION, layer, batch, view, reads)

    def sample(self, micro_batch: int) -> Task:
        """LM head and the choice of each sequence's next token; the value is the list of tokens.

        Submits this task for a micro-batch and returns its handle: awaiting the handle gives the value.
        """
        batch = self._at(SAMPLE, -1, micro_batch)
        if not batch.ends:
            batch.progress = self._state.stride + START
            return batch.last  # type: ignore[return-value]  # it is through all layers, so that tasks were submitted
        return self._run(SAMPLE, -1, batch, batch.ends)

    def close(self) -> list[tuple[tuple[int, ...], Task]]:
        """End the step; the framework calls this once the policy's method has ended.

        Returns:
            for each micro-batch that sampled tokens, (the requests that got one, its `sample` task); in continuous
            batching, also for each other micro-batch, (no requests, its last task).

        Raises:
            OutOfOrder: `sample` was not called for a micro-batch.
            PolicyError: the policy called this method.
        """
        if self._gate.thread != NOBODY:
            raise PolicyError("close: a step is closed once prefill or decode has ended: return instead")
        samples = []
        for batch in self._batches.values():
            if batch.progress != self._state.stride + START or batch.last is None:
                last = f", where {batch.last.line} left it" if batch.last is not None else ""
                raise OutOfOrder(
                    f"{self.kind} step {self._number} ended before mb{batch.index} was sampled: "
                    f"it is at {self._where(batch)}{last}{self._next_verbs(batch)}"
                )
            if batch.ends or batch.served is not None:
                samples.append((batch.ends, batch.last))
        self._state.end_step()
        self._state.count_pools()
        self._state.previews.end_step()
        return samples
