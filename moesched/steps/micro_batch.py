"""State of a micro-batch for the verbs of a step: progress, blocks of data, KV cache, experts of the present layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from moesched.requests.chunks import Chunk
from moesched.requests.rows import Rows
from moesched.steps.pipeline_stages import PipelineStage
from moesched.steps.verbs.table import START, VERBS, Verb
from moesched.tasks import Block, Lane, Phase, Task, phase_after
from moesched.work import Work

BoundVerb: TypeAlias = "tuple[Lane | None, Work | None, tuple[Block, ...], tuple[Block, ...]]"
"""A verb's lane, its `Work` (FLOPs and bytes), and the blocks of data that its task reads and writes."""

_NAMES = [verb.name for verb in VERBS]


class HostOutput(NamedTuple):
    """The output of an expert that ran on the host.

    Attributes:
        expert: the expert's number in the layer.
        rows: the rows that the output is for: a range of the rows that the micro-batch has for the expert.
        block: the block of data that holds the output.
    """

    expert: int
    rows: range
    block: Block


class Blocks:
    """The blocks of one micro-batch in a step: named pieces of data, through which its tasks depend on each other.

    On a machine with one memory the blocks on the host are the same objects as the ones on the accelerator. A chunk of
    prompts shares the blocks for tokens and positions with the other chunks of its micro-batch.

    Args:
        index: the micro-batch's number, for the blocks' names.
        unified: whether accelerator and host share a memory.
        whole: for a chunk, the blocks of the micro-batch that it is a part of; else None.

    Attributes:
        reads, writes: by a verb's number, the blocks that its task reads and writes.
    """

    def __init__(self, index: int, *, unified: bool, whole: Blocks | None = None) -> None:
        self.tokens: Block = Block(f"tokens mb{index}") if whole is None else whole.tokens
        self.positions: Block = Block(f"positions mb{index}") if whole is None else whole.positions
        self.hidden = Block(f"hidden mb{index}")
        self.qkv = Block(f"qkv mb{index}")
        self.qkv_host = self.qkv if unified else Block(f"qkv on the host mb{index}")
        self.attention = Block(f"attention mb{index}")
        self.attention_host = self.attention if unified else Block(f"attention on the host mb{index}")
        self.normed = Block(f"normed mb{index}")
        self.normed_host = self.normed if unified else Block(f"normed on the host mb{index}")
        own: dict[str, Block] = dict(vars(self))
        self.reads = [tuple(own[name] for name in verb.reads if name in own) for verb in VERBS]
        self.writes = [tuple(own[name] for name in verb.writes if name in own) for verb in VERBS]


class KVState:
    """The state of a micro-batch's KV cache.

    Attributes:
        layers: for each layer, the block of data (as in `Blocks`) that stands for the cached keys and values.
        device: the block on the accelerator for one layer's keys and values; the chunks of a micro-batch share it.
        on_accelerator: for each layer, whether its cache is on the accelerator; if not, it is on the host.
        unsaved: the layer whose new keys and values `offload_kv` has yet to move to the host; -1 for none.
        loaded: by layer, the number of the buffer that `load_kv` filled with the layer's keys and values.
        attended_in_device: the last layer in which `attention` left keys and values in `device`; -1 for none.
    """

    def __init__(self, layers: list[Block], device: Block, on_accelerator: tuple[bool, ...]) -> None:
        self.layers = layers
        self.device = device
        self.on_accelerator = on_accelerator
        self.unsaved = -1
        self.loaded: dict[int, int] = {}
        self.attended_in_device = -1


