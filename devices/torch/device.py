"""The torch device: runs the tasks of a schedule on real tensors."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.machines import Machine, machine_names
from moesched.machines.local import this_processor
from moesched.machines.weights_home import WeightsHome
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import Page, WeightLayout
from moesched.models.reading import require_plain_layers
from moesched.requests.sampling import Sampling
from moesched.seams import (
    ActivationObserver,
    ChoosesDtype,
    KernelRow,
    LaneKind,
    Progress,
    RoutingObserver,
    Streams,
    Transport,
    ignore_progress,
)
from moesched.steps.fixed_steps import has_fixed_steps
from moesched.steps.plan import Plan
from moesched.system.memory_ahead import MemoryAhead
from moesched.tasks import HostKernel, Task

from ..kernels.layer_weights import Weights
from ..kernels.torch_kernels import kernel_rows
from ..products.linear import Tensor
from ..runner.micro_batch import MicroBatchState
from ..runner.next_tokens import Choice
from ..runner.observers import DeviceObservers
from ..shared.token_ids import check_token_ids
from ..shared.verbs import after
from .compute import Compute
from .copies import wait_for_copies
from .cuda_streams import CudaStreams
from .global_weights import GlobalWeights, read_global_weights
from .gpu_memory import require_room
from .locked_memory import wait_for_device
from .states import serving_states, states_of
from .topologies import Topology, Verbs
from .warm_up import ExpertWarmUp, WarmUp, WarmUps, memory_for_kv, shapes_of, stand_in
from .weights import WeightStore

MOST_THREADS = 1024

CUDA_LANES = ("accelerator", "host->gpu", "gpu->host")
"""The lanes of a CUDA machine that are streams; the links in its profile have these names.

