"""The verbs of the second half of a layer, expert by expert: router, experts, their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from moesched.errors import OutOfOrder, PolicyError
from moesched.steps.memory import View
from moesched.steps.node_experts import ownership_problem
from moesched.steps.pipeline_stages import PipelineStage
from moesched.steps.run_state import STRIDE, HostOutput
from moesched.steps.verbs.base import ATTENDED, ROUTED, STAGES, Verbs
from moesched.tasks import DONE, Block, Decision, HostKernel, Kernel, PageTransfer, Task, Work

At = Literal["accelerator", "host"]


class ExpertVerbs(Verbs):
    """Routing, and experts wherever they run."""

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

    def offload_routed(self, layer: int, micro_batch: int) -> Task:
        """Move a routed micro-batch's hidden states to the host, for all experts that are to run there.

        Which experts those are need not be known: it may be called as soon as `route` was.
        """
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + ROUTED
        if batch.tag != tag:
            raise self._out_of_order("offload_routed", layer, batch, tag)
        if not self._run.plan.experts_on_host:
            raise PolicyError(
                "offload_routed: the plan has no room for experts on the host: call plan.run_experts_on_host"
            )
        if batch.on_host is not None:
            raise OutOfOrder(f"offload_routed: the rows of L{layer} mb{micro_batch} are on the host already")
        batch.on_host = []
        if self._run.unified:
            return batch.last  # type: ignore[return-value]  # a tag past INPUT means that a task was submitted
        lane, work = batch.stage.to_host, batch.works["offload_routed"]
        batch.last = task = PageTransfer(
            lane, work, "offload_routed", layer, batch.index, -1, None, self.index
        )
        return self._submit(task, (batch.normed,), (batch.normed_host,))

    def load_routed(self, layer: int, micro_batch: int) -> Task:
        """Move what experts have made on the host to the accelerator, all of it at once, for `combine`."""
        run_state = self._run
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + ROUTED
        if batch.tag != tag:
            raise self._out_of_order("load_routed", layer, batch, tag)
        if not batch.on_host:
            raise OutOfOrder(f"load_routed: no expert of L{layer} mb{micro_batch} has run on the host")
        outputs, batch.on_host = batch.on_host, None
        if run_state.unified:
            return batch.last  # type: ignore[return-value]  # a tag past INPUT means that a task was submitted
        rows = sum(output.tokens for output in outputs)
        source, destination = run_state.plan.memory("host").name, batch.stage.memory
        lane, work = run_state.move(source, destination, rows * run_state.operations.hidden_bytes)
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
        run_state = self._run
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
        if at == "accelerator" or run_state.unified:
            batch.expert_outputs.append(output)
        work = self._expert_work(stage, view, at, tokens)
        lane, kernel = (stage.lane, Kernel) if at == "accelerator" else (self._host, HostKernel)
        task = kernel(lane, work, "run_expert", layer, batch.index, expert, view, self.index)
        rows = batch.normed if at == "accelerator" else batch.normed_host
        return self._submit(task, (rows, *view.reads), (output,))

    def warm_expert(self, layer: int, expert: int, micro_batch: int) -> Task:
        """One expert that this node holds on a row of zeros: its weights are read, and its result counts for nothing.

        It belongs to the layer of a routed micro-batch, whose `combine` waits for it (busy full loading, and the spare
        quota of router-aided dynamic loading: section 4.2 of the paper on a cluster of Apple silicon, RACS'24).
        """
        batch = self._batches[micro_batch]
        tag = self._base + layer * STRIDE + ROUTED
        if batch.tag != tag:
            raise self._out_of_order("warm_expert", layer, batch, tag)
        stage = batch.stage
        views = stage.expert["accelerator"]
        view = views.open.get((layer, expert)) or self._view(views, (layer, expert))
        view.touch()
        warmed = Block(f"touched E{expert} mb{micro_batch}")
        batch.expert_outputs.append(warmed)
        work = self._expert_work(stage, view, "accelerator", 1)
        task = Kernel(stage.lane, work, "warm_expert", layer, batch.index, expert, view, self.index)
        return self._submit(task, (batch.normed, *view.reads), (warmed,))

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

    def _expert_work(self, stage: PipelineStage, view: View[Any], at: At, tokens: int) -> Work:
        """An expert on so many tokens: weights that stay in the accelerator's memory may lie otherwise than others."""
        run_state = self._run
        operations = run_state.operations
        kind, amount = f"expert at {at}", operations.fetched_expert
        if view.slots[0].fixed and (at == "accelerator" or run_state.unified):
            kind, amount = f"resident expert at {at}", operations.resident_expert
        return run_state.work(kind, stage.processors[at], tokens, amount)