class RoutingState:
    """The experts of a micro-batch in its present layer.

    Attributes:
        decision: the task of `route`; None before it.
        pending: the experts that have yet to run on this node; None until the result of `route` is known.
        rows_left: for each pending expert that has run on some of its rows, the ranges of its other rows.
        owners: the node of each expert, as passed to `assign`; None before that.
        outputs: the blocks of experts' outputs that `combine` reads.
        on_host: outputs that are still on the host; None if the routed rows were not copied there.
        called: processors ("accelerator", "host") that already have a task of a resident expert. Tasks of more resident
            experts there join that task's call of the kernel, and so cost no launch.
    """

    def __init__(self) -> None:
        self.decision: Task | None = None
        self.pending: set[int] | None = None
        self.rows_left: dict[int, tuple[range, ...]] = {}
        self.owners: Mapping[int, int] | None = None
        self.outputs: list[Block] = []
        self.on_host: list[HostOutput] | None = None
        self.called: set[str] = set()


class MicroBatch:
    """One micro-batch of a run, or in prefill a chunk: a part of a micro-batch's prompts.

    Attributes:
        index: the micro-batch's number, which its tasks have as `micro_batch`.
        requests: the requests that have new tokens in the micro-batch's step.
        starts: for each of these requests, the number of its tokens before the step.
        tokens: for each of these requests, the number of its new tokens in the step.
        ends: the requests for which the step samples a token.
        generated: number of tokens that each sequence generated before the step; in continuous batching, the smallest
            such number.
        phase: "prefill" or "decode".
        served: the rows of the step in continuous batching, where requests join and leave between steps; None in a
            fixed batch.
        progress: a number that rises through the step, as the policy calls verbs: `STRIDE` times the layer, plus the
            point reached in the layer (see `steps.verbs.table`).
        last: the task by which the micro-batch reached the point that `progress` gives.
        blocks: the blocks of its data.
        kv: the state of its KV cache.
        routing: the state of its experts in the present layer.
        activations: the block that stands for the memory of its activations, where the plan limits the micro-batches
            within a layer; else None.
        stage: the pipeline stage that it is at.
        works: the `Work` (FLOPs and bytes) of each verb at that stage, in the present kind of layer, by the verb's
            name.
        works_at: `works` of every stage and kind of layer: `works_at[stage][kind]`.
        bound: for each verb, by its number: its lane and its work at the present stage, and the blocks that its task
            reads and writes.
        routes: whether the policy computes the experts in tasks of their own, after `route`, rather than in
            `post_attention`.
        sized_for: the values that its works were computed from: phase, number of sampled tokens, number of new tokens,
            and `routes`; None before that.
        chunk: the tokens of its prompts that it computes in prefill; None if its chunks compute them.
        chunk_of: for a chunk, the micro-batch that it is a part of; else None.
        is_chunk: whether it is a chunk.
        before: the chunk before it in the same prompts; None if it is the first one, or no chunk.
    """

    def __init__(self, index: int, requests: tuple[int, ...], blocks: Blocks, kv: KVState) -> None:
        self.index = index
        self.requests = self.ends = requests
        self.starts = self.tokens = (0,) * len(requests)
        self.served: Rows | None = None
        self.blocks = blocks
        self.kv = kv
        self.routing = RoutingState()
        self.chunk: Chunk | None = None
        self.chunk_of: MicroBatch | None = None
        self.is_chunk = False
        self.before: MicroBatch | None = None
        self.activations: Block | None = None
        self.generated = 0
        self.phase: Phase = "prefill"
        self.progress = START
        self.last: Task | None = None
        self.stage: PipelineStage
        self.routes = False
        self.sized_for: tuple[Phase, int, int, bool] | None = None
        self.works: dict[str, Work] = {}
        self.works_at: list[list[dict[str, Work]]] = []
        self.bound: list[BoundVerb] = []
        self._bound_at: list[list[list[BoundVerb]]] = []

    @property
    def whole(self) -> MicroBatch:
        """The micro-batch of decode steps that this chunk is a part of; this micro-batch itself if it is no chunk."""
        return self.chunk_of or self

    def begin(self, starts: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        """Have the micro-batch's requests begin a step.

        Args:
            starts: for each request, the number of its tokens before the step.
            tokens: for each request, the number of its new tokens.
        """
        self.phase = phase_after(self.generated)
        self.starts, self.tokens = starts, tokens

    def serve(self, rows: Rows) -> None:
        """Begin a step of continuous batching, in which the micro-batch holds these rows of requests."""
        self.served = rows
        self.requests, self.starts, self.tokens, generated, *_ = zip(*rows.rows, strict=True)
        self.ends = tuple([row.request for row in rows.rows if row.ends])
        self.phase = rows.phase
        self.generated = min(generated)

    @property
    def embeds(self) -> tuple[int, ...] | Rows:
        """Operands of the `embed` task: indices of requests or, in continuous batching, the requests and new tokens."""
        return self.requests if self.served is None else self.served

    def keep(self, requests: tuple[int, ...]) -> None:
        """Drop all requests of the micro-batch except those with these numbers."""
        self.requests = self.ends = requests

    def enter(self, stage: PipelineStage, kind: int) -> None:
        """Move to a pipeline stage and a kind of layer, so that later verbs use their lanes and costs.

        kind: number of the kind of layer; layers of equal shape are of one kind.
        """
        self.stage = stage
        self.works = self.works_at[stage.number][kind]
        self.bound = self._bound_at[stage.number][kind]

    def bind(self, stages: Sequence[PipelineStage], works_at: list[list[dict[str, Work]]]) -> None:
        """Set the lanes and works (FLOPs and bytes) of the micro-batch's verbs at each of these pipeline stages.

        works_at: the works by the stage's number, then by the number of the kind of layer, then by the verb's name.
        """
        self.works_at = works_at
        blocks = self.blocks
        self._bound_at = [
            [
                [*zip(stage.lanes, map(works.get, _NAMES), blocks.reads, blocks.writes, strict=True)]
                for works in of_kinds
            ]
            for stage, of_kinds in zip(stages, works_at, strict=True)
        ]

    def rebind(self, verb: Verb, stage: PipelineStage, kind: int, work: Work) -> None:
        """Set the work (FLOPs and bytes) of one verb at one pipeline stage, in layers of one kind.

        kind: number of the kind of layer.
        """
        self.works_at[stage.number][kind][verb.name] = work
        bound = self._bound_at[stage.number][kind]
        lane, _, reads, writes = bound[verb.number]
        bound[verb.number] = lane, work, reads, writes


def whole_micro_batch(
    index: int, requests: tuple[int, ...], kv_on_accelerator: tuple[bool, ...], *, unified: bool
) -> MicroBatch:
    """Make a micro-batch of decode steps; prefill uses the same object if none of its prompts is cut into chunks.

    Args:
        index: the micro-batch's number.
        requests: the numbers of its requests.
        kv_on_accelerator: for each layer, whether its KV cache is on the accelerator.
        unified: whether accelerator and host share a memory.
    """
    cache = [Block(f"KV L{layer} mb{index}") for layer in range(len(kv_on_accelerator))]
    kv = KVState(cache, Block(f"keys and values at hand mb{index}"), kv_on_accelerator)
    return MicroBatch(index, requests, Blocks(index, unified=unified), kv)


def chunk_of(
    whole: MicroBatch, index: int, chunk: Chunk, before: MicroBatch | None, *, unified: bool
) -> MicroBatch:
    """Make the micro-batch of prefill that takes a chunk of another micro-batch's prompts.

    Args:
        whole: the micro-batch whose prompts are cut.
        index: the new micro-batch's number.
        chunk: the part of the prompts.
        before: the chunk before it, which it continues; None for the first one.
        unified: whether accelerator and host share a memory.
    """
    kv = KVState(whole.kv.layers, whole.kv.device, whole.kv.on_accelerator)
    made = MicroBatch(index, chunk.requests, Blocks(index, unified=unified, whole=whole.blocks), kv)
    made.chunk, made.ends, made.before = chunk, chunk.ends, before
    made.chunk_of, made.is_chunk = whole, True
    return made
