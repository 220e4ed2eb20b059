"""The verbs: what a policy says while it schedules one prefill or decode step.

Each verb submits one task and returns its handle. A verb checks that its input is there and leaves its output's
value tag, so a schedule that drops, repeats or swaps a verb is refused at the policy's own line, on a virtual clock
exactly as on hardware. Order, place and look-ahead belong to the policy; nothing here chooses them.

A micro-batch passes these stages in every layer, and its tag says which it has reached:

    INPUT --pre_attention--> QKV --attention----------------------------------------------> ATTENDED
                              `--offload_qkv--> QKV_HOST --cpu_attention--> ATTENDED_HOST --load_hidden--> ATTENDED
    ATTENDED --post_attention--> INPUT of the next layer
    ATTENDED --route--> ROUTED --run_expert for each expert, then combine--> INPUT of the next layer

On a machine whose accelerator and host share a memory, `offload_qkv`, `load_hidden` and `offload_kv` have
nothing to move: they check and set tags, and return the task that made the data.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, TypeVar

from moesched.engine import Engine
from moesched.errors import NotResident, OutOfOrder, OverBudget, PolicyError
from moesched.memory import Fixed, Pool, View, Views, describe
from moesched.models.layout import Page
from moesched.models.operations import Amount, Kept, Operations
from moesched.plan import Plan
from moesched.tasks import (
    DEMAND,
    DONE,
    PREFETCH,
    Block,
    Decision,
    HostKernel,
    Kernel,
    Lane,
    PageTransfer,
    Part,
    Task,
    Work,
)

INPUT, QKV, QKV_HOST, ATTENDED_HOST, ATTENDED, ROUTED = range(6)
STAGES = ("input", "qkv", "qkv on the host", "attended on the host", "attended", "routed")
_STRIDE = 8
_TO_THE_HOST_AND_BACK = Part("hop", 0, times=2)

Kind = Literal["prefill", "decode"]
At = Literal["accelerator", "host"]
K = TypeVar("K", bound=Hashable)


class MicroBatch:
    """One micro-batch's data: its blocks, and the tag that says how far it is."""

    __slots__ = (
        "attention",
        "attention_host",
        "expert_outputs",
        "hidden",
        "index",
        "kv",
        "last",
        "load_hidden",
        "normed",
        "offload_kv",
        "offload_qkv",
        "pending",
        "positions",
        "qkv",
        "qkv_host",
        "requests",
        "routed",
        "tag",
        "tokens",
        "unsaved",
        "works",
    )

    def __init__(self, index: int, requests: tuple[int, ...], layers: int, *, unified: bool) -> None:
        self.index = index
        self.requests = requests
        self.tokens = Block(f"tokens mb{index}")
        self.positions = Block(f"positions mb{index}")
        self.hidden = Block(f"hidden mb{index}")
        self.qkv = Block(f"qkv mb{index}")
        self.qkv_host = self.qkv if unified else Block(f"qkv on the host mb{index}")
        self.attention = Block(f"attention mb{index}")
        self.attention_host = self.attention if unified else Block(f"attention on the host mb{index}")
        self.normed = Block(f"normed mb{index}")
        self.kv = [Block(f"KV L{layer} mb{index}") for layer in range(layers)]
        self.tag = -1
        self.unsaved = -1
        self.last: Task | None = None
        self.routed: Task | None = None
        self.pending: set[int] | None = None
        self.expert_outputs: list[Block] = []
        self.works: dict[str, Work] = {}
        self.offload_qkv: tuple[Lane, Work]
        self.offload_kv: tuple[Lane, Work]
        self.load_hidden: tuple[Lane, Work]


