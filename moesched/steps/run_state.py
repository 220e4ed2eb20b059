"""What all steps of a run share: the engine, the lanes, the micro-batches with their data, the sizes of their work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from operator import add
from typing import Literal, NamedTuple

from moesched.engine import Engine
from moesched.machines import INTERCONNECT
from moesched.machines.networks import NETWORK
from moesched.models.operations import Amount, Operations
from moesched.models.tensor_sizes import ResidentShare
from moesched.requests.batch import KV_BLOCK_TOKENS
from moesched.requests.chunks import Chunk
from moesched.steps.memory import Fixed
from moesched.steps.node_tasks import NodeTasks
from moesched.steps.pipeline_stages import PipelineStage
from moesched.steps.plan import Plan
from moesched.steps.rank_tasks import RankTasks
from moesched.tasks import Block, Lane, PageTransfer, Task, Work, WorkPart

STRIDE = 8
"""How many tags a micro-batch may have within one layer."""
_TO_THE_HOST_AND_BACK = WorkPart("hop", 0, times=2)

GROWING = ("attention", "cpu_attention", "load_kv")
"""Verbs whose work is another one in every step, since the KV cache grows."""

Kind = Literal["prefill", "decode"]


class HostOutput(NamedTuple):
    """What an expert left on the host: the rows of so many tokens."""

    expert: int
    tokens: int
    block: Block


class MicroBatch:
    """One micro-batch's data: its blocks, the tag that says how far it is, and the stage that it is at.

    `works` are what its verbs ask of the stage, those of all stages are in `works_at`. `on_host` is None where its
    routed rows are not on the host, else what experts have left there. `owners` are the nodes that run its experts.

    In prefill it may be a chunk, which goes on from the one `before`, and shares with it the tokens, the KV cache and,
    where that is on the host, a layer's keys and values `at_hand`: `attended_at_hand` is the last layer that it put
    there. `ends` are the requests that it samples tokens for.
    """

    __slots__ = (
        "attended_in_device_kv",
        "attention",
        "attention_host",
        "before",
        "chunk",
        "device_kv",
        "ends",
        "expert_outputs",
        "hidden",
        "index",
        "kv",
        "kv_on_accelerator",
        "last",
        "normed",
        "normed_host",
        "on_host",
        "owners",
        "pending",
        "positions",
        "qkv",
        "qkv_host",
        "requests",
        "room",
        "routed",
        "stage",
        "staged",
        "tag",
        "tokens",
        "unsaved",
        "works",
        "works_at",
    )

    def __init__(
        self,
        index: int,
        requests: tuple[int, ...],
        layers: int,
        *,
        unified: bool,
        kv_on_accelerator: bool,
    ) -> None:
        self.index = index
        self.requests = self.ends = requests
        self.chunk: Chunk | None = None
        self.before: MicroBatch | None = None
        self.device_kv = Block(f"keys and values at hand mb{index}")
        self.attended_in_device_kv = -1
        self.tokens = Block(f"tokens mb{index}")
        self.positions = Block(f"positions mb{index}")
        self.hidden = Block(f"hidden mb{index}")
        self.qkv = Block(f"qkv mb{index}")
        self.qkv_host = self.qkv if unified else Block(f"qkv on the host mb{index}")
        self.attention = Block(f"attention mb{index}")
        self.attention_host = self.attention if unified else Block(f"attention on the host mb{index}")
        self.normed = Block(f"normed mb{index}")
        self.normed_host = self.normed if unified else Block(f"normed on the host mb{index}")
        self.kv = [Block(f"KV L{layer} mb{index}") for layer in range(layers)]
        self.kv_on_accelerator = kv_on_accelerator
        self.room: Block | None = None
        self.tag = -1
        self.unsaved = -1
        self.staged: dict[int, int] = {}
        self.last: Task | None = None
        self.routed: Task | None = None
        self.pending: set[int] | None = None
        self.owners: Mapping[int, int] | None = None
        self.expert_outputs: list[Block] = []
        self.on_host: list[HostOutput] | None = None
        self.stage: PipelineStage
        self.works: dict[str, Work] = {}
        self.works_at: list[dict[str, Work]] = []

    def become(self, chunk: Chunk, whole: MicroBatch, before: MicroBatch | None) -> None:
        """Be a chunk of another one, which goes on from the chunk before."""
        self.chunk, self.ends, self.before = chunk, chunk.ends, before
        self.tokens, self.positions, self.kv, self.device_kv = (
            whole.tokens,
            whole.positions,
            whole.kv,
            whole.device_kv,
        )

    def enter(self, stage: PipelineStage) -> None:
        """From here on its verbs run at that stage."""
        self.stage = stage
        self.works = self.works_at[stage.number]


class RunState:
    """What all steps of a run share: the engine, the lanes, the micro-batches, the views of the weights.

    Args:
        steps: how many are scheduled; by default one for each token that is to be generated.
        age: so many tokens count as generated before the first decode step, to look into the middle of a long run.
    """

    def __init__(
        self, plan: Plan, engine: Engine, lanes: dict[str, Lane], *, steps: int | None = None, age: int = 0
    ) -> None:
        plan.check()
        self.steps = plan.batch.new_tokens if steps is None else steps
        self._age = age
        self.plan = plan
        self.operations = Operations(plan.layout.config, plan.layout.dtype, _resident(plan))
        self.engine = engine
        self.lanes = lanes
        self.unified = plan.machine.unified
        self.stages = [PipelineStage(plan, number, lanes) for number in range(len(plan.stages))]
        self.stage_of = [self.stages[plan.stage_of(layer)] for layer in plan.layers]
        self.micro_batches = [
            MicroBatch(
                index,
                requests,
                len(plan.layers),
                unified=self.unified,
                kv_on_accelerator=plan.kv_roles[index] == "accelerator",
            )
            for index, requests in enumerate(plan.batch.micro_batches)
        ]
        self.prefill_batches = self._chunks() if plan.chunked else self.micro_batches
        """The micro-batches of prefill: other ones than those of decoding where prompts are cut into chunks."""
        for batch, chunk in zip(self.prefill_batches, plan.chunks.values(), strict=True):
            batch.chunk = chunk
        slots = plan.kv_slots * len(self.stages)
        self.kv_slots = [Block(f"keys and values [{number}]") for number in range(slots)]
        self.limited = plan.in_flight is not None and plan.in_flight < len(self.prefill_batches)
        """Whether micro-batches of prefill share rooms for what they have within a layer."""
        self.rooms = deque(Block(f"room {number}") for number in range(plan.in_flight or 0))
        self.stride = (len(plan.layers) + 1) * STRIDE
        self._sized_for: Kind | None = None
        self._works: dict[tuple[str, str, int], Work] = {}
        self._moves: dict[tuple[str, str, int, int], tuple[Lane, Work]] = {}
        self.submit = self._submitter()

    def _chunks(self) -> list[MicroBatch]:
        plan = self.plan
        made: dict[int, MicroBatch] = {}
        for number, chunk in plan.chunks.items():
            whole = self.micro_batches[chunk.micro_batch]
            batch = made[number] = MicroBatch(
                number,
                chunk.requests,
                len(plan.layers),
                unified=self.unified,
                kv_on_accelerator=whole.kv_on_accelerator,
            )
            batch.become(chunk, whole, made.get(chunk.before))
        return list(made.values())

    def batches(self, index: int) -> list[MicroBatch]:
        """The micro-batches of a step."""
        return self.micro_batches if index else self.prefill_batches

    def numbered(self, number: int) -> MicroBatch:
        """The micro-batch that a task names, of whichever kind of step."""
        count = len(self.micro_batches)
        return self.micro_batches[number] if number < count else self.prefill_batches[number - count]

    def end_prefill(self) -> None:
        """All prompts are through: micro-batches of decoding go on from there."""
        for batch in self.micro_batches:
            batch.tag = self.stride - 1

    def work(self, kind: str, resource: str, tokens: int, amount: Callable[[int], Amount]) -> Work:
        """The work of one kind of operation on `tokens` rows; the same object for the same rows."""
        work = self._works.get((kind, resource, tokens))
        if work is None:
            flops, nbytes, parts = amount(tokens)
            work = self._works[kind, resource, tokens] = Work(kind, resource, flops, nbytes, tokens, parts)
        return work

    def move(self, source: str, destination: str, nbytes: int, pieces: int = 1) -> tuple[Lane, Work]:
        """The lane and the work of moving bytes between two memories, in so many pieces of the same size."""
        known = self._moves.get((source, destination, nbytes, pieces))
        if known is None:
            lane = self.lanes[self.plan.machine.link(source, destination).lane]
            link = f"{source}->{destination}"
            parts = (WorkPart(link, nbytes / pieces, pieces),)
            known = lane, Work(link, link, nbytes=nbytes, parts=parts)
            self._moves[source, destination, nbytes, pieces] = known
        return known

    def size(self, index: int) -> None:
        """Set the micro-batches' works for a step: the same objects as in the step before, but for attention's."""
        kind: Kind = "decode" if index else "prefill"
        for batch in self.batches(index):
            if kind != self._sized_for:
                _size_works(self, batch, kind)
            _size_attention(self, batch, index + self._age if index else 0)
            batch.enter(self.stages[0])
        self._sized_for = kind

    def pass_on(self, batch: MicroBatch, layer: int, step: int) -> list[PageTransfer]:
        """Have a micro-batch enter the next stage, which begins with `layer`.

        Returns:
            what takes its hidden state there, to be submitted in this order.
        """
        stage = batch.stage
        nbytes = batch.works["embed"].tokens * self.operations.hidden_bytes
        hops = []
        for source, destination in stage.onward:
            lane, work = self.move(source, destination, nbytes)
            ends = (source, destination)
            hops.append(PageTransfer(lane, work, "pass_hidden", layer, batch.index, -1, ends, step))
        batch.enter(self.stages[stage.number + 1])
        return hops

    def _submitter(self) -> Callable[..., Task]:
        """What submits a verb: the engine itself, unless verbs are several tasks."""
        plan, engine, operations = self.plan, self.engine, self.operations
        count = len(self.micro_batches) + len(self.prefill_batches)
        if plan.ranks > 1:
            return RankTasks(engine, self.lanes[INTERCONNECT], operations, self.work, count).submit
        if plan.nodes > 1:
            return NodeTasks(engine, self.lanes[NETWORK], plan, operations, self.work, count).submit
        return engine.submit

    def skip(self, steps: int) -> None:
        """Go on as if that many more steps had been scheduled, each like the one before."""
        for batch in self.micro_batches:
            batch.tag += steps * self.stride

    def close(self) -> None:
        """Let go of the run's tasks and of what the device made of the slots' bytes.

        Tasks and slots refer to each other, and tasks are invisible to the garbage collector.
        """
        plan = self.plan
        for pool in (*plan.pools, *plan.resident):
            for slot in pool.slots:
                slot.forget()
        for stage in self.stages:
            for views in stage.views:
                views.open.clear()

    def load(self, resident: Fixed) -> list[PageTransfer]:
        """Submit the transfers that fill kept pages from where the weights come from."""
        source = self.plan.machine.roles.weights
        tasks = []
        for page, slot in zip(resident.pages(), resident.slots, strict=True):
            lane, work = self.move(source, resident.memory.name, page.nbytes)
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

    def fill(self) -> list[PageTransfer]:
        """Submit the transfers that bring pages to pools where they are to be before the first step."""
        source = self.plan.machine.roles.weights
        tasks = []
        for pool, pages in self.plan.filled:
            for page in pages:
                slot = pool.assign(page, self.engine)
                lane, work = self.move(source, pool.memory.name, page.nbytes)
                task = PageTransfer(
                    lane, work, "fetch", page.layer, -1, page.expert, pages=(page,), slots=(slot,)
                )
                tasks.append(self.engine.submit(task, (), (slot,)))
        return tasks


def _resident(plan: Plan) -> ResidentShare:
    """How much of the weights stays in the accelerators' memories."""
    resident = {True: 0, False: 0}
    fast = plan.accelerators
    for fixed in plan.resident:
        if fixed.memory in fast:
            for page in fixed.pages():
                resident[page.expert < 0] += page.nbytes
    dense = sum(page.nbytes for page in plan.layout.dense(0)) * len(plan.layers)
    experts = sum(page.nbytes for page in plan.layout.layer(0)) * len(plan.layers) - dense
    return ResidentShare(resident[True] / dense, resident[False] / experts)


