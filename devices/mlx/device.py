"""The MLX device: runs the tasks of a schedule on a machine with one memory, such as Apple silicon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

try:
    import mlx.core as mx
except ImportError as error:
    text = f"{error}: pip install 'moesched[mlx]', on macOS or Linux"
    raise ModuleNotFoundError(text, name="mlx") from error

from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import Page, WeightLayout
from moesched.models.reading import require_plain_layers
from moesched.requests.sampling import Sampling
from moesched.seams import KernelRow, LaneKind, RoutingObserver, Transport
from moesched.steps.plan import Plan
from moesched.tasks import Collective, PageTransfer, Task

from ..kernels.binder import Binder
from ..kernels.mlx_rows import MLX, device_name, mlx_table
from ..kernels.table import listed
from ..runner.micro_batch import MicroBatchState
from ..runner.next_tokens import Choice, Logits
from ..runner.observers import DeviceObservers
from ..shared.bad_weights import describe_first_bad_weight
from ..shared.coded import require_plain
from ..shared.page_reader import PageReader
from ..shared.token_ids import check_token_ids
from .evaluations import Evaluate, Evaluations
from .machine import cache_limit, require_unified, wired_limit, with_metal
from .states import serving_states, states_of
from .thread import OneThread
from .topologies import DEFERRABLE, Topology, Verbs
from .weights import MlxWeights

KEPT_BACK_BYTES = 64_000_000
"""Largest number of bytes of freed memory that MLX may keep for reuse."""


class MlxDevice:
    """Runs batches of one model on MLX, one after the other, or serves requests that join and leave.

    Arrays are computed with Metal on Apple silicon, and on the CPU on Linux.

    Files are read straight into the memory of MLX arrays. One thread builds and evaluates all arrays, for all lanes. A
    task with few tokens and resident weights ends before its results are evaluated; they are evaluated together with
    the next value that the host needs. This device has no beam search, and does not report activations to observers.

    Args:
        keep_logits: whether to append (requests, logits) of each step of a micro-batch to the device's list `logits`;
            logits are (sequences, vocabulary).
        direct: whether to bypass the page cache when reading files, where the system allows that.
        evaluate: "needed" evaluates arrays where the host needs a value; "task" evaluates at the end of every task, so
            that a trace shows each task's own time.
    """

    gives_scores = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: WeightLayout,
        *,
        keep_logits: bool = False,
        direct: bool = True,
        evaluate: Evaluate = "needed",
    ) -> None:
        require_plain(layout.config, "mlx")
        require_plain_layers(layout.config, "--device mlx")
        self.layout = layout
        self.logits: list[tuple[tuple[int, ...], Logits]] = []
        self._evaluate: Evaluate = evaluate
        self._evaluations: Evaluations | None = None
        self._keep_logits = keep_logits
        self._reader = PageReader(checkpoint, layout, direct)
        self._weights = MlxWeights(self._reader, layout)
        self._kernels = Binder(mlx_table(layout.config), layout.config, layout.dtype, device_name())
        self._thread = OneThread("mlx")
        self._wired_limit = wired_limit()
        self._cache_limit = cache_limit()
        self._observers = DeviceObservers()
        self._transport: Transport | None = None
        self._verbs: Verbs = {}

    @staticmethod
    def machine(host: Machine) -> Machine:
        """Return this machine's profile: `host`, with its GPU added where Metal is available."""
        return with_metal(host)

    @staticmethod
    def check_machine(machine: Machine) -> None:
        """Check that batches which were planned for a machine can run on this one.

        Raises:
            BadInput: that machine's accelerator has a memory of its own, or the machine is a built-in profile and Metal
                is not available here.
        """
        require_unified(machine)

    @staticmethod
    def kernel_rows() -> list[KernelRow]:
        """Describe the kernels of the MLX device, one row for each kernel."""
        return listed(MLX)

    @property
    def kernels(self) -> Mapping[str, Sequence[str]]:
        """The names of the kernels that ran so far, by the name of the operation that they compute."""
        return self._kernels.table.used

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        """The kinds of lanes (queues of tasks) by name: empty, so that all have the default kind, a worker thread.

        Lanes that compute hand their tasks to the device's one thread.
        """
        return {}

    @property
    def streams(self) -> None:
        """None: this device has no streams, so that worker threads run all tasks."""

    @property
    def bytes_read(self) -> int:
        """Bytes read from the checkpoint's files so far."""
        return self._reader.bytes_read

    @property
    def evaluations(self) -> int:
        """The number of evaluations in the current batch so far; in each, the device's thread waits for the kernels."""
        return 0 if self._evaluations is None else self._evaluations.count

    def slot_bytes(self, page: Page) -> int:
        """Return the bytes that a page (a part of a layer's weights) takes in a slot (memory for one page)."""
        return self._weights.slot_bytes(page)

    def observe_routing(self, observer: RoutingObserver) -> None:
        """Report to an observer which experts the routers choose, from the next batch on."""
        self._observers.routing = observer

    def join(self, rank: int, transport: Transport, first: Any) -> None:
        """Make this device one of several nodes; each computes the experts that a batch's plan places on it.

        Args:
            transport: carries exchanges between the nodes.
            rank, first: not used.
        """
        self._transport = transport

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Begin a batch of prompts (token ids): allocate the plan's memory.

        Weights that are resident in this batch and in the last one stay in memory.

        Raises:
            BadInput: a token id is outside the vocabulary, the batch has a beam search, or the plan takes more memory
                than this Mac keeps wired.
        """
        if plan.batch.beams > 1:
            raise BadInput("device mlx has no beam search: use --beams 1, or --device torch")
        check_token_ids(prompts, self.layout.config.vocabulary)
        self._thread.drop_posted()
        self._thread.call(self._begin, plan, partial(states_of, plan, prompts), sampling)

    def serve(self, plan: Plan) -> None:
        """Begin to serve requests that join and leave: allocate what the plan says.

        Raises:
            BadInput: the plan takes more memory than this Mac keeps wired.
        """
        self._thread.drop_posted()
        self._thread.call(self._begin, plan, partial(serving_states, plan), Sampling())

    def execute(self, task: Task) -> Any:
        """Run a task, and return its value.

        Reads of pages and exchanges run on the calling thread, all other tasks on the device's thread. A task that can
        be deferred is only queued: it runs right before the next call that the thread gets, and its value is None.
        """
        verb = self._verbs[task.verb]
        if isinstance(task, (PageTransfer, Collective)):
            return verb(task)
        if task.verb in DEFERRABLE and self._evaluations is not None and self._evaluations.defers(task):
            # A copy, since the engine takes the operands from a task that has ended.
            return self._thread.post(verb, copy(task))
        return self._thread.call(verb, task)

    def stand_by(self) -> int:
        """Read one element of every array of weights, so that Metal keeps the arrays wired between batches.

        One element is enough, since Metal's driver wires whole arrays. Returns the number of arrays.
        """
        return self._thread.call(self._weights.touch)

    async def aclose(self) -> None:
        """Free the arrays, restore the memory limits of this process, and close the checkpoint's files.

        A second call does nothing.
        """
        if self._thread.ended:
            return

        def let_go() -> None:
            self._verbs = {}
            self._weights.close()
            self._wired_limit.give_back()
            self._cache_limit.give_back()
            mx.clear_cache()

        self._thread.drop_posted()
        self._thread.call(let_go)
        self._thread.close()
        self._reader.close()

    # -- on the device's thread ----------------------------------------------------------------------

    def _begin(
        self, plan: Plan, make_states: Callable[[], list[MicroBatchState]], sampling: Sampling
    ) -> None:
        self._verbs = {}  # this also frees everything of the batch before
        self._wired_limit.hold(plan.memory("accelerator").used)
        self._cache_limit.set(KEPT_BACK_BYTES)
        self._weights.begin(plan)
        self._evaluations = Evaluations(plan, self._evaluate)
        self._observers.first_request = plan.batch.first_request
        choice = Choice(sampling, plan.batch.first_request, self._keep if self._keep_logits else None)
        first_bad = partial(describe_first_bad_weight, self._reader, self.layout)
        topology = Topology(
            plan,
            make_states(),
            choice,
            self._kernels,
            self._weights,
            self._observers,
            self._evaluations,
            first_bad,
        )
        self._verbs = self._verbs_of(topology, plan)

    def _keep(self, requests: tuple[int, ...], logits_SV: Logits) -> None:
        self.logits.append((requests, logits_SV))

    def _verbs_of(self, topology: Topology, plan: Plan) -> Verbs:
        if plan.nodes.count == 1:
            return topology.alone()
        assert self._transport is not None, "a device that is to be one of several nodes has to join them"
        return (
            topology.node(self._transport)
            if plan.nodes.attends
            else topology.node_of_experts(self._transport)
        )