class Schedule:
    """What all steps of a run share: the engine, the lanes, the micro-batches, the views of the weights."""

    def __init__(self, plan: Plan, engine: Engine, lanes: dict[str, Lane]) -> None:
        plan.check()
        self.plan = plan
        self.operations = Operations(plan.layout.config, plan.layout.dtype, _kept(plan))
        self.engine = engine
        self.lanes = lanes
        roles = plan.machine.roles
        self.processors = {"accelerator": roles.accelerator, "host": roles.host}
        self.unified = plan.machine.unified
        self.kv_on_accelerator = plan.kv_role == "accelerator"
        layout, fast, host = plan.layout, plan.memory("accelerator"), plan.memory("host")
        self.dense = Views(fast, layout.dense)
        self.whole = Views(fast, layout.layer)
        self.expert: dict[str, Views[tuple[int, int]]] = {
            "accelerator": Views(fast, lambda key: layout.expert(*key)),
            "host": Views(host, lambda key: layout.expert(*key)),
        }
        self.micro_batches = [
            MicroBatch(index, requests, len(plan.layers), unified=self.unified)
            for index, requests in enumerate(plan.batch.micro_batches)
        ]
        self.stride = (len(plan.layers) + 1) * _STRIDE
        self._sized_for: Kind | None = None
        self._works: dict[tuple[str, int], Work] = {}
        self._moves: dict[tuple[str, str, int, int], tuple[Lane, Work]] = {}

    def work(self, kind: str, resource: str, tokens: int, amount: Callable[[int], Amount]) -> Work:
        """The work of one kind of operation on `tokens` rows; the same object for the same rows."""
        work = self._works.get((kind, tokens))
        if work is None:
            flops, nbytes, parts = amount(tokens)
            work = self._works[kind, tokens] = Work(kind, resource, flops, nbytes, tokens, parts)
        return work

    def move(self, source: str, destination: str, nbytes: int, pieces: int = 1) -> tuple[Lane, Work]:
        """The lane and the work of moving bytes between two memories, in so many pieces of the same size."""
        known = self._moves.get((source, destination, nbytes, pieces))
        if known is None:
            lane = self.lanes[self.plan.machine.link(source, destination).lane]
            link = f"{source}->{destination}"
            parts = (Part(link, nbytes / pieces, times=pieces),)
            known = lane, Work(link, link, nbytes=nbytes, parts=parts)
            self._moves[source, destination, nbytes, pieces] = known
        return known

    def size(self, index: int) -> None:
        """Set the micro-batches' works for a step: the same objects as in the step before, but for attention's."""
        kind: Kind = "decode" if index else "prefill"
        for batch in self.micro_batches:
            if kind != self._sized_for:
                _size_works(self, batch, kind)
            _size_attention(self, batch, index)
        self._sized_for = kind

    def skip(self, steps: int) -> None:
        """Go on as if that many more steps had been scheduled, each like the one before."""
        for batch in self.micro_batches:
            batch.tag += steps * self.stride

    def close(self) -> None:
        """Let go of the run's tasks and of what the device made of the slots' bytes.

        Tasks and slots refer to each other, and tasks are invisible to the garbage collector.
        """
        plan = self.plan
        for pool in (*plan.pools, *plan.kept):
            for slot in pool.slots:
                slot.forget()
        self.dense.open.clear()
        self.whole.open.clear()
        for experts in self.expert.values():
            experts.open.clear()

    def load(self, kept: Fixed) -> list[PageTransfer]:
        """Submit the transfers that fill kept pages from where the weights come from."""
        source = self.plan.machine.roles.weights
        tasks = []
        for page, slot in zip(kept.pages(), kept.slots, strict=True):
            lane, work = self.move(source, kept.memory.name, page.nbytes)
            task = PageTransfer(
                lane,
                work,
                "load",
                page.layer,
                -1,
                page.expert,
                pages=(page,),
                slots=(slot,),
            )
            tasks.append(self.engine.submit(task, (), (slot,)))
        return tasks


