"""The torch device: runs the tasks of a schedule on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from moesched.activations import EXPERT_TILE
from moesched.beams import BeamSearch, Standing
from moesched.drivers.lanes import LaneKind, Streams
from moesched.errors import BadInput
from moesched.machines import Machine, machine_names
from moesched.memory import Pool, Slot, View
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import Page, WeightLayout
from moesched.plan import KV_BLOCK_TOKENS, Plan
from moesched.sampling import Sampling, require_numbers, sample
from moesched.seams import Transport
from moesched.tasks import PageTransfer, Task

from . import torch_kernels as kernels
from .arena import Arena, aligned_bytes, copy_placed_alike
from .copies import indices, moved, wait_for_copies
from .cuda_streams import CudaStreams
from .host_side import HostSide, bring_home
from .kept_pages import KeptPages, Weights
from .kv_cache import BlockedKV
from .mapped_pages import MappedPages
from .micro_batch import MicroBatchState
from .packed_weights import cores_keep_bits, pack, packed_bytes, packing_pays
from .page_reader import DTYPES, PageReader
from .rank_side import RankSide
from .team import Team, usable_cores, use_cores
from .torch_kernels import KVView, Tensor

CUDA_LANES = ("accelerator", "host->gpu", "gpu->host")
"""The lanes of a CUDA machine that are streams: its profile's paths between memories have these names."""

MOST_ARRANGING = 3
"""How many threads rearrange the pages that stay while they are read; more find no more memory bandwidth."""

READS_IN_FLIGHT = 2
"""How many pages of one transfer are read at a time: a disk that waits for the next read was measured 7 % slower."""

ONE_CORE_BYTES = 8 << 20
ONE_CORE_PRODUCTS = 1 << 26
"""Up to these sizes, of weights and in multiplications, one core is done before the others could be called."""

MOST_UNGROUPED = 128
"""Up to so many tokens a GPU has read an expert's weights no sooner than it has multiplied by them. So every expert
gets every token there, and the host need not wait to learn which ones were routed to it."""

