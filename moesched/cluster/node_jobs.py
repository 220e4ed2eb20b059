"""One node's part of a run on a cluster: carries out the launcher's orders; weights stay loaded between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from msgspec.structs import replace

from moesched import plugins
from moesched.errors import BadInput
from moesched.inputs.accelerators import cut_over_ranks
from moesched.inputs.budgets import PROCESS, within_process
from moesched.inputs.defaults import DEVICE, MACHINE
from moesched.inputs.dtype import dtype_of_nodes
from moesched.inputs.lookup import find_machine, find_policy
from moesched.inputs.options import BudgetOptions, DeviceOptions, DTypeOptions, PolicyOptions, SizeOptions
from moesched.jobs.batch_reports import reported
from moesched.jobs.report import JobReport, job_report
from moesched.jobs.trace_file import recorder_of
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import weight_layout
from moesched.models.tensors import global_shapes
from moesched.requests.batch import Batch
from moesched.requests.batching import BatchSizes, batches_of
from moesched.requests.sampling import Sampling
from moesched.runs.batch_policies import BatchPolicies
from moesched.runs.device_values import checked_slot_bytes
from moesched.runs.ending import Ending
from moesched.runs.generation import TokenHandling
from moesched.runs.hardware import run
from moesched.runs.listeners import KindMeter
from moesched.runs.planning import as_used_by, plan_run
from moesched.runs.ranks import process_of
from moesched.seams import JoinsRanks, Policy, StandsBy, Transport
from moesched.settings import check_settings
from moesched.steps.plan import Plan
from moesched.system.own_loop import run_on_own_loop
from moesched.system.signals import signals_held
from moesched.tasks import Task
from moesched.trace import Recording

LONG_PROMPTS = 512
"""Least prompt tokens in a micro-batch for prefill in two chunks, which is then faster by a predicted quarter."""


class NodeRun(DeviceOptions, BudgetOptions, DTypeOptions, PolicyOptions):
    """The options that all orders of a run share; policy and device are plugin names, which each node looks up."""

    policy: str
    device: str = DEVICE
    sampling: Sampling = field(default_factory=Sampling)
    machine: str = MACHINE
    traced: bool = False


class NodeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One node's view of an order, which is the launcher's request to all nodes to generate tokens for prompts.

    Attributes:
        nodes: number of nodes that take part.
        node: this node's index among the nodes that take part.
        prompts: token ids of each prompt.
        new_tokens: the largest number of tokens to generate for each prompt.
        first_request: index of the first prompt in the run's prompts.
        sizes: the batch sizes that are fixed; the node chooses those that are None.
    """

    nodes: int
    node: int
    prompts: list[list[int]]
    new_tokens: int
    first_request: int = 0
    sizes: SizeOptions = SizeOptions()


@dataclass(frozen=True, kw_only=True)
class NodeBatch:
    """The outcome of one batch on one node: its report, its recording for a trace, and the error that ended it."""

    report: JobReport
    recording: Recording | None
    ending: Ending


OnTokens = Callable[[dict[int, list[int]], list[int]], object]
"""Callback; takes new tokens by request, and the requests that end with them. A request is its index in the run."""