class Step:
    """One prefill or decode step, as a policy sees it.

    Attributes:
        kind: "prefill" or "decode".
        index: 0 for prefill, then 1, 2, ... for the decode steps.
        layers: the model's layers.
        micro_batches: the micro-batches.
        last: whether no step follows, so that nothing need be fetched for one.
    """

    def __init__(self, schedule: Schedule, index: int, *, last: bool = False) -> None:
        self._schedule = schedule
        self._engine = schedule.engine
        self._submit = schedule.engine.submit
        self._batches = schedule.micro_batches
        self._base = index * schedule.stride
        self._accelerator = schedule.lanes["accelerator"]
        self._host = schedule.lanes["host"]
        self._dense = schedule.dense.open
        self._whole = schedule.whole.open
        self._weights = schedule.plan.machine.roles.weights
        self.kind: Kind = "decode" if index else "prefill"
        self.index = index
        self.last = last
        self.layers = schedule.plan.layers
        self.micro_batches = schedule.plan.micro_batches
        schedule.size(index)

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
        self, pages: Sequence[Page], pool: Pool, *, source: Pool | None = None, urgent: bool = False
    ) -> Task:
        """Move pages into slots of `pool` in one transfer, from `source` or from where the weights live.

        Raises:
            PolicyError: a page is in that memory already, or there are no pages to move.
            NotResident: `source` does not hold a page.
        """
        origin = self._weights
        reads: list[Block] = []
        if source is not None:
            origin = source.memory.name
            table = source.memory.table
            for page in pages:
                held = table.get(page.id)
                if held is None or held.pool is not source:
                    raise NotResident(
                        f"fetch: page {describe(page)} is not in pool {source.name}: pin it there first"
                    )
                reads.append(held)
        lane, work, slots = self._place("fetch", pages, origin, pool)
        first = pages[0]
        task = PageTransfer(
            lane,
            work,
            "fetch",
            first.layer,
            -1,
            first.expert,
            tuple(reads),
            self.index,
            pages=tuple(pages),
            slots=slots,
        )
        return self._submit(task, reads, slots, (), DEMAND if urgent else PREFETCH)

    def pin(self, pages: Sequence[Page], pool: Pool) -> Task:
        """Move pages from where the weights live into pinned memory, the first hop to the accelerator."""
        lane, work, slots = self._place("pin", pages, self._weights, pool)
        first = pages[0]
        task = PageTransfer(
            lane,
            work,
            "pin",
            first.layer,
            -1,
            first.expert,
            None,
            self.index,
            pages=tuple(pages),
            slots=slots,
        )
        return self._submit(task, (), slots, (), PREFETCH)

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
        if batch.tag != self._base - 1:
            raise self._out_of_order("embed", 0, batch, self._base - 1)
        batch.tag = self._base
        batch.last = task = Kernel(
            self._accelerator, batch.works["embed"], "embed", -1, micro_batch, -1, None, self.index
        )
        return self._submit(task, (batch.tokens,), (batch.hidden, batch.positions))

    def pre_attention(self, layer: int, micro_batch: int) -> Task:
        """Norm, QKV projection and rotary embedding, on the accelerator."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * _STRIDE
        if batch.tag != tag or batch.unsaved >= 0:
            raise self._out_of_order("pre_attention", layer, batch, tag)
        view = self._dense.get(layer) or self._view(self._schedule.dense, layer)
        batch.tag = tag + QKV
        batch.last = task = Kernel(
            self._accelerator,
            batch.works["pre_attention"],
            "pre_attention",
            layer,
            micro_batch,
            -1,
            view,
            self.index,
        )
        return self._submit(task, (batch.hidden, *view.reads), (batch.qkv,))

    def attention(self, layer: int, micro_batch: int) -> Task:
        """Attention on the accelerator.

        In a decode step the KV cache must live there. In prefill the prompt's keys and values are at hand; where the
        cache lives on the host, `offload_kv` must follow.
        """
        schedule = self._schedule
        batch = self._batches[micro_batch]
        tag = self._base + layer * _STRIDE + QKV
        if batch.tag != tag:
            raise self._out_of_order("attention", layer, batch, tag)
        if not schedule.kv_on_accelerator:
            if self.index:
                raise PolicyError("attention: the KV cache lives on the host: use cpu_attention in decode")
            batch.unsaved = layer
        batch.tag = tag - QKV + ATTENDED
        cache = batch.kv[layer]
        batch.last = task = Kernel(
            self._accelerator, batch.works["attention"], "attention", layer, micro_batch, -1, None, self.index
        )
        return self._submit(task, (batch.qkv, cache), (batch.attention, cache))

    def offload_qkv(self, layer: int, micro_batch: int) -> Task:
        """Move queries, keys and values to the host (D1 of MoE-Lightning)."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * _STRIDE + QKV
        if batch.tag != tag:
            raise self._out_of_order("offload_qkv", layer, batch, tag)
        batch.tag = tag - QKV + QKV_HOST
        if self._schedule.unified:
            return batch.last  # type: ignore[return-value]  # a tag past INPUT means that a task was submitted
        lane, work = batch.offload_qkv
        batch.last = task = PageTransfer(lane, work, "offload_qkv", layer, micro_batch, -1, None, self.index)
        return self._submit(task, (batch.qkv,), (batch.qkv_host,))

    def cpu_attention(self, layer: int, micro_batch: int) -> Task:
        """Attention on the host, over the KV cache in host memory."""
        schedule = self._schedule
        batch = self._batches[micro_batch]
        tag = self._base + layer * _STRIDE + QKV_HOST
        if batch.tag != tag:
            raise self._out_of_order("cpu_attention", layer, batch, tag)
        if schedule.kv_on_accelerator and not schedule.unified:
            raise PolicyError("cpu_attention: the KV cache lives on the accelerator: use attention")
        batch.tag = tag - QKV_HOST + ATTENDED_HOST
        cache = batch.kv[layer]
        batch.last = task = HostKernel(
            self._host,
            batch.works["cpu_attention"],
            "cpu_attention",
            layer,
            micro_batch,
            -1,
            None,
            self.index,
        )
        return self._submit(task, (batch.qkv_host, cache), (batch.attention_host, cache))

    def load_hidden(self, layer: int, micro_batch: int) -> Task:
        """Move the host's attention output to the accelerator (D2 of MoE-Lightning)."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * _STRIDE + ATTENDED_HOST
        if batch.tag != tag:
            raise self._out_of_order("load_hidden", layer, batch, tag)
        batch.tag = tag - ATTENDED_HOST + ATTENDED
        if self._schedule.unified:
            return batch.last  # type: ignore[return-value]  # a tag past INPUT means that a task was submitted
        lane, work = batch.load_hidden
        batch.last = task = PageTransfer(lane, work, "load_hidden", layer, micro_batch, -1, None, self.index)
        return self._submit(task, (batch.attention_host,), (batch.attention,))

    def offload_kv(self, layer: int, micro_batch: int) -> Task:
        """Move a prompt's keys and values to the cache on the host, after `attention` in prefill."""
        batch = self._batches[micro_batch]
        if batch.unsaved != layer:
            raise OutOfOrder(f"offload_kv: L{layer} mb{micro_batch} has no keys and values to save")
        batch.unsaved = -1
        if self._schedule.unified:
            return batch.last  # type: ignore[return-value]  # a layer to save means that a task was submitted
        lane, work = batch.offload_kv
        task = PageTransfer(lane, work, "offload_kv", layer, micro_batch, -1, None, self.index)
        # All else that uses the positions lies between this step's `embed` and the next one's; this alone may be late.
        reads = (batch.qkv, batch.kv[layer], batch.positions)
        return self._submit(task, reads, (batch.kv[layer],))

    def post_attention(self, layer: int, micro_batch: int) -> Task:
        """Output projection, router, all experts and combine as one kernel over the whole layer's pages."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * _STRIDE + ATTENDED
        if batch.tag != tag:
            raise self._out_of_order("post_attention", layer, batch, tag)
        view = self._whole.get(layer) or self._view(self._schedule.whole, layer)
        batch.tag = tag - ATTENDED + _STRIDE
        batch.last = task = Kernel(
            self._accelerator,
            batch.works["post_attention"],
            "post_attention",
            layer,
            micro_batch,
            -1,
            view,
            self.index,
        )
        return self._submit(task, (batch.attention, batch.hidden, *view.reads), (batch.hidden,))

    def route(self, layer: int, micro_batch: int) -> Task:
        """Output projection, norm and router; await it for {expert: tokens}, every one of which must then run."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * _STRIDE + ATTENDED
        if batch.tag != tag:
            raise self._out_of_order("route", layer, batch, tag)
        view = self._dense.get(layer) or self._view(self._schedule.dense, layer)
        batch.tag = tag - ATTENDED + ROUTED
        batch.pending = None
        batch.last = batch.routed = task = Decision(
            self._accelerator, batch.works["route"], "route", layer, micro_batch, -1, view, self.index
        )
        reads = (batch.attention, batch.hidden, *view.reads)
        return self._submit(task, reads, (batch.hidden, batch.normed))

    def run_expert(self, layer: int, expert: int, micro_batch: int, *, at: At = "accelerator") -> Task:
        """One expert on those tokens of the micro-batch that were routed to it."""
        schedule = self._schedule
        batch = self._batches[micro_batch]
        tag = self._base + layer * _STRIDE + ROUTED
        routed = batch.routed
        if batch.tag != tag or routed is None:
            raise self._out_of_order("run_expert", layer, batch, tag)
        if batch.pending is None:
            if routed.state != DONE:
                raise OutOfOrder(f"run_expert: await route({layer}, {micro_batch}) before its experts")
            batch.pending = set(routed.value)
        if expert not in batch.pending:
            raise OutOfOrder(
                f"run_expert: L{layer} mb{micro_batch} has no tokens for E{expert}, or it has run already"
            )
        views = schedule.expert[at]
        view = views.open.get((layer, expert)) or self._view(views, (layer, expert))
        view.touch()
        batch.pending.discard(expert)
        output = Block(f"output E{expert} mb{micro_batch}")
        batch.expert_outputs.append(output)
        tokens = routed.value[expert]
        operations = schedule.operations
        kind, amount = f"expert at {at}", operations.fetched_expert
        if view.slots[0].fixed:
            kind, amount = f"kept expert at {at}", operations.kept_expert
        work = schedule.work(kind, schedule.processors[at], tokens, amount)
        lane, kernel = (self._accelerator, Kernel) if at == "accelerator" else (self._host, HostKernel)
        task = kernel(lane, work, "run_expert", layer, micro_batch, expert, view, self.index)
        return self._submit(task, (batch.normed, *view.reads), (output,))

    def combine(self, layer: int, micro_batch: int) -> Task:
        """The weighted sum of the experts' outputs, in ascending order of expert, and the residual."""
        batch = self._batches[micro_batch]
        tag = self._base + layer * _STRIDE + ROUTED
        if batch.tag != tag or batch.pending is None:
            raise self._out_of_order("combine", layer, batch, tag)
        if batch.pending:
            missing = ", ".join(f"E{expert}" for expert in sorted(batch.pending))
            raise OutOfOrder(f"combine: L{layer} mb{micro_batch} was routed to {missing}, which did not run")
        batch.tag = tag - ROUTED + _STRIDE
        batch.pending = batch.routed = None
        outputs, batch.expert_outputs = batch.expert_outputs, []
        batch.last = task = Kernel(
            self._accelerator, batch.works["combine"], "combine", layer, micro_batch, -1, None, self.index
        )
        return self._submit(task, (batch.normed, batch.hidden, *outputs), (batch.hidden,))

    def sample(self, micro_batch: int) -> Task:
        """LM head and the choice of each sequence's next token; the value is the list of tokens."""
        batch = self._batches[micro_batch]
        tag = self._base + len(self.layers) * _STRIDE
        if batch.tag != tag or batch.unsaved >= 0:
            raise self._out_of_order("sample", len(self.layers), batch, tag)
        batch.tag = self._base + self._schedule.stride - 1
        batch.last = task = Decision(
            self._accelerator, batch.works["sample"], "sample", -1, micro_batch, -1, None, self.index
        )
        return self._submit(task, (batch.hidden,), (batch.tokens,))

    def close(self) -> list[Task]:
        """End the step; returns each micro-batch's `sample`, whose values are its tokens.

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
            samples.append(batch.last)
        return samples

    # -- helpers -----------------------------------------------------------------------------------

    def _place(
        self, verb: str, pages: Sequence[Page], origin: str, pool: Pool
    ) -> tuple[Lane, Work, tuple[Block, ...]]:
        if not pages:
            raise PolicyError(f"{verb}: no pages to move into pool {pool.name}: skip the call")
        if len(pages) > len(pool.slots):
            raise OverBudget(
                f"{verb}: {len(pages)} pages do not fit pool {pool.name} of {len(pool.slots)} slots"
            )
        slots = pool.place_all(pages, self._engine)
        nbytes = 0
        for page in pages:
            nbytes += page.nbytes
        lane, work = self._schedule.move(origin, pool.memory.name, nbytes, len(slots))
        return lane, work, slots

    def _view(self, views: Views[K], key: K) -> View[K]:
        return views.show(key, self._engine)

    def _where(self, batch: MicroBatch) -> str:
        step, rest = divmod(batch.tag + 1, self._schedule.stride)
        if not rest:
            return f"the end of step {step - 1}" if step else "the start"
        layer, stage = divmod(rest - 1, _STRIDE)
        unsaved = ", its keys and values not saved: offload_kv them" if batch.unsaved >= 0 else ""
        return f"step {step} L{layer} {STAGES[stage]}{unsaved}"

    def _out_of_order(self, verb: str, layer: int, batch: MicroBatch, needed: int) -> OutOfOrder:
        needs = (
            "the end of the step before"
            if verb == "embed"
            else f"step {self.index} L{layer} {STAGES[needed % _STRIDE]}"
        )
        where = self._where(batch)
        return OutOfOrder(
            f"{verb}(L{layer}, mb{batch.index}) needs mb{batch.index} at {needs}, but it is at {where}"
        )


def _kept(plan: Plan) -> Kept:
    """How much of the weights stays in the accelerator's memory."""
    kept = {True: 0, False: 0}
    for fixed in plan.kept:
        if fixed.memory is plan.memory("accelerator"):
            for page in fixed.pages():
                kept[page.expert < 0] += page.nbytes
    dense = sum(page.nbytes for page in plan.layout.dense(0)) * len(plan.layers)
    experts = sum(page.nbytes for page in plan.layout.layer(0)) * len(plan.layers) - dense
    return Kept(kept[True] / dense, kept[False] / experts)