def _size_works(run_state: RunState, batch: MicroBatch, kind: Kind) -> None:
    """Set a micro-batch's works that are the same in all steps of a kind."""
    plan = run_state.plan
    operations = run_state.operations
    sequences = tokens = plan.batch.sequences(batch.requests)
    if kind == "prefill":
        assert batch.chunk is not None
        sequences, tokens = len(batch.ends), sum(batch.chunk.tokens)
    batch.works_at = []
    for stage in run_state.stages:
        accelerator = stage.processors["accelerator"]
        works: dict[str, Work] = {}
        if sequences:
            works["sample"] = run_state.work("sample", accelerator, sequences, operations.sample)
        for verb in ("embed", "pre_attention", "post_attention", "route", "preview_route", "combine"):
            works[verb] = run_state.work(verb, accelerator, tokens, getattr(operations, verb))
        if plan.batch.beams > 1:
            cached_at = accelerator if batch.kv_on_accelerator else stage.processors["host"]
            tokens_of_half_blocks = (
                sequences * KV_BLOCK_TOKENS // 2
            )  # what beams do not share with their parents
            works["reorder"] = run_state.work("reorder", cached_at, tokens_of_half_blocks, operations.copy_kv)
        if not run_state.unified:
            fast, slow = stage.memory, plan.memory("host").name
            works["offload_qkv"] = run_state.move(fast, slow, tokens * operations.qkv_bytes)[1]
            works["offload_kv"] = run_state.move(fast, slow, tokens * operations.kv_bytes)[1]
            works["offload_routed"] = run_state.move(fast, slow, tokens * operations.hidden_bytes)[1]
            works["load_hidden"] = run_state.move(slow, fast, tokens * operations.attention_bytes)[1]
        batch.works_at.append(works)