class NodeJob:
    """A node's policy, layout, machine and device, which stay open between orders.

    Args:
        checkpoint: the model's files.
        run: the options that all orders share.
        memory: bytes of the accelerator's memory that the node may use; None for all.
        on_loading: called with the number of resident pages loaded so far, and the number of all resident pages.
        on_tokens: called with new tokens by request, and with the requests that end with them.

    Raises:
        BadInput: an option cannot be used here.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        run: NodeRun,
        *,
        memory: int | None = None,
        on_loading: Callable[[int, int], object] = lambda *_: None,
        on_tokens: OnTokens = lambda *_: None,
    ) -> None:
        self._run = run
        self._checkpoint = checkpoint
        self._on_loading, self._on_tokens = on_loading, on_tokens
        cls = find_policy(run.policy)
        self._make: Callable[[], Policy] = partial(
            cls, **check_settings(cls, f"policy {run.policy}", run.settings or {})
        )
        # The profile's costs may be for another number of cores. They are not used: sizes are chosen by memory only.
        machine = find_machine(run.machine, run.device, foreign=True)
        budgets = run.budgets or {}
        if memory is not None and PROCESS not in budgets:
            budgets = {machine.accelerator.memory: memory, **budgets}
        whole, self._machine, budgets = cut_over_ranks(
            checkpoint.config, machine, budgets, 1, cls, here=run.machine == MACHINE
        )
        dtype = dtype_of_nodes(whole.dtype, run.dtype, machine, run.device)
        self._layout = weight_layout(whole, dtype)
        with signals_held():
            kind = plugins.find("devices", run.device)
        if not issubclass(kind, JoinsRanks):
            raise BadInput(f"device {run.device} cannot be one of several nodes: choose another one")
        settings = check_settings(kind, f"device {run.device}", run.device_settings or {})
        self._device = kind(checkpoint, self._layout, **settings)
        self._machine = as_used_by(self._device, self._machine)
        self._budgets, self._process = within_process(
            budgets, self._machine, process_of([self._device], self._machine), 1
        )

    def prepare(self, node_order: NodeOrder) -> tuple[SizeOptions, list[list[int]]]:
        """Plan an order; return the largest batch sizes that fit, and for each node the numbers of its experts.

        Sizes that the order fixes are kept, but requests in a batch are at most as many as there are prompts.

        Raises:
            BadInput: not even one request fits; the message names the memory and the missing bytes.
        """
        problem = BadInput("no prompts were given: give at least one")
        for sizes in self._candidates(node_order):
            try:
                batches = self._batches(node_order, self._batch_sizes(sizes))
                plans = [self._plan(node_order, batch, self._make()) for batch in batches]
            except BadInput as error:
                problem = error
            else:
                self._require_files(plans[0])
                return sizes, [sorted(held) for held in plans[0].nodes.placement]
        raise problem

    def run(self, node_order: NodeOrder, transport: Transport) -> Iterator[NodeBatch]:
        """Run an order whose batch sizes are all fixed; yield the result of each batch. The last may be a failure.

        Args:
            transport: connects this node to the others.

        Raises:
            BadInput: a file of weights has changed since it was opened.
        """
        self._checkpoint.require_unchanged()
        sizes = self._batch_sizes(node_order.sizes)
        self._device.join(node_order.node, transport, self._device)
        policies = BatchPolicies(self._make)
        for batch in self._batches(node_order, sizes):
            yield self._run_batch(node_order, batch, policies.next_of(node_order.node))

    def stand_by(self) -> None:
        """Keep the device's weights in memory; call this several times a second while the node is idle."""
        if isinstance(self._device, StandsBy):
            self._device.stand_by()

    def close(self) -> None:
        """Close the device."""
        with signals_held():
            run_on_own_loop(self._device.aclose)

    def _require_files(self, plan: Plan) -> None:
        """Raise BadInput if a file of weights that the plan reads on this node is absent."""
        pages = plan.nodes.pages(self._layout)
        self._checkpoint.require_files(extent.tensor for page in pages for extent in page.extents)
        if plan.nodes.attends:
            self._checkpoint.require_files(global_shapes(self._layout.config))

    def _run_batch(self, node_order: NodeOrder, batch: Batch, policy: Policy) -> NodeBatch:
        plan = self._plan(node_order, batch, policy)
        first = batch.first_request
        mine = node_order.prompts[first - node_order.first_request :][: len(batch.prompts)]
        recorder = recorder_of(plan) if self._run.traced else None
        kinds = KindMeter()
        beams = batch.beams > 1
        held: dict[int, list[int]] = {}

        def tell(fresh: dict[int, int]) -> None:
            if beams:
                for request, token in fresh.items():
                    held.setdefault(first + request, []).append(token)
            else:
                self._on_tokens({first + request: [token] for request, token in fresh.items()}, [])

        ending = Ending()
        report = reported(
            partial(
                run,
                plan,
                policy,
                self._device,
                mine,
                sampling=self._run.sampling,
                tokens=TokenHandling(self._layout.config.stop_tokens, tell),
                observers=[_Loading(plan, self._on_loading), kinds],
                recorder=recorder,
                keep_open=True,
            ),
            ending,
        )
        finished = job_report(
            report,
            plan,
            kinds,
            policy=self._run.policy,
            dtype=self._layout.dtype,
            change=self._checkpoint.change(),
        )
        if held and not finished.failure and not finished.interrupted:
            self._on_tokens(held, list(held))
        return NodeBatch(report=finished, recording=recorder.recording() if recorder else None, ending=ending)

    def _batches(self, node_order: NodeOrder, sizes: BatchSizes) -> Iterator[Batch]:
        for batch in batches_of(list(map(len, node_order.prompts)), node_order.new_tokens, sizes):
            yield replace(batch, first_request=node_order.first_request + batch.first_request)

    def _plan(self, node_order: NodeOrder, batch: Batch, policy: Policy) -> Plan:
        return plan_run(
            self._machine,
            self._layout,
            batch,
            policy,
            self._budgets,
            partial(checked_slot_bytes, self._device),
            nodes=node_order.nodes,
            node=node_order.node,
            process=self._process,
        )

    def _batch_sizes(self, fixed: SizeOptions) -> BatchSizes:
        return BatchSizes(
            fixed.batch_size or 1,
            fixed.micro_batch_size or 1,
            beams=self._run.sampling.beams,
            prefill_chunk=fixed.prefill_chunk,
        )

    def _candidates(self, node_order: NodeOrder) -> Iterator[SizeOptions]:
        """Yield batch sizes to try, the largest first; sizes that the order fixes are kept.

        If several nodes take part and a single micro-batch has long prompts, the prefill chunk is set to half of their
        tokens: one chunk is exchanged while the other is computed.
        """
        fixed, count = node_order.sizes, len(node_order.prompts)
        for batch_size in _halves(count) if fixed.batch_size is None else [min(fixed.batch_size, count)]:
            size = fixed.micro_batch_size
            for micro_batch_size in _halves(batch_size) if size is None else [min(size, batch_size)]:
                chunk = fixed.prefill_chunk
                if chunk is None and micro_batch_size == batch_size and node_order.nodes > 1:
                    tokens = sum(sorted(map(len, node_order.prompts))[-batch_size:])
                    chunk = -(-tokens // 2) if tokens >= LONG_PROMPTS else None
                yield dataclasses.replace(
                    fixed, batch_size=batch_size, micro_batch_size=micro_batch_size, prefill_chunk=chunk
                )


class _Loading:
    """Observer that counts the resident pages as they are loaded, and reports the count."""

    def __init__(self, plan: Plan, told: Callable[[int, int], object]) -> None:
        self._total = sum(len(resident.slots) for resident in plan.weights.resident)
        self._done = 0
        self._told = told

    def ended(self, task: Task) -> None:
        """Count the task if it loaded a page."""
        if task.verb == "load":
            self._done += 1
            if self._done == self._total or self._done % 16 == 0:
                self._told(self._done, self._total)


def _halves(count: int) -> Sequence[int]:
    """Return `count`, its half (rounded up), its quarter, and so on down to 1."""
    found = [count]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found