Group = Callable[[Tensor, int], kernels.Grouping]


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
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: WeightLayout,
        *,
        accelerator: str = "cpu",
        keep_logits: bool = False,
        direct: bool = True,
    ) -> None:
        self._accelerator = torch.device(accelerator)
        self._on_cpu = self._accelerator.type == "cpu"
        self.config = checkpoint.config
        self.layout = layout
        self.logits: list[tuple[tuple[int, ...], Tensor]] = []
        self._keep_logits = keep_logits
        self._reader = PageReader(checkpoint, layout, direct)
        self._checkpoint = checkpoint
        self._mapping = self._on_cpu and not direct and MappedPages.possible(self._reader)
        self._mapped: MappedPages | None = None
        self._dtype = DTYPES[layout.dtype]
        transposed = self.config.transposed_down
        self._packing = self._on_cpu and layout.dtype == "bfloat16" and packing_pays(transposed)
        self._cores = usable_cores()
        self._sharing = (
            self._on_cpu and self._cores > 1 and cores_keep_bits(self._dtype, self._cores, transposed)
        )
        self._threads_before = torch.get_num_threads()
        self._team = self._readers = Team(1)
        self._arenas: dict[Pool, Arena] = {}
        self._globals: dict[str, Tensor] = {}
        self._head: list[Tensor] = []
        self._kept = KeptPages(self._reader, self._arranged)
        self._home: dict[int, Tensor] = {}
        self._states: list[MicroBatchState] = []
        self._rank = 0
        self._transport: Transport | None = None
        self._verbs_of_one_memory: dict[str, Callable[[Any], Any]] = {
            "load": self._load,
            "fetch": self._fetch,
            "pin": self._fetch,
            "embed": self._embed,
            "reorder": self._reorder,
            "pre_attention": self._pre_attention,
            "attention": self._attention,
            "cpu_attention": self._attention,
            "post_attention": self._post_attention,
            "route": self._route,
            "run_expert": self._run_expert,
            "combine": self._combine,
            "sample": self._sample,
        }
        self._verbs = self._verbs_of_one_memory
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
        """What the lanes are: worker threads on the CPU; on CUDA the accelerator and its copies are streams."""
        return {} if self._on_cpu else dict.fromkeys(CUDA_LANES, "stream")

    @property
    def streams(self) -> Streams | None:
        """What issues tasks to the lanes that are streams: the same ones in every run, as memory is kept by stream."""
        if self._on_cpu:
            return None
        if self._cuda is None:
            self._cuda = CudaStreams(self._accelerator, CUDA_LANES, self.execute)
        self._cuda.begin()
        return self._cuda

    @property
    def bytes_read(self) -> int:
        """Bytes read from the checkpoint's files so far."""
        return self._reader.bytes_read + (self._mapped.bytes_mapped if self._mapped else 0)

    def bytes_to_read(self, page: Page) -> int:
        """Bytes, in whole blocks, that bringing in a page asks of the files."""
        return self._reader.bytes_to_read(page)

    def slot_bytes(self, page: Page) -> int:
        """What a page takes in a slot."""
        return self._reader.bytes_in_slot(page)

    def join(self, rank: int, transport: Transport, first: Any) -> None:
        """Work as one of several ranks from now on: on its share of the model, with all-reduces over a transport."""
        self._rank = rank
        self._transport = transport

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Allocate all that the plan says, and take in the prompts' token ids.

        What the batch before had allocated is let go of first. Weights that stayed then and stay now are kept.

        Raises:
            BadInput: a token id is outside the vocabulary.
        """
        self._check(prompts)
        self._let_go()
        if not self._head:
            self._start()
        fast = plan.memory("accelerator")
        missing = self._kept.retain(
            page for pool in plan.kept if pool.memory is fast for page in pool.pages()
        )
        if self._mapping and plan.machine.unified:
            self._mapped = self._mapped or MappedPages(self._checkpoint, self.layout, self._reader)
        else:
            self._arenas = {pool: self._arena(pool, plan) for pool in plan.pools}
        if missing:
            self._kept.expect(missing, self._staging(missing, plan.staged))
        self._sampling = sampling
        self._first_request = plan.batch.first_request
        blocks = plan.batch.cache_tokens // KV_BLOCK_TOKENS
        self._cache = BlockedKV(
            self.config,
            blocks,
            block_size=KV_BLOCK_TOKENS,
            dtype=self._dtype,
            device=self._accelerator if plan.kv_role == "accelerator" else "cpu",
        )
        beams = plan.batch.beams
        for request, prompt in enumerate(prompts):
            self._cache.open(request * beams, len(prompt) + (plan.batch.new_tokens if beams == 1 else 0))
        self._states = [
            MicroBatchState(requests, prompts, self._searches(plan, requests), beams)
            for requests in plan.batch.micro_batches
        ]
        if not plan.machine.unified:
            self._verbs = {**self._verbs, **self._host_side(plan).verbs}
        if self._transport is not None:
            self._verbs = {**self._verbs, **self._verbs_of_a_rank(self._transport)}
        # Streams do not wait for the default one, on which all this was filled.
        wait_for_copies(self._accelerator)

    def _start(self) -> None:
        """What is the same for all batches: threads, and the weights outside the layers."""
        self._team = Team(self._cores if self._sharing else 1)
        self._readers = Team(READS_IN_FLIGHT)
        self._globals = {name: self._read_global(name) for name in ("embedding", "final_norm")}
        self._head = self._split_head()

    def _let_go(self) -> None:
        """Give back what the batch before had allocated, but for weights that may stay."""
        self._kept.close()
        if self._states:
            self._states = []
            del self._cache
        self._arenas = {}
        if self._mapped is not None:
            self._mapped.hide()
        self._verbs = self._verbs_of_one_memory

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
        self._kept.retain([])
        self._home = {}
        self._team.close()
        self._readers.close()
        if self._mapped is not None:
            self._mapped.close()
        self._reader.close()
        torch.set_num_threads(self._threads_before)

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        for number, prompt in enumerate(prompts):
            for token in prompt:
                if not 0 <= token < self.config.vocabulary:
                    raise BadInput(
                        f"prompt {number}: token id {token} is outside the vocabulary of {self.config.vocabulary}: "
                        f"use ids from 0 to {self.config.vocabulary - 1}"
                    )

    # -- weights -----------------------------------------------------------------------------------

    def _load(self, task: PageTransfer) -> None:
        for page in task.pages:
            if page.id not in self._home:
                self._kept.load(page)

    def _staging(self, pages: int, most: int) -> list[Tensor]:
        """Where pages that stay are read to: slots that are not in use yet, or memory that is given back."""
        count = min(pages + 1, self._cores + 1, MOST_ARRANGING + 1, most)
        size = self._reader.slot_bytes
        unused = [
            arena.slot(index)
            for arena in self._arenas.values()
            if arena.slot_bytes >= size and arena.on_cpu
            for index in range(len(arena))
        ]
        return unused[:count] if len(unused) > 1 else [aligned_bytes(size) for _ in range(count)]

    def _split_head(self) -> list[Tensor]:
        """The LM head as row blocks, one for each core of the team."""
        tied = self.config.tied_embeddings
        if tied:
            head = self._globals["embedding"].chunk(self.config.ranks)[self._rank]
        else:
            head = self._read_global("lm_head")
        blocks = head.chunk(self._team.cores)
        return list(blocks) if tied else [self._arranged(block) for block in blocks]

    def _arranged(self, matrix_ND: Tensor) -> Tensor:
        if self._packing and matrix_ND.dim() == 2:
            packed = pack(matrix_ND)
            if packed_bytes(packed) <= matrix_ND.nbytes:
                return packed
        return copy_placed_alike(matrix_ND, self._accelerator)

    def _fetch(self, task: PageTransfer) -> None:
        pairs = list(zip(task.pages, task.slots, strict=True))
        if self._mapped is not None:
            for page, slot in pairs:
                self._mapped.bring(page, slot)
            return
        self._readers.run([partial(self._reader.read, page, self._bytes(slot)) for page, slot in pairs])

    def _read_global(self, name: str) -> Tensor:
        return self._reader.read_tensor(name).to(self._accelerator)

    def _arena(self, pool: Pool, plan: Plan) -> Arena:
        fast = pool.memory is plan.memory("accelerator")
        if fast:
            return Arena(len(pool.slots), pool.slot_bytes, device=self._accelerator)
        return Arena(len(pool.slots), pool.slot_bytes, pinned=not self._on_cpu)

    def _host_side(self, plan: Plan) -> HostSide:
        return HostSide(
            self._accelerator,
            self._reader,
            self._home_of_weights(plan),
            self._bytes,
            self._cache,
            plan.kv_role == "host",
            [self._kv_slot(plan) for _ in range(plan.kv_slots)],
            self._states,
            self._attend,
        )

    def _verbs_of_a_rank(self, transport: Transport) -> Mapping[str, Callable[[Any], Any]]:
        side = RankSide(
            self._rank, transport, self.config.vocabulary, self._states, self._last_logits, self._draw
        )
        return {
            **side.verbs,
            "output_projection": self._project_output,
            "post_attention": self._experts,
            "route": self._choose_experts,
        }

    def _kv_slot(self, plan: Plan) -> Tensor:
        elements = plan.kv_slot_bytes // self._dtype.itemsize
        return torch.empty(elements, dtype=self._dtype, device=self._accelerator)

    def _home_of_weights(self, plan: Plan) -> dict[int, Tensor]:
        """Bytes of pages in host memory, by page: all that stream where weights live there, else what it keeps."""
        fast, host = plan.memory("accelerator"), plan.memory("host")
        if plan.machine.roles.weights == host.name:
            kept = {page.id for pool in plan.kept if pool.memory is fast for page in pool.pages()}
            pages = [page for page in self.layout.pages if page.id not in kept]
        else:
            pages = [page for pool in plan.kept if pool.memory is host for page in pool.pages()]
        self._home = bring_home(self._home, self._reader, pages)
        return self._home

    def _bytes(self, slot: Slot) -> Tensor:
        if slot.fixed:
            assert slot.page is not None
            return self._home[slot.page.id]
        return self._arenas[slot.pool].slot(slot.index)

    def _weights(self, view: View[Any]) -> Weights:
        """The tensors that a view shows, by their names within the layer."""
        if view.bound is None:
            merged: Weights = {}
            for page, slot in zip(view.pages, view.slots, strict=True):
                tensors = self._kept[page] if slot.fixed else self._streamed(page, slot)
                for name, blocks in tensors.items():
                    merged.setdefault(name.split(".", 2)[2], []).extend(blocks)
            view.bound = merged
        bound: Weights = view.bound
        return bound

    def _streamed(self, page: Page, slot: Slot) -> Weights:
        if self._mapped is not None:
            return self._mapped.views(page)
        return self._reader.views(self._bytes(slot), page)

    # -- a micro-batch through a layer -------------------------------------------------------------

    def _use_cores_for(self, tokens: int, weights: int) -> None:
        """Let torch use all cores for a product with so many weights if that is worth it.

        What decides is the shape alone, never the lane or what else runs: that may show in the bits of float32.
        """
        small = tokens * weights <= ONE_CORE_PRODUCTS and weights * self._dtype.itemsize <= ONE_CORE_BYTES
        use_cores(1 if small else self._cores)

    def _searches(self, plan: Plan, requests: Sequence[int]) -> list[BeamSearch]:
        if plan.batch.beams == 1:
            return []
        return [BeamSearch(self._sampling, self.config.stop_tokens, plan.batch.new_tokens) for _ in requests]

    def _reorder(self, task: Task) -> None:
        """Have every beam go on from the one that it came from."""
        use_cores(1)
        state = self._states[task.micro_batch]
        heirs = [request * state.beams + beam for request in state.requests for beam in range(state.beams)]
        self._cache.reorder(state.sequences, state.parents, heirs)
        state.sequences = tuple(heirs)

    def _embed(self, task: Task) -> None:
        use_cores(1)
        state = self._states[task.micro_batch]
        state.step = self._cache.extend(state.sequences, [len(tokens) for tokens in state.new])
        positions_T = moved(state.step.positions_T, self._accelerator)
        state.angles = kernels.rotary(positions_T, self.config.head_dim, self.config.rope_theta)
        ids_T = indices([token for tokens in state.new for token in tokens], self._accelerator)
        state.hidden_TD = kernels.embed(ids_T, self._globals["embedding"])

    def _pre_attention(self, task: Task) -> None:
        state, weights, config = self._states[task.micro_batch], self._weights(task.operands), self.config
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self._use_cores_for(len(state.hidden_TD), config.hidden * width)
        state.qkv = kernels.project_qkv(
            state.hidden_TD,
            weights["attention_norm"][0],
            weights["q"] + weights["k"] + weights["v"],
            *state.angles,
            heads=config.heads,
            kv_heads=config.kv_heads,
            eps=config.norm_eps,
            norm_kind=config.norm,
            qk_norms=(weights["q_norm"][0], weights["k_norm"][0]) if config.qk_norm else None,
            clip=config.clip_qkv,
        )

    def _attention(self, task: Task) -> None:
        state = self._states[task.micro_batch]
        q_THd, k_TKd, v_TKd = state.qkv
        self._cache.append(task.layer, state.step, k_TKd, v_TKd)
        state.attended_TX = self._attend(state, q_THd, self._cache.views(task.layer, state.step))
        del state.qkv

    def _attend(self, state: MicroBatchState, q_THd: Tensor, views: Sequence[KVView]) -> Tensor:
        seen = sum(state.step.past) + len(q_THd)
        self._use_cores_for(max(state.step.new), 2 * seen * self.config.kv_heads * self.config.head_dim)
        return kernels.attention(q_THd, views, self.config.sliding_window)

    def _post_attention(self, task: Task) -> dict[int, int]:
        self._project_output(task)
        return self._experts(task)

    def _experts(self, task: Task) -> dict[int, int]:
        """What follows the output projection: router, all experts, combine."""
        state = self._states[task.micro_batch]
        few = not self._on_cpu and len(state.hidden_TD) <= MOST_UNGROUPED
        counts = self._choose_experts(task, kernels.every_expert if few else kernels.group_by_expert)
        weights = self._weights(task.operands)
        if self._sharing:
            largest_first = sorted(counts, key=counts.__getitem__, reverse=True)
            self._team.run([partial(self._apply_expert, state, expert, weights) for expert in largest_first])
        else:
            for expert in counts:
                self._use_cores_for_expert(counts[expert])
                self._apply_expert(state, expert, weights)
        self._combine(task)
        return counts

    def _route(self, task: Task) -> dict[int, int]:
        self._project_output(task)
        return self._choose_experts(task)

    def _project_output(self, task: Task) -> None:
        state, weights, config = self._states[task.micro_batch], self._weights(task.operands), self.config
        self._use_cores_for(len(state.hidden_TD), config.hidden * config.heads * config.head_dim)
        state.hidden_TD = kernels.output_projection(state.attended_TX, weights["o"], self._residual(state))
        if self._on_cpu or not task.step:
            del state.attended_TX  # on CUDA a decode step's came by another stream, whose memory it is

    def _residual(self, state: MicroBatchState) -> Tensor:
        """What is added to a sum over ranks: by the first of them the hidden states, by the others nothing."""
        return state.hidden_TD if self._rank == 0 else torch.zeros_like(state.hidden_TD)

    def _choose_experts(self, task: Task, group: Group = kernels.group_by_expert) -> dict[int, int]:
        """Norm and router; the rows of each expert that has any."""
        state, weights, config = self._states[task.micro_batch], self._weights(task.operands), self.config
        x_TD = kernels.norm(state.hidden_TD, weights["ffn_norm"][0], config.norm_eps, config.norm)
        if config.experts == 1:
            experts_Tk = x_TD.new_zeros((len(x_TD), 1), dtype=torch.int64)
            state.weights_Tk = x_TD.new_ones((len(x_TD), 1), dtype=torch.float32)
        else:
            experts_Tk, state.weights_Tk = kernels.route(
                x_TD, weights["router"], config.top_k, config.weights_sum_to_one
            )
        state.grouping = group(experts_Tk, config.experts)
        state.x_nD = x_TD.index_select(0, state.grouping.tokens_n)
        state.y_nD = torch.empty_like(state.x_nD)
        counts = state.grouping.counts
        state.starts = list(accumulate(counts, initial=0))
        return {expert: count for expert, count in enumerate(counts) if count}

    def _run_expert(self, task: Task) -> None:
        state = self._states[task.micro_batch]
        self._use_cores_for_expert(state.grouping.counts[task.expert])
        self._apply_expert(state, task.expert, self._weights(task.operands))

    def _use_cores_for_expert(self, tokens: int) -> None:
        self._use_cores_for(tokens, self.config.hidden * self.config.intermediate)

    def _apply_expert(self, state: MicroBatchState, expert: int, weights: Weights) -> None:
        first = state.starts[expert]
        end = first + state.grouping.counts[expert]
        gate, up, down = (weights[f"experts.{expert}.{part}"] for part in ("gate", "up", "down"))
        for start in range(first, end, EXPERT_TILE):
            rows = slice(start, min(start + EXPERT_TILE, end))
            state.y_nD[rows] = kernels.expert_ffn(state.x_nD[rows], gate, up, down)

    def _combine(self, task: Task) -> None:
        use_cores(1)
        state = self._states[task.micro_batch]
        state.hidden_TD = kernels.combine(
            state.y_nD, state.grouping.rows_Tk, state.weights_Tk, self._residual(state)
        )
        del state.x_nD, state.y_nD, state.weights_Tk, state.grouping

    def _sample(self, task: Task) -> list[int] | list[Standing]:
        state = self._states[task.micro_batch]
        return self._draw(state, self._last_logits(state))

    def _last_logits(self, state: MicroBatchState) -> Tensor:
        return self._logits(state.hidden_TD.index_select(0, moved(state.step.last_S, self._accelerator)))

    def _draw(self, state: MicroBatchState, logits_SV: Tensor) -> list[int] | list[Standing]:
        """The next token of each sequence, or how far each request's beam search has come."""
        logits_SV = logits_SV.cpu()
        if self._keep_logits:
            self.logits.append((state.sequences, logits_SV))
        positions = [past + new for past, new in zip(state.step.past, state.step.new, strict=True)]
        rows = len(positions) // len(state.requests)
        requests = [self._first_request + request for request in state.requests for _ in range(rows)]
        if state.searches:
            require_numbers(logits_SV.numpy(), requests, positions)
            return self._advance(state, logits_SV)
        tokens = sample(logits_SV.numpy(), self._sampling, requests, positions)
        state.new = [[token] for token in tokens]
        return tokens

    def _advance(self, state: MicroBatchState, logits_SV: Tensor) -> list[Standing]:
        state.parents, state.new = [], []
        for search, logits in zip(state.searches, logits_SV.chunk(len(state.searches)), strict=True):
            first = len(state.parents) // state.beams * len(logits)
            moves = search.advance(logits.numpy())
            state.parents += [first + parent for parent in moves.parents]
            state.new += [[token] for token in moves.tokens]
        return [search.standing for search in state.searches]

    def _logits(self, last_SD: Tensor) -> Tensor:
        """The logits (S, V), float32, of the last tokens; each block of the LM head on a core of its own."""
        config = self.config
        x_SD = kernels.norm(last_SD, self._globals["final_norm"], config.norm_eps, config.norm)
        if not self._sharing:
            self._use_cores_for(len(x_SD), config.vocabulary // config.ranks * config.hidden)
            return kernels.linear(x_SD, self._head).float()
        parts: dict[int, Tensor] = {}
        self._team.run([partial(_multiply, x_SD, block, parts, n) for n, block in enumerate(self._head)])
        return torch.cat([parts[n] for n in range(len(self._head))], dim=-1).float()


def _multiply(x_TD: Tensor, block: Tensor, into: dict[int, Tensor], number: int) -> None:
    into[number] = kernels.linear(x_TD, [block])
