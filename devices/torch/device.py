"""The torch device: runs the tasks of a schedule on real tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moesched.drivers.lanes import LaneKind, Streams
from moesched.errors import BadInput
from moesched.machines import Machine, machine_names
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import Page, WeightLayout
from moesched.requests.batch import KV_BLOCK_TOKENS
from moesched.requests.beams import BeamSearch
from moesched.requests.sampling import Sampling
from moesched.seams import ActivationObserver, RoutingObserver, Transport
from moesched.steps.plan import Plan
from moesched.steps.reservations import KV_ROLES
from moesched.tasks import Task

from ..products.bfloat16_support import has_bfloat16
from ..products.linear import Tensor
from ..products.packed_weights import cores_keep_bits, packing_pays
from ..products.products import Products, make_kernel, rows_for_kernel
from ..products.row_tiles import CODE_BYTES
from ..products.team import Team, usable_cores
from ..shared.node_exchanges import NodeVerbs
from ..shared.page_reader import DTYPES
from ..shared.token_ids import check_token_ids
from ..shared.verbs import Verb
from .attention import Attention
from .beams import BeamSearches
from .copies import wait_for_copies
from .cores import Cores
from .cuda_streams import CudaStreams
from .first_bad_tensor import FirstBadTensor
from .host_experts import HostExperts
from .host_side import HOST, HostSide
from .kv_cache import BlockedKV
from .micro_batch import MicroBatchState
from .moe_layer import MoELayer
from .next_tokens import Choice, Head, NextTokens
from .node_side import NodeSide
from .observers import DeviceObservers
from .prompt_chunks import DeviceKV, chunk_states
from .rank_side import RankSide
from .verbs import Parts, verbs_of
from .weights import WeightStore

CUDA_LANES = ("accelerator", "host->gpu", "gpu->host")
"""The lanes of a CUDA machine that are streams: its profile's paths between memories have these names."""