Other lanes are worker threads, whose copies have ended when a task returns.
"""


class TorchDevice(ChoosesDtype):
    """Runs batches of one model on torch, one after the other, or serves requests that join and leave.

    Weights are read from the checkpoint's files into slots, page by page. Resident weights stay for the next batch;
    where oneDNN computes faster with weights in its own order, they are packed that way.

    Args:
        accelerator: torch's name of the accelerator, such as "cuda". With "cpu", a plan for a machine with two memories
            keeps the contents of both in the host's memory.
        keep_logits: whether to append a pair to the list `logits` for each step of each micro-batch: its sequences, and
            their logits (sequences, vocabulary).
        direct: whether to bypass the page cache when reading files, where the system allows that. If False, files are
            mapped where possible, so that kernels on the CPU read streamed pages in the page cache itself; elsewhere
            pages are copied from the page cache to slots.
        kernel: the kernels on the CPU that multiply few rows by bfloat16 weights: "auto" for the native ones with the
            best instruction set of this machine, the name of another instruction set, or "torch".
        map_files: whether a GPU copies streamed weights directly from the page cache where that is possible.
        pin: whether each thread of the native kernels is pinned to a core of its own.
        threads: number of threads of the kernels; None takes one for each core that this process may use.
        own_kernels: the user's kernels, which are tried before all others: classes, or names such as `file.py:Class`.
    """

    gives_scores = True
    replays = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: WeightLayout,
        *,
        accelerator: str = "cpu",
        keep_logits: bool = False,
        direct: bool = True,
        kernel: str = "auto",
        map_files: bool = True,
        pin: bool = False,
        threads: int | None = None,
        own_kernels: str | type | Sequence[str | type] = (),
    ) -> None:
        self.layout = layout
        self.logits: list[tuple[tuple[int, ...], Tensor]] = []
        self.tell: Progress = ignore_progress
        self.memory_ahead = MemoryAhead()
        self._keep_logits = keep_logits
        if threads is not None and not (isinstance(threads, int) and 1 <= threads <= MOST_THREADS):
            raise BadInput(f"threads is {threads!r}: give 1 to {MOST_THREADS}")
        self._compute = Compute(accelerator, layout, kernel, pin, threads, listed(own_kernels))
        self.core_plan = None if self._compute.on_cpu else self._compute.core_plan
        self._store = WeightStore(checkpoint, layout, self._compute, direct=direct, map_files=map_files)
        self._global_weights: GlobalWeights | None = None
        self._observers = DeviceObservers()
        self._rank = 0
        self._transport: Transport | None = None
        self._verbs: Verbs = {}
        self._cuda: CudaStreams | None = None
        self.weights_home: WeightsHome | None = None
        self._warm_ups = WarmUps()
        self.warm_up_seconds = self._warm_ups.seconds

    @staticmethod
    def processors() -> str:
        """Return the name of this machine's processor, with the number of its cores."""
        return this_processor()

    @staticmethod
    def check_machine(machine: Machine) -> None:
        """Check that batches which were planned for a machine can run on this processor.

        Raises:
            BadInput: the machine is a shipped profile, or its accelerator has a memory of its own.
        """
        if machine.name in machine_names() or not machine.unified:
            raise BadInput(
                f"machine {machine.name} describes other hardware than the processor that device torch runs on: "
                "use --device emulated to imitate it, or --machine auto"
            )

    def rows_apart(self, rows: int) -> bool:
        """Test whether, in decode steps, each row's results have the same bits whatever the other rows are.

        rows: the largest number of rows of a micro-batch in such a step.
        """
        return self._compute.kernels.rows_apart(rows)

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        """The kind "stream" for each lane (queue of tasks) that is a CUDA stream, by the lane's name; empty on the CPU.

        All other lanes are worker threads.
        """
        return {} if self._compute.on_cpu else dict.fromkeys(CUDA_LANES, "stream")

    @property
    def streams(self) -> Streams | None:
        """The object that issues tasks to CUDA streams, prepared for a new run; None on the CPU.

        All runs share the object, since torch reuses freed memory on the stream that allocated it.
        """
        if self._compute.on_cpu:
            return None
        if self._cuda is None:
            self._cuda = CudaStreams(
                self._compute.accelerator, CUDA_LANES, lambda task: self._verbs[task.verb](task)
            )
        self._cuda.begin()
        return self._cuda

    @staticmethod
    def kernel_rows() -> list[KernelRow]:
        """Describe the kernels of the torch device, one row for each kernel."""
        return kernel_rows()

    @property
    def kernels(self) -> Mapping[str, Sequence[str]]:
        """The names of the kernels that batches used so far, by the name of the operation that they compute.

        Once calls were captured in graphs on a GPU, the key "replay" has the kinds of graphs, such as "CUDA graphs".
        After a failed capture it has the reason of the failure instead.
        """
        replays = self._compute.replays
        return {**self._compute.kernels.table.used, **(replays.graphs.used if replays else {})}

    @property
    def own_bytes(self) -> int:
        """Bytes of memory that the plan does not count: code that oneDNN generates for products."""
        return self._compute.own_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes read from the checkpoint's files so far."""
        return self._store.bytes_read

    def bytes_to_read(self, page: Page) -> int:
        """Return the bytes that are read from the files for a page of weights, in whole blocks of the disk."""
        return self._store.reader.location(page).bytes_to_read

    def slot_bytes(self, page: Page) -> int:
        """Return the bytes that a page (a part of a layer's weights) takes in a slot (memory for one page)."""
        return self._store.reader.bytes_in_slot(page)

    def join(self, rank: int, transport: Transport, first: Any) -> None:
        """Make this device one of several that run a model together, and exchange data over a transport.

        If the model was cut over ranks, each device is a rank with a share of every matrix; otherwise each is a node
        with the experts that a batch's plan places on it.

        Args:
            rank: this device's number, from 0.
            transport: carries the exchanges.
            first: not used by this device.

        Raises:
            BadInput: the model was cut over ranks, and has a part that only a device with the whole model can compute,
                such as a shared expert.
        """
        if self.layout.config.ranks > 1:
            require_plain_layers(self.layout.config, "one of several ranks")
        self._rank = rank if self.layout.config.ranks > 1 else 0
        self._transport = transport

    def observe_routing(self, observer: RoutingObserver) -> None:
        """Report to an observer which experts the routers choose, from now on."""
        self._observers.routing = observer

    def observe_activations(self, observer: ActivationObserver) -> None:
        """Report the experts' activations after SiLU to an observer.

        Most kernels do not return the activations; they are then computed a second time.
        """
        self._observers.activations = observer

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Begin a batch of prompts (token ids): free the last batch's memory, and allocate what the plan says.

        Weights that are resident in both batches stay.

        Raises:
            BadInput: a token id is outside the vocabulary.
            OutOfMemory: the plan takes more memory of a GPU than there is.
        """
        check_token_ids(prompts, self.layout.config.vocabulary)
        self._start(plan)
        self._open(plan, states_of(plan, prompts, self._compute), sampling)

    def serve(self, plan: Plan) -> None:
        """Begin to serve requests that join and leave: free the last batch's memory, and allocate what the plan says.

        Raises:
            OutOfMemory: the plan takes more memory of a GPU than there is.
        """
        self._start(plan)
        self._open(plan, serving_states(plan, self._compute), Sampling())

    def _start(self, plan: Plan) -> None:
        """Free the last batch's memory, start the kernels, and prepare to load the plan's weights."""
        config = self.layout.config
        self._warm_ups.forget()
        wait_for_device(self._compute.accelerator)  # a run that failed may have left copies
        if self._verbs:
            self._verbs = {}
            gc.collect()  # torch keeps frames of first calls in cycles, and with them a KV cache
        self._store.let_go()
        if not self._compute.on_cpu:
            require_room(plan, self._compute.accelerator)
        self._store.reader.ahead = self.memory_ahead
        # Mean rows of an expert in a decode step of the largest micro-batch: the same for every policy.
        largest = max(map(len, plan.batch.micro_batches))
        self._compute.start(largest * config.routed.top_k / config.routed.experts)
        if plan.nodes.attends and self._global_weights is None:
            self._global_weights = read_global_weights(config, self._store.reader, self._compute, self._rank)
        self._store.begin(plan, self.tell)
        self.weights_home = None if self._compute.on_cpu else self._store.home.chosen
        self._observers.first_request = plan.batch.first_request

    def _open(self, plan: Plan, states: list[MicroBatchState], sampling: Sampling) -> None:
        """Make the functions that run the plan's tasks; warm up a GPU if no earlier plan had the same sizes."""
        choice = Choice(sampling, plan.batch.first_request, self._keep if self._keep_logits else None)
        topology = Topology(plan, states, choice, self._compute, self._store, self._observers)
        if self._compute.replays is not None:
            self._compute.replays.layers = len(plan.layers) if has_fixed_steps(plan) else 0
        self._verbs = self._verbs_of(topology, plan)
        kv = memory_for_kv(states, topology.kv_slots)
        shapes = shapes_of(plan, kv)
        is_cold = self._cuda is not None and self._warm_ups.is_new(shapes)
        weights = stand_in(self.layout, self._store) if is_cold else None
        # Streams do not wait for the default one, on which all this was filled.
        wait_for_copies(self._compute.accelerator)
        if self._cuda and weights:
            warm_up = self._warm_up(weights, kv)
            work = partial(self._cuda.complete, partial(warm_up.run, shapes))
            ended = self._warm_ups.start(work, self._store.resident)
            self._verbs["load"] = after(ended, self._verbs["load"])

    def _warm_up(self, weights: Weights, kv: Tensor | None) -> ExpertWarmUp:
        assert weights.layer is not None, "they are those of a layer"
        config, compute = replace(self.layout.config, pattern=(weights.layer,)), self._compute
        if self._global_weights is None:
            return ExpertWarmUp(config, compute, weights)
        return WarmUp(config, compute, weights, self._global_weights, self._rank, kv)

    def _keep(self, sequences: tuple[int, ...], logits_SV: npt.NDArray[np.float32]) -> None:
        self.logits.append((sequences, torch.from_numpy(logits_SV)))

    def _verbs_of(self, topology: Topology, plan: Plan) -> Verbs:
        if plan.nodes.count == 1 and plan.layout.config.ranks == 1:
            assert self._global_weights is not None, "a device alone attends"
            return topology.alone(self._global_weights)
        assert self._transport is not None, "a device that is to be one of several has to join them"
        if not plan.nodes.attends:
            return topology.node_of_experts(self._transport)
        assert self._global_weights is not None, "it attends"
        if plan.nodes.count > 1:
            return topology.node(self._global_weights, self._transport)
        return topology.rank(self._global_weights, self._rank, self._transport)

    def execute(self, task: Task) -> Any:
        """Run a task on the calling thread; returns its value. On a GPU, this waits until the task has ended there."""
        if self._cuda is None or isinstance(task, HostKernel):
            return self._verbs[task.verb](task)
        return self._cuda.run(task)

    async def aclose(self) -> None:
        """Close the checkpoint's files and end the threads."""
        self.close()

    def close(self) -> None:
        """Close the checkpoint's files and end the threads; unlike `aclose`, this needs no event loop."""
        self._warm_ups.end()
        wait_for_device(self._compute.accelerator)
        self._verbs = {}
        self._global_weights = None
        self._store.close()
        self._compute.close()


def listed(kernels: str | type | Sequence[str | type]) -> Sequence[str | type]:
    """Return kernels as a sequence: a single kernel becomes a list, a sequence is returned unchanged."""
    return [kernels] if isinstance(kernels, str | type) else kernels
