"""The table of the verbs that take a micro-batch through a step, one row for each verb.

The checks of the verbs, the lanes and data of their tasks, the picture of a micro-batch's progress and docs/verbs.md
are derived from this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from moesched.tasks import Decision, HostKernel, Kernel, PageTransfer, Preview, Task

STRIDE = 8
"""The number of values that a micro-batch's progress may have in one layer."""

INPUT, QKV, QKV_HOST, ATTENDED_HOST, ATTENDED, ROUTED = range(6)
SAMPLED = STRIDE - 1
"""The progress at the end of a step, after all layers."""
START = SAMPLED - STRIDE
"""The progress of a micro-batch that begins a step, before its first layer."""
NEXT_INPUT = STRIDE + INPUT
ROUTED_BEFORE = ROUTED - STRIDE

PROGRESS = {
    ROUTED_BEFORE: "routed in an earlier layer",
    INPUT: "input",
    QKV: "qkv",
    QKV_HOST: "qkv on the host",
    ATTENDED_HOST: "attended on the host",
    ATTENDED: "attended",
    ROUTED: "routed",
    SAMPLED: "sampled",
    NEXT_INPUT: "input of the next layer",
}
"""Names of the values of a micro-batch's progress."""

OUTSIDE_LAYERS = {
    INPUT: "output of the last layer",
    SAMPLED: "sampled",
    NEXT_INPUT: "input of the first layer",
}
"""Names of values of the progress for verbs that belong to no layer."""

VerbLane = Literal["accelerator", "host", "either", "to host", "from host"]
"""The lane of a verb's task: a processor's, or that of a copy; "either" if the policy chooses the processor."""

_numbers = count()


@dataclass(frozen=True, slots=True)
class Verb:
    """The properties of a verb that are the same in every layer and for every micro-batch.

    Attributes:
        name: the name of the verb and of its method of `Step`.
        needs, leaves: the progress of the micro-batch before and after; equal where the verb leaves it as it is.
        lane: the lane on which the verb's task runs; None for a verb without a task.
        task: the type of its task.
        reads, writes: names of the blocks of data that its task reads and writes: attributes of `Blocks`, or names such
            as "weights", for which the verb's method chooses the blocks.
        when: the progress of the micro-batch at which the verb is allowed. "exactly": only `needs`. "until": any up to
            `needs`. "earlier": `needs`, or the same point of an earlier layer. "unsaved": any from `needs` on, as long
            as new keys and values wait to be moved to the host.
        saved: whether new keys and values must have been moved to the host before the verb.
        elsewhere: replaces `needs` on a node that runs no attention; None if the verb cannot be called on such a node.
        grows: whether the task's FLOPs and bytes grow from step to step with the KV cache.
        in_layer: whether the verb runs once in each layer, not once in a step.
        number: the verb's index in `VERBS`.
        moves: whether the verb changes the micro-batch's progress.
    """

    name: str
    needs: int
    leaves: int
    lane: VerbLane | None
    task: type[Task] = Kernel
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    when: Literal["exactly", "until", "earlier", "unsaved"] = "exactly"
    saved: bool = False
    elsewhere: int | None = None
    grows: bool = False
    in_layer: bool = True
    number: int = field(init=False, default_factory=_numbers.__next__)
    moves: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "moves", self.leaves != self.needs)  # read for every task, so not a property

    def progress_name(self, progress: int) -> str:
        """Return the name of a progress that the verb needs or leaves, for messages: such as "routed"."""
        return PROGRESS[progress] if self.in_layer else OUTSIDE_LAYERS[progress]


