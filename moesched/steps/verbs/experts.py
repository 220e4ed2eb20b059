"""The verbs of the second half of a layer, expert by expert: router, experts, their weighted sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from moesched.errors import OutOfOrder, PolicyError
from moesched.steps.micro_batch import HostOutput, MicroBatch, RoutingState
from moesched.steps.node_experts import ownership_problem
from moesched.steps.pipeline_stages import PipelineStage
from moesched.steps.pool_counts import LOADED
from moesched.steps.preview_accuracy import PredictorAnswer
from moesched.steps.verbs.base import Verbs
from moesched.steps.verbs.expert_rows import (
    mark_as_run,
    missing,
    named_micro_batches,
    ranges_of,
    require_each_once,
    require_whole,
    share_of,
)
from moesched.steps.verbs.table import (
    ASSIGN,
    COMBINE,
    LOAD_ROUTED,
    OFFLOAD_ROUTED,
    PREVIEW_ROUTE,
    ROUTE,
    ROUTED,
    RUN_EXPERT,
    STRIDE,
    WARM_EXPERT,
    Verb,
)
from moesched.steps.views import View
from moesched.tasks import DONE, Block, HostKernel, Kernel, PageTransfer, Preview, Task

At = Literal["accelerator", "host"]


class ExpertVerbs(Verbs):
    """The verbs of routing, and of experts on accelerator or host."""

    def route(self, layer: int, micro_batch: int) -> Task:
        """Output projection, norm and router; await it for {expert: tokens}: all of these experts must then run.

        Submits this task for a micro-batch and returns its handle. `tokens` is the number of the micro-batch's tokens
        that are routed to the expert.
        """
        batch = self._at(ROUTE, layer, micro_batch)
        self._enter_layer(ROUTE, batch, layer)
        view = None
        if self.attends:
            dense = batch.stage.dense
            view = dense.open.get(layer) or self._view(dense, layer)
            if view.moving and view.noted != self._number:
                view.use(self._number, batch.works["route"].tokens)
        batch.routing.pending = None
        task = self._run(ROUTE, layer, batch, view, () if view is None else view.reads)
        batch.routing.decision = task
        batch.whole.routes = True
        if self._state.previews.waiting:
            self._state.previews.pair(task)
        return task

    def preview_route(self, layer: int, micro_batch: int) -> Task:
        """Norm and router of a later layer, on the hidden state that `route` left in a micro-batch's present layer.

        Submits this task, between `route` and `combine` of the present layer, and returns its handle. Await it for
        {expert: tokens}: a guess of the experts that `route` will choose in `layer`, the later one. The guess does not
        change that choice (speculative expert loading, Eliseev and Mazur 2023). The dense pages of `layer` must be on
        the accelerator, and in a pipeline `layer` must belong to the micro-batch's present stage. Of the experts that
        `route` chose, the run's report has the share that previews had guessed, by number of layers looked ahead.
        """
        batch = self._in_time(PREVIEW_ROUTE, layer, micro_batch)
        if self._state.stage_of[layer] is not batch.stage:
            raise PolicyError(
                f"preview_route: L{layer} is in stage {self._state.stage_of[layer].number} of the pipeline, and mb"
                f"{micro_batch} in stage {batch.stage.number}, whose accelerator does not have its weights: preview "
                "layers of the same stage"
            )
        dense = batch.stage.dense
        view = dense.open.get(layer) or self._view(dense, layer)
        if view.moving and view.noted != self._number:
            view.use(self._number, batch.works["preview_route"].tokens)
        lane, _, reads, _ = batch.bound[PREVIEW_ROUTE.number]
        assert lane is not None, "an accelerator has a lane"
        ahead = int(layer) - batch.progress // STRIDE
        work = batch.works_at[batch.stage.number][self._state.works.kind_of[layer]]["preview_route"]
        name = PREVIEW_ROUTE.name
        task = Preview(
            lane, work, name, layer, batch.index, -1, view, self._number, batch.generated, ahead=ahead
        )
        self._enter(task, reads + view.reads, ())
        self._state.previews.expect(layer, batch.index, task)
        return task

    def assign(self, layer: int, micro_batch: int, owners: Mapping[int, int]) -> None:
        """Assign each routed expert of the micro-batch to a node; call it with equal arguments on every node.

        If the plan places experts on nodes, call it after `route` was awaited and before any expert runs. This node
        then runs only the experts that were assigned to it.

        owners: the number of a node for each expert, by the expert's number.
        """
        batch = self._at(ASSIGN, layer, micro_batch)
        placement = self._state.plan.nodes.placement
        if not placement:
            raise PolicyError("assign: the plan places no experts on nodes: omit it, or call place_experts")
        routing, routed = batch.routing, batch.routing.decision
        if routed is None or routed.state != DONE:
            raise OutOfOrder(f"assign: await route({layer}, {micro_batch}) before")
        if routing.owners is not None:
            raise OutOfOrder(f"assign: the experts of L{layer} mb{micro_batch} were assigned already")
        if problem := ownership_problem(owners, routed.value, placement):
            raise PolicyError(f"assign(L{layer}, mb{micro_batch}): {problem}")
        routing.owners = dict(owners)
        routing.pending = {expert for expert, node in owners.items() if node == self.node}

    def offload_routed(self, layer: int, micro_batch: int) -> Task:
        """Copy a routed micro-batch's hidden states to the host, for all experts that are to run there.

        It may be called before `route` was awaited, since it does not depend on the experts that `route` chooses.
        """
        batch = self._at(OFFLOAD_ROUTED, layer, micro_batch)
        if not self._state.plan.declared.experts_on_host:
            raise PolicyError(
                "offload_routed: the plan has no room for experts on the host: call plan.run_experts_on_host"
            )
        if batch.routing.on_host is not None:
            raise OutOfOrder(f"offload_routed: the rows of L{layer} mb{micro_batch} are on the host already")
        batch.routing.on_host = []
        return self._run(OFFLOAD_ROUTED, layer, batch)

    def load_routed(self, layer: int, micro_batch: int) -> Task:
        """Copy all outputs computed on the host to the accelerator, for `combine`; no copy if both share a memory."""
        batch = self._at(LOAD_ROUTED, layer, micro_batch)
        routing = batch.routing
        if not routing.on_host:
            raise OutOfOrder(f"load_routed: no expert of L{layer} mb{micro_batch} has run on the host")
        outputs, routing.on_host = routing.on_host, None
        if self._state.unified:
            return batch.last  # type: ignore[return-value]  # `route` was submitted
        works = self._state.works
        nbytes = sum(len(output.rows) for output in outputs) * works.operations.hidden_bytes
        host = self._state.plan.memory("host").name
        lane, work = works.move(host, batch.stage.memory, nbytes, kind="load_routed")
        ran = tuple(sorted(((each.expert, each.rows) for each in outputs), key=_expert_and_row))
        loaded = Block(f"outputs from the host mb{micro_batch}")
        routing.outputs.append(loaded)
        task = PageTransfer(
            lane, work, "load_routed", layer, batch.index, -1, ran, self._number, batch.generated
        )
        return self._enter(task, tuple(output.block for output in outputs), (loaded,))

    def run_expert(
        self,
        layer: int,
        expert: int,
        micro_batch: int | Collection[int],
        *,
        at: At = "accelerator",
        rows: range | None = None,
    ) -> Task:
        """One expert on tokens routed to it: a micro-batch's, a range of these, or those of several micro-batches.

        Submits this task and returns its handle. Several micro-batches make one task, whose work reads the expert's
        weights once (module-based batching, MoE-Gen, arXiv 2503.09716). With ranges of rows, accelerator and host can
        share an expert. On one processor, the results have the same bits however the rows are divided or joined.

        On the host the expert's weights are read in host memory (`Plan.run_experts_on_host`). Accelerator and host give
        the same bits if they run the same kernels: on the torch device without CUDA they do.

        Args:
            micro_batch: the number of a routed micro-batch, or the numbers of several.
            at: the processor that runs the expert: "accelerator" or "host".
            rows: a range of the expert's rows in the one micro-batch, one row for each token, in the order of the
                tokens; by default all rows. All must run once before `combine`. For the same bits, a device may have to
                compute the whole tile of `EXPERT_TILE` rows (`moesched/models/footprint.py`) that contains the range,
                and drop the other rows. If ranges are cut at multiples of `EXPERT_TILE`, no work is done twice.

        Raises:
            PolicyError: the expert has no such rows, a micro-batch is named twice, or several are named with `rows`.
            OutOfOrder: a micro-batch is not routed, the expert is not pending, or some rows have run; nothing changed.
        """
        if rows is not None or not isinstance(micro_batch, int):
            task, reads, outputs = self._run_rows(layer, expert, micro_batch, at, rows)
            return self._enter(task, reads, outputs)
        batch = self._at(RUN_EXPERT, layer, micro_batch)
        pending, tokens = self._pending(layer, expert, batch, at)
        routing, blocks = batch.routing, batch.blocks
        require_whole(batch, layer, expert)
        view = self._expert_view(batch.stage, at, layer, expert, tokens)
        pending.discard(expert)
        output = Block(f"output E{expert} mb{batch.index}")
        if at == "accelerator":
            normed = blocks.normed
            routing.outputs.append(output)
        else:
            normed = blocks.normed_host
            self._leave_on_host(routing, HostOutput(expert, range(tokens), output))
        task = self._expert_task(RUN_EXPERT, batch, view, at, layer, expert, tokens)
        return self._enter(task, (normed, *view.reads), (output,))

    def warm_expert(self, layer: int, expert: int, micro_batch: int) -> Task:
        """Computation of one of this node's experts on a row of zeros, only to read its weights.

        Submits this task and returns its handle. The micro-batch must be routed in this layer, and its `combine` waits
        for the task. On Apple silicon, the GPU driver unwires (no longer locks in memory) weights that were idle for a
        while, and takes long to wire them again. To keep them wired, policies such as `ep_busy_full` and
        `ep_router_aided` warm experts that have no tokens (section 4.2 of the paper on a cluster of Apple silicon,
        RACS'24). The result is dropped.
        """
        batch = self._at(WARM_EXPERT, layer, micro_batch)
        if expert not in self._state.plan.layout.experts_of(layer):
            raise self._no_expert("warm_expert", layer, expert)
        view = self._expert_view(batch.stage, "accelerator", layer, expert, 0)
        warmed = Block(f"touched E{expert} mb{micro_batch}")
        batch.routing.outputs.append(warmed)
        task = self._expert_task(WARM_EXPERT, batch, view, "accelerator", layer, expert, 1)
        return self._enter(task, (batch.blocks.normed, *view.reads), (warmed,))

    def combine(self, layer: int, micro_batch: int) -> Task:
        """The weighted sum of the experts' outputs, in ascending order of expert, and the residual.

        Submits this task for a micro-batch and returns its handle. With several nodes each adds up the outputs of its
        own experts, and the sums are added in the order of the nodes.
        """
        batch = self._at(COMBINE, layer, micro_batch)
        routing = batch.routing
        self._require_outputs(layer, batch)
        reads = tuple(routing.outputs)
        if routing.on_host is not None:  # the rows went to the host, and no expert ran there
            reads = (batch.blocks.normed_host, *reads)
        owners = routing.owners
        routing.pending = routing.decision = routing.owners = routing.on_host = None
        routing.outputs = []
        routing.called.clear()
        return self._run(COMBINE, layer, batch, owners, reads + self._activations(batch, leaves=True))

    def _run_rows(
        self, layer: int, expert: int, micro_batch: int | Collection[int], at: At, rows: range | None
    ) -> tuple[Task, tuple[Block, ...], tuple[Block, ...]]:
        """Make a task that runs an expert on some of its rows, or on several micro-batches.

        The arguments are as for `run_expert`.

        Returns:
            the task, and the blocks of data that it reads and that it writes.
        """
        shares = []
        for number in named_micro_batches(micro_batch, rows):
            batch = self._at(RUN_EXPERT, layer, number)
            _, tokens = self._pending(layer, expert, batch, at)
            shares.append(share_of(batch, layer, expert, tokens, rows))
        require_each_once(shares)
        first, tokens = shares[0].batch, sum(len(share.rows) for share in shares)
        view = self._expert_view(first.stage, at, layer, expert, tokens)
        reads, outputs = [], []
        for share in shares:
            mark_as_run(share, expert)
            routing, blocks = share.batch.routing, share.batch.blocks
            output = Block(f"output E{expert} mb{share.batch.index}")
            outputs.append(output)
            if at == "accelerator":
                reads.append(blocks.normed)
                routing.outputs.append(output)
            else:
                reads.append(blocks.normed_host)
                self._leave_on_host(routing, HostOutput(expert, share.rows, output))
        task = self._expert_task(RUN_EXPERT, first, view, at, layer, expert, tokens)
        task.ranges = ranges_of(shares)
        if len(shares) > 1:
            task.micro_batch = -1
            task.generated = min(share.batch.generated for share in shares)
        return task, (*reads, *view.reads), tuple(outputs)

    def _leave_on_host(self, routing: RoutingState, output: HostOutput) -> None:
        """Note an output on the host as one for `load_routed` to bring; in unified memory, `combine` reads it, too."""
        assert routing.on_host is not None, "the rows are there"
        routing.on_host.append(output)
        if self._state.unified:
            routing.outputs.append(output.block)

    def _pending(self, layer: int, expert: int, batch: MicroBatch, at: At) -> tuple[set[int], int]:
        """Check that an expert may run now for a micro-batch.

        Returns:
            the set of the micro-batch's experts that have yet to run, and the number of tokens of `expert`.

        Raises:
            OutOfOrder: the routed experts are not known or not assigned yet; `expert` has no tokens, or has run; or
                `at` is "host", and the micro-batch's hidden states were not copied to the host.
            PolicyError: the expert was assigned to another node.
        """
        routing, routed = batch.routing, batch.routing.decision
        assert routed is not None
        if routing.pending is None:
            if routed.state != DONE:
                raise OutOfOrder(f"run_expert: await route({layer}, {batch.index}) before its experts")
            if self._state.plan.nodes.placement:
                raise OutOfOrder(
                    f"run_expert: say which node runs which experts of L{layer} mb{batch.index} before: assign them"
                )
            routing.pending = set(routed.value)
        if expert not in routing.pending:
            if routing.owners is not None and routing.owners.get(expert, self.node) != self.node:
                raise PolicyError(
                    f"run_expert: E{expert} of L{layer} mb{batch.index} was assigned to node {routing.owners[expert]}, "
                    f"and this is node {self.node}"
                )
            raise OutOfOrder(
                f"run_expert: L{layer} mb{batch.index} has no tokens for E{expert}, or it has run already"
            )
        if at == "host" and routing.on_host is None:
            raise OutOfOrder(
                f"run_expert: L{layer} mb{batch.index} is not on the host: call offload_routed before"
            )
        return routing.pending, routed.value[expert]

    def _require_outputs(self, layer: int, batch: MicroBatch) -> None:
        """Check that all experts of a micro-batch have run, and that their outputs are on the accelerator.

        Raises:
            OutOfOrder: an expert has not run, or its output is still on the host.
        """
        routing = batch.routing
        if self._state.plan.nodes.placement and routing.owners is None:
            raise OutOfOrder(
                f"combine: the experts of L{layer} mb{batch.index} were not assigned: assign them"
            )
        if routing.pending is None and self._state.plan.layout.experts_of(layer):
            raise OutOfOrder(
                f"combine: no expert of L{layer} mb{batch.index} has run: await route({layer}, {batch.index}), and run "
                "the experts that it names"
            )
        if routing.pending:
            raise OutOfOrder(
                f"combine: L{layer} mb{batch.index} was routed to {missing(routing)}, which did not run"
            )
        if routing.on_host:
            left = ", ".join(dict.fromkeys(f"E{output.expert}" for output in routing.on_host))
            raise OutOfOrder(
                f"combine: L{layer} mb{batch.index} lacks the outputs of {left} on the host: call load_routed first"
            )

    def _expert_view(self, stage: PipelineStage, at: At, layer: int, expert: int, tokens: int) -> View[Any]:
        """Return the view of an expert's weights in a processor's memory; their pool counts a use by `tokens` rows."""
        views = stage.expert.get(at)
        if views is None:
            raise PolicyError(f"run_expert: no processor is {at!r}: give at='accelerator' or at='host'")
        view = views.open.get((layer, expert)) or self._view(views, (layer, expert))
        if view.moving:
            view.read_before = view.moving[0].read >= LOADED
            if view.noted != self._number:
                view.use(self._number, tokens)
        return view

    def _expert_task(
        self,
        verb: Verb,
        batch: MicroBatch,
        view: View[Any],
        at: At,
        layer: int,
        expert: int,
        tokens: int,
    ) -> Task:
        """Make a task of an expert on rows of a micro-batch; `tokens` is the number of rows.

        Resident weights may have another layout than fetched ones, and thus another cost. If accelerator and host share
        a memory, the first task on weights that just arrived takes longer than later tasks on them.

        A device computes all resident experts of a layer for a micro-batch in one call for each processor. Only the
        first of these tasks costs a launch. Fetched experts start one by one, as they arrive.
        """
        works, stage, called = self._state.works, batch.stage, batch.routing.called
        number = works.kind_of[layer]
        operations = works.kinds[number]
        kind, amount = f"expert at {at}", operations.fetched_expert
        stays = view.slots[0].fixed
        if stays and (at == "accelerator" or self._state.unified):
            kind, amount = f"resident expert at {at}", operations.resident_expert
        elif view.read_before and self._state.unified:
            kind, amount = f"cached expert at {at}", operations.cached_expert
        joins = stays and at in called
        if joins:
            kind += ", joined"  # traces tell works apart by their kind, and this one costs less
        work = works.work(kind, stage.processors[at], tokens, amount, number, joins=joins)
        if stays:
            called.add(at)
        lane, make = (stage.lane, Kernel) if at == "accelerator" else (stage.host, HostKernel)
        return make(lane, work, verb.name, layer, batch.index, expert, view, self._number, batch.generated)


def note_forecast(
    step: ExpertVerbs, predictor: str, layer: int, forecast: Mapping[int, Mapping[int, float]]
) -> None:
    """Keep a predictor's forecast for a layer; the report compares it with the experts that the router then chooses.

    Args:
        predictor: name of the predictor's class.
        forecast: for each micro-batch, the expected number of tokens of each expert.
    """
    for micro_batch, tokens in forecast.items():
        if micro_batch not in step._batches:
            raise step._not_there(ROUTE, layer, micro_batch)
        ahead = int(layer) - (step._batches[micro_batch].progress - ROUTED) // STRIDE
        step._state.previews.expect(layer, micro_batch, PredictorAnswer(predictor, ahead, tokens))


def _expert_and_row(ran: tuple[int, range]) -> tuple[int, int]:
    return ran[0], ran[1].start