def _size_works(schedule: Schedule, batch: MicroBatch, kind: Kind) -> None:
    """Set a micro-batch's works that are the same in all steps of a kind."""
    plan = schedule.plan
    operations = schedule.operations
    accelerator = schedule.processors["accelerator"]
    sequences = len(batch.requests)
    tokens = sequences
    if kind == "prefill":
        tokens = sum(plan.batch.prompts[request] for request in batch.requests)
    batch.works = {"sample": schedule.work("sample", accelerator, sequences, operations.sample)}
    for verb in ("embed", "pre_attention", "post_attention", "route", "combine"):
        batch.works[verb] = schedule.work(verb, accelerator, tokens, getattr(operations, verb))
    if not schedule.unified:
        fast, slow = plan.memory("accelerator").name, plan.memory("host").name
        batch.offload_qkv = schedule.move(fast, slow, tokens * operations.qkv_bytes)
        batch.offload_kv = schedule.move(fast, slow, tokens * operations.kv_bytes)
        batch.load_hidden = schedule.move(slow, fast, tokens * operations.attention_bytes)


def _size_attention(schedule: Schedule, batch: MicroBatch, index: int) -> None:
    """Set a micro-batch's works that grow from step to step."""
    prompts = schedule.plan.batch.prompts
    lengths = [prompts[request] + index for request in batch.requests]
    tokens = len(lengths) if index else sum(lengths)
    if index:
        amount = schedule.operations.attention_step(lengths)
    else:
        amount = schedule.operations.attention([(length, length) for length in lengths])
    flops, nbytes, parts = amount
    accelerator, host = schedule.processors["accelerator"], schedule.processors["host"]
    there_and_back = (*parts, _TO_THE_HOST_AND_BACK)
    batch.works["attention"] = Work("attention", accelerator, flops, nbytes, tokens, parts)
    batch.works["cpu_attention"] = Work("cpu_attention", host, flops, nbytes, tokens, there_and_back)