EMBED = Verb(
    "embed",
    SAMPLED,
    NEXT_INPUT,
    "accelerator",
    reads=("tokens",),
    writes=("hidden", "positions"),
    in_layer=False,
)
PRE_ATTENTION = Verb(
    "pre_attention",
    INPUT,
    QKV,
    "accelerator",
    reads=("hidden", "weights"),
    writes=("qkv", "activations"),
    saved=True,
)
LOAD_KV = Verb(
    "load_kv",
    QKV,
    QKV,
    "from host",
    PageTransfer,
    reads=("positions", "kv cache"),
    writes=("kv buffer",),
    when="until",
    grows=True,
)
ATTENTION = Verb(
    "attention",
    QKV,
    ATTENDED,
    "accelerator",
    reads=("qkv", "kv cache"),
    writes=("attention", "kv cache"),
    grows=True,
)
OFFLOAD_KV = Verb(
    "offload_kv",
    ATTENDED,
    ATTENDED,
    "to host",
    PageTransfer,
    reads=("qkv", "positions", "kv cache"),
    writes=("kv cache",),
    when="unsaved",
)
OFFLOAD_QKV = Verb(
    "offload_qkv", QKV, QKV_HOST, "to host", PageTransfer, reads=("qkv",), writes=("qkv_host",)
)
CPU_ATTENTION = Verb(
    "cpu_attention",
    QKV_HOST,
    ATTENDED_HOST,
    "host",
    HostKernel,
    reads=("qkv_host", "kv cache"),
    writes=("attention_host", "kv cache"),
    grows=True,
)
LOAD_HIDDEN = Verb(
    "load_hidden",
    ATTENDED_HOST,
    ATTENDED,
    "from host",
    PageTransfer,
    reads=("attention_host",),
    writes=("attention",),
)
POST_ATTENTION = Verb(
    "post_attention",
    ATTENDED,
    NEXT_INPUT,
    "accelerator",
    reads=("attention", "hidden", "weights", "activations"),
    writes=("hidden",),
)
ROUTE = Verb(
    "route",
    ATTENDED,
    ROUTED,
    "accelerator",
    Decision,
    reads=("attention", "hidden", "weights"),
    writes=("hidden", "normed"),
    elsewhere=INPUT,
)
PREVIEW_ROUTE = Verb(
    "preview_route",
    ROUTED_BEFORE,
    ROUTED_BEFORE,
    "accelerator",
    Preview,
    reads=("hidden", "weights"),
    when="earlier",
)
ASSIGN = Verb("assign", ROUTED, ROUTED, None, elsewhere=ROUTED)
OFFLOAD_ROUTED = Verb(
    "offload_routed", ROUTED, ROUTED, "to host", PageTransfer, reads=("normed",), writes=("normed_host",)
)
RUN_EXPERT = Verb(
    "run_expert",
    ROUTED,
    ROUTED,
    "either",
    reads=("normed or normed_host", "weights"),
    writes=("output",),
    elsewhere=ROUTED,
)
LOAD_ROUTED = Verb(
    "load_routed",
    ROUTED,
    ROUTED,
    "from host",
    PageTransfer,
    reads=("outputs on the host",),
    writes=("output",),
)
WARM_EXPERT = Verb(
    "warm_expert",
    ROUTED,
    ROUTED,
    "accelerator",
    reads=("normed", "weights"),
    writes=("output",),
    elsewhere=ROUTED,
)
COMBINE = Verb(
    "combine",
    ROUTED,
    NEXT_INPUT,
    "accelerator",
    reads=("normed", "hidden", "outputs", "activations"),
    writes=("hidden",),
    elsewhere=ROUTED,
)
SAMPLE = Verb(
    "sample",
    INPUT,
    SAMPLED,
    "accelerator",
    Decision,
    reads=("hidden",),
    writes=("tokens",),
    saved=True,
    elsewhere=INPUT,
    in_layer=False,
)

VERBS = (
    EMBED,
    PRE_ATTENTION,
    LOAD_KV,
    ATTENTION,
    OFFLOAD_KV,
    OFFLOAD_QKV,
    CPU_ATTENTION,
    LOAD_HIDDEN,
    POST_ATTENTION,
    ROUTE,
    PREVIEW_ROUTE,
    ASSIGN,
    OFFLOAD_ROUTED,
    RUN_EXPERT,
    LOAD_ROUTED,
    WARM_EXPERT,
    COMBINE,
    SAMPLE,
)
"""All verbs; a verb's number is its index."""


def paths() -> Iterator[list[Verb]]:
    """Yield the sections of a micro-batch's paths through a step: a section ends where paths join or split.

    Each section is a list of verbs that change the progress, in order.
    """
    moving = [verb for verb in VERBS if verb.moves]
    starts = [verb.needs for verb in moving]
    ends = [verb.leaves for verb in moving]
    for verb in moving:
        if starts.count(verb.needs) == 1 and ends.count(verb.needs) == 1:
            continue  # continues the verb before it
        path = [verb]
        while starts.count(path[-1].leaves) == 1 == ends.count(path[-1].leaves):
            path.append(moving[starts.index(path[-1].leaves)])
        yield path


def picture() -> str:
    """Return the text with the paths of a micro-batch through a step, one per line."""
    lines = []
    for path in paths():
        line = path[0].progress_name(path[0].needs)
        for verb in path:
            line += f" --{verb.name}--> {verb.progress_name(verb.leaves)}"
        lines.append(line)
    return "\n".join(lines)