class TorchDevice:
    """Runs batches of one model on torch, one after the other.

    Weights are read from the checkpoint's files into slots of an arena, page by page; those that stay are rearranged
    for oneDNN where that pays, and are still there in the next batch.

    Args:
        accelerator: where the accelerator's tensors are, such as "cuda". With "cpu", a machine with two memories has
            both in the host's.
        keep_logits: remember every step's logits (S, V) by micro-batch, in `logits`.
        direct: read past the page cache where the system allows it. Otherwise pages that stream are used where they
            lie in it, where the system and the files allow that, and copied from it where not.
        kernel: what multiplies a few rows by bfloat16 weights on the CPU: `auto` for the expert kernel with the best
            instruction set here, the name of another one, or `torch`.
        pin: keep each of the expert kernel's threads on a core of its own.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: WeightLayout,
        *,
        accelerator: str = "cpu",
        keep_logits: bool = False,
        direct: bool = True,
        kernel: str = "auto",
        pin: bool = False,
    ) -> None:
        self._kernel = kernel
        self._kernel_rows = rows_for_kernel(kernel, layout.dtype)
        self._pin = pin
        self._products = Products()
        self._accelerator = torch.device(accelerator)
        self._on_cpu = self._accelerator.type == "cpu"
        self.config = checkpoint.config
        self.layout = layout
        self.logits: list[tuple[tuple[int, ...], Tensor]] = []
        self._keep_logits = keep_logits
        self._dtype = DTYPES[layout.dtype]
        transposed = self.config.transposed_down
        self._cores = usable_cores()
        self._use_cores = Cores(self._cores, self._dtype)
        self._store = WeightStore(
            checkpoint,
            layout,
            self._accelerator,
            direct=direct,
            packing=self._on_cpu and layout.dtype == "bfloat16" and packing_pays(transposed),
            cores=self._cores,
        )
        self._sharing = (
            self._on_cpu and self._cores > 1 and cores_keep_bits(self._dtype, self._cores, transposed)
        )
        self._threads_before = torch.get_num_threads()
        self._team = Team(1)
        self._globals: dict[str, Tensor] = {}
        self._head: list[Tensor] = []
        self._started = False
        self._states: list[MicroBatchState] = []
        self._number = 0
        self._transport: Transport | None = None
        self._device_observers = DeviceObservers()
        self._verbs: dict[str, Verb] = {}
        self._cuda: CudaStreams | None = None

    @staticmethod
    def check_machine(machine: Machine) -> None:
        """Whether a machine can be this one.

        Raises:
            BadInput: it is another one: a profile that ships, or one whose accelerator has a memory of its own.
        """
        if machine.name in machine_names() or not machine.unified:
            raise BadInput(
                f"machine {machine.name} describes other hardware than the processor that device torch runs on: "
                "use --device emulated to imitate it, or --machine auto"
            )

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        """Worker threads on the CPU; on CUDA the accelerator and its copies are streams."""
        return {} if self._on_cpu else dict.fromkeys(CUDA_LANES, "stream")

    @property
    def streams(self) -> Streams | None:
        """The issuer of tasks to CUDA streams: the same in every run, since torch keeps memory by stream."""
        if self._on_cpu:
            return None
        if self._cuda is None:
            self._cuda = CudaStreams(self._accelerator, CUDA_LANES, self.execute)
        self._cuda.begin()
        return self._cuda

    @property
    def own_bytes(self) -> int:
        """Bytes beyond the plan: oneDNN's code for the shapes of products."""
        return CODE_BYTES if self._on_cpu and self._dtype == torch.bfloat16 and has_bfloat16() else 0

    @property
    def bytes_read(self) -> int:
        """Bytes read from the checkpoint's files so far."""
        return self._store.bytes_read

    def bytes_to_read(self, page: Page) -> int:
        """Bytes, in whole blocks, that bringing in a page asks of the files."""
        return self._store.reader.location(page).bytes_to_read

    def slot_bytes(self, page: Page) -> int:
        """Bytes that a page takes in a slot."""
        return self._store.reader.bytes_in_slot(page)

    def join(self, rank: int, transport: Transport, first: Any) -> None:
        """Work as one of several from now on, with exchanges over a transport.

        Several are ranks, each with its share of every matrix, where the model was cut; otherwise nodes, each with the
        experts that a batch's plan gives it.
        """
        self._number = rank
        self._transport = transport

    def observe_routing(self, observer: RoutingObserver) -> None:
        """Tell somebody which experts the routers choose, from now on."""
        self._device_observers.routing = observer

    def observe_activations(self, observer: ActivationObserver) -> None:
        """Tell somebody what the experts' SiLU lets through, from now on; it is computed a second time for that."""
        self._device_observers.activations = observer

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Allocate all that the plan says, and take in the prompts' token ids.

        What the batch before had allocated is let go of first. Weights that stayed then and stay now are kept.

        Raises:
            BadInput: a token id is outside the vocabulary.
        """
        check_token_ids(prompts, self.config.vocabulary)
        self._let_go()
        self._store.accelerator = self._accelerator  # which of several GPUs, if there are any
        if not self._started:
            self._start(plan)
        if plan.nodes.attends and not self._head:
            self._globals = {name: self._store.read_global(name) for name in ("embedding", "final_norm")}
            self._head = self._split_head()
        self._store.begin(plan)
        self._first_request = plan.batch.first_request
        self._states = [
            MicroBatchState(requests, [prompts[request] for request in requests], plan.batch.beams)
            for requests in plan.batch.micro_batches
        ]
        for role in KV_ROLES if plan.nodes.attends else ():
            self._open_cache(
                plan, plan.kv.held_by(role), self._accelerator if role == "accelerator" else HOST
            )
        if plan.batch.chunked:
            self._states += chunk_states(plan.chunks, self._states, prompts)
        self._verbs = verbs_of(self._parts(plan, sampling))
        # Streams do not wait for the default one, on which all this was filled.
        wait_for_copies(self._accelerator)

    def _open_cache(self, plan: Plan, micro_batches: Sequence[int], device: torch.device) -> None:
        """One KV cache for these micro-batches, with room for all tokens of each request, of all its beams."""
        if not micro_batches:
            return
        states = [self._states[number] for number in micro_batches]
        blocks = sum(plan.batch.tokens_at_end(state.requests) for state in states) // KV_BLOCK_TOKENS
        cache = BlockedKV(self.config, blocks, block_size=KV_BLOCK_TOKENS, dtype=self._dtype, device=device)
        for state in states:
            state.cache = cache
            for request, sequence in zip(state.requests, state.sequences, strict=True):
                # Beams take blocks as they grow.
                new_tokens = plan.batch.new_tokens if state.beams == 1 else 0
                cache.table.open(sequence, plan.batch.prompts[request] + new_tokens)

    def _start(self, plan: Plan) -> None:
        """Set up what all batches share: threads and the kernel for products."""
        if self._rows_an_expert(plan) <= self._kernel_rows:
            self._store.packing = False  # what is packed is torch's alone
        if not self._store.packing:
            self._products = Products(make_kernel(self._kernel, self._kernel_rows, self._pin))
        self._team = Team(self._cores if self._sharing else 1)
        self._started = True

    def _rows_an_expert(self, plan: Plan) -> float:
        """Rows that an expert has in a decode step of the largest micro-batch, on average: alike for every policy."""
        largest = max(map(len, plan.batch.micro_batches))
        return largest * self.config.top_k / self.config.experts

    def _let_go(self) -> None:
        """Give back what the batch before had allocated, but for weights that may stay."""
        self._store.let_go()
        self._states = []
        self._verbs = {}

    def execute(self, task: Task) -> Any:
        """Run one task on the calling thread."""
        with torch.inference_mode():
            return self._verbs[task.verb](task)

    async def aclose(self) -> None:
        """Close the checkpoint's files and end the threads."""
        self.close()

    def close(self) -> None:
        """The same, where nothing can be awaited."""
        self._let_go()
        self._store.close()
        self._products.close()
        self._team.close()
        torch.set_num_threads(self._threads_before)

    # -- what a batch is run with ------------------------------------------------------------------

    def _split_head(self) -> list[Tensor]:
        """The LM head as row blocks, one for each core of the team."""
        tied = self.config.tied_embeddings
        if tied:
            head = self._globals["embedding"].chunk(self.config.ranks)[self._rank]
        else:
            head = self._store.read_global("lm_head")
        blocks = head.chunk(self._team.cores)
        return list(blocks) if tied else [self._store.arranged(block) for block in blocks]

    def _parts(self, plan: Plan, sampling: Sampling) -> Parts:
        """The parts that run a batch's verbs."""
        attention = self._attention()
        moe = self._moe_layer(attention)
        beams = self._beam_searches(plan, sampling) if plan.batch.beams > 1 else None
        tokens = self._next_tokens(sampling, beams) if plan.nodes.attends else None
        split = not plan.machine.unified
        return Parts(
            self._store,
            attention,
            moe,
            tokens,
            beams,
            self._host_side(plan, attention) if split else None,
            self._host_experts(moe) if split else None,
            self._rank_side(tokens) if tokens else None,
            self._node_side(plan, attention, moe, tokens) if plan.nodes.count > 1 else None,
        )

    def _attention(self) -> Attention:
        return Attention(
            self.config,
            self._accelerator,
            self._states,
            self._store.weights,
            self._globals.get("embedding", torch.empty(0)),
            self._products,
            self._use_cores.use_for,
            self._rank,
        )

    def _host_side(self, plan: Plan, attention: Attention) -> HostSide:
        return HostSide(
            self._accelerator,
            self._store.reader,
            self._store.home(plan),
            self._store.bytes,
            [self._kv_slot(plan) for _ in range(plan.kv.slots)],
            self._states,
            self._cached_on_host(plan),
            self._device_kv(plan),
            attention,
        )

    def _cached_on_host(self, plan: Plan) -> frozenset[int]:
        """The micro-batches whose KV cache is there, chunks of prefill included."""
        wholes = plan.kv.held_by("host")
        chunks = [number for number, chunk in plan.chunks.items() if chunk.micro_batch in wholes]
        return frozenset([*wholes, *chunks])

    def _device_kv(self, plan: Plan) -> dict[int, DeviceKV]:
        """Room for a layer's keys and values of prompts in chunks whose KV cache is on the host, by chunk."""
        rooms: dict[int, DeviceKV] = {}
        found: dict[int, DeviceKV] = {}
        for number, chunk in plan.chunks.items():
            if chunk.before < 0 and not chunk.last and plan.kv.roles[chunk.micro_batch] == "host":
                whole = self._states[chunk.micro_batch]
                lengths = {
                    sequence: plan.batch.prompts[request]
                    for request, sequence in zip(whole.requests, whole.sequences, strict=True)
                }
                rooms[chunk.micro_batch] = DeviceKV(self.config, lengths, self._dtype, self._accelerator)
            if chunk.micro_batch in rooms:
                found[number] = rooms[chunk.micro_batch]
        return found

    def _moe_layer(self, attention: Attention) -> MoELayer:
        return MoELayer(
            self.config,
            self._on_cpu,
            self._states,
            self._store.weights,
            attention.residual,
            self._use_cores.use_for,
            self._team if self._sharing else None,
            self._products,
            self._device_observers,
            self._first_request,
        )

    def _host_experts(self, moe: MoELayer) -> HostExperts:
        return HostExperts(
            self.config,
            self._accelerator,
            self._states,
            self._store.weights,
            self._use_cores.use_for,
            moe,
            self._products,
            self._device_observers,
        )

    def _next_tokens(self, sampling: Sampling, beams: BeamSearches | None) -> NextTokens:
        return NextTokens(
            self.config,
            Head(self._globals["final_norm"], self._head),
            self._accelerator,
            self._states,
            self._use_cores.use_for,
            self._team if self._sharing else None,
            self._products,
            Choice(sampling, self._first_request, self.logits if self._keep_logits else None, beams),
            FirstBadTensor(self._store.reader, self.layout, self._accelerator).name,
        )

    def _rank_side(self, tokens: NextTokens) -> RankSide | None:
        if self._transport is None or self.config.ranks == 1:
            return None
        return RankSide(
            self._rank, self._transport, self.config.vocabulary, self._states, tokens.logits, tokens.draw
        )

    def _node_side(
        self, plan: Plan, attention: Attention, moe: MoELayer, tokens: NextTokens | None
    ) -> NodeVerbs:
        assert self._transport is not None, "a device that is to be one of several nodes has to join them"
        side = NodeSide(plan, self._states, moe, self._accelerator, self._dtype, attention.project_output)
        return NodeVerbs(plan, self._transport, side, tokens.sample_next if tokens else None)

    def _kv_slot(self, plan: Plan) -> Tensor:
        elements = plan.kv.slot_bytes // self._dtype.itemsize
        return torch.empty(elements, dtype=self._dtype, device=self._accelerator)

    def _beam_searches(self, plan: Plan, sampling: Sampling) -> BeamSearches:
        searches = {
            request: BeamSearch(sampling, self.config.stop_tokens, plan.batch.new_tokens)
            for request in range(len(plan.batch.prompts))
        }
        return BeamSearches(searches, self._states)

    @property
    def _rank(self) -> int:
        """This rank, where the model is cut; 0 on a node, which has all of every matrix."""
        return self._number if self.config.ranks > 1 else 0