def _size_attention(run_state: RunState, batch: MicroBatch, index: int) -> None:
    """Set a micro-batch's works that grow from step to step."""
    prompts = run_state.plan.batch.prompts
    beams = run_state.plan.batch.beams
    if index:
        lengths = [prompts[request] + index for request in batch.requests for _ in range(beams)]
        tokens = len(lengths)
        amount = run_state.operations.attention_step(lengths)
    else:
        assert batch.chunk is not None
        new = batch.chunk.tokens
        lengths = list(map(add, batch.chunk.starts, new))
        tokens = sum(new)
        amount = run_state.operations.attention(list(zip(new, lengths, strict=True)))
    flops, nbytes, parts = amount
    there_and_back = (*parts, _TO_THE_HOST_AND_BACK)
    host = run_state.plan.machine.roles.host
    on_host = Work("cpu_attention", host, flops, nbytes, tokens, there_and_back)
    for stage, works in zip(run_state.stages, batch.works_at, strict=True):
        accelerator = stage.processors["accelerator"]
        works["attention"] = Work("attention", accelerator, flops, nbytes, tokens, parts)
        works["cpu_attention"] = on_host
        if index and run_state.kv_slots and not (run_state.unified or batch.kv_on_accelerator):
            cached = (sum(lengths) - tokens) * run_state.operations.kv_bytes
            works["load_kv"] = run_state.move(run_state.plan.memory("host").name, stage.memory, cached)[1]
