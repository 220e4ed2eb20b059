"""The base of all verbs: checks that a verb is called in order for its micro-batch, and submits the verb's task."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from sys import _getframe
from threading import get_ident
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from moesched.errors import OutOfOrder, PolicyError
from moesched.steps.memory import Pool
from moesched.steps.micro_batch import MicroBatch
from moesched.steps.read_only import ReadOnly
from moesched.steps.run_state import RunState
from moesched.steps.verb_gate import VerbGate
from moesched.steps.verbs.table import PROGRESS, START, STRIDE, VERBS, Verb
from moesched.steps.views import View, Views
from moesched.tasks import DEMAND, IDLE, URGENT, Block, PageTransfer, Phase, Task

NEVER = -1 << 62
"""A progress that no micro-batch ever has; it stands for the need of verbs that do not exist on this node."""

Priority = Literal["urgent", "normal", "speculative"]
CLASSES: Mapping[Priority, int] = MappingProxyType({"urgent": URGENT, "normal": DEMAND, "speculative": IDLE})
"""The engine's priority class, by the name that policies give to `Step.priority`."""

K = TypeVar("K", bound=Hashable)


class StepFacts(ReadOnly):
    """The types of the public attributes of `Step`, whose docstring describes them."""

    _remedy = "loop over a part of it, or keep your own numbers in attributes of the policy"

    kind: Phase | Literal["mixed"]
    layers: range
    micro_batches: Sequence[int]
    last: bool
    chunked: bool
    nodes: int
    node: int
    attends: bool
    _number: int

    @property
    def index(self) -> int:
        """The number of the step in its batch: 0 for prefill, then 1, 2, ... for the decode steps."""
        return self._number


class Verbs(StepFacts):
    """Base of classes with verbs: the checks and the submission of tasks that all verbs need."""

    _batches: Mapping[int, MicroBatch]
    _state: RunState
    _submit: Callable[..., Task]
    _gate: VerbGate
    _own_pools: set[Pool]
    _looks: int
    _last_task: int
    _needed: Sequence[int]
    _left: Sequence[int]
    _generated: int

    def __init__(self, run_state: RunState, index: int, *, last: bool = False) -> None:
        plan, batches = run_state.plan, run_state.begin_step()
        present, nodes = batches.values(), plan.nodes
        phases = {batch.phase for batch in present}
        kind = phases.pop() if len(phases) == 1 else "mixed"
        needed, left = _progress(run_state.stride, nodes.attends)
        self._set(
            kind=kind,
            layers=plan.layers,
            micro_batches=tuple(batches),
            last=last,
            chunked=any(batch.is_chunk for batch in present),
            nodes=nodes.count,
            node=nodes.index,
            attends=nodes.attends,
            _number=index,
            _batches=batches,
            _state=run_state,
            _submit=run_state.submit,
            _gate=VerbGate(f"{kind} step {index}"),
            _own_pools=set(),
            _looks=0,
            _last_task=run_state.engine.submitted + plan.task_limit,
            _needed=needed,
            _left=left,
            _generated=min([batch.generated for batch in present]),
            _sealed=True,
        )

    @contextmanager
    def priority(self, name: Priority) -> Iterator[None]:
        """Give the kernels of a `with` block the priority `name` on their lanes, on both processors.

        Of the kernels that are ready, a lane runs urgent ones first and speculative ones last. The priority does not
        change the order of transfers (`fetch` has options for that), nor the order on lanes that keep to program order.

        Raises:
            PolicyError: there is no such priority.
        """
        if name not in CLASSES:
            known = ", ".join(map(repr, CLASSES))
            raise PolicyError(f"priority: there is no priority {name!r}: give one of {known}")
        before = self._submit
        self._submit = partial(_submit_kernels, self._state.submit, CLASSES[name])
        try:
            yield
        finally:
            self._submit = before

    def _at(self, verb: Verb, layer: int, micro_batch: int) -> MicroBatch:
        """Check that a micro-batch has exactly the progress that a verb needs, and return the micro-batch.

        Raises:
            OutOfOrder: the micro-batch has another progress, or there is no such layer or micro-batch.
            PolicyError: the policy is not running, or runs on another thread.
        """
        if self._gate.thread != get_ident():
            raise self._gate.refusal(verb.name)
        try:
            batch = self._batches[micro_batch]
            if batch.progress != self._needed[verb.number] + layer * STRIDE or (
                verb.saved and batch.kv.unsaved >= 0
            ):
                raise self._out_of_order(verb, layer, batch)
        except (KeyError, TypeError):
            raise self._not_there(verb, layer, micro_batch) from None
        return batch

    def _in_time(self, verb: Verb, layer: int, micro_batch: int) -> MicroBatch:
        """Check that a verb which is not bound to one exact progress comes in time, and return the micro-batch.

        Raises:
            OutOfOrder: the verb comes too early or too late, or there is no such layer or micro-batch.
            PolicyError: the policy is not running, or runs on another thread.
        """
        if self._gate.thread != get_ident():
            raise self._gate.refusal(verb.name)
        try:
            batch = self._batches[micro_batch]
        except (KeyError, TypeError):
            raise self._not_there(verb, layer, micro_batch) from None
        if layer not in self.layers:
            raise self._not_there(verb, layer, micro_batch)
        if verb.when == "unsaved":
            in_time = batch.kv.unsaved == layer
        else:
            needed = self._needed[verb.number] + layer * STRIDE
            in_time = START < batch.progress <= needed
            if verb.when == "earlier":
                in_time = in_time and (needed - batch.progress) % STRIDE == 0
        if not in_time:
            raise self._out_of_order(verb, layer, batch)
        return batch

    def _run(
        self,
        verb: Verb,
        layer: int,
        batch: MicroBatch,
        operands: Any = None,
        reads: tuple[Block, ...] = (),
        writes: tuple[Block, ...] = (),
    ) -> Task:
        """Submit a verb's task, and set the micro-batch's progress to the one that the verb leaves.

        Args:
            operands: the task's operands, in the form that the device's runner takes.
            reads, writes: blocks of data that the task reads and writes in addition to those in the table of verbs.

        Returns:
            the task; if the verb has nothing to do, such as a copy in unified memory, the micro-batch's last task.
        """
        number, kind, submit = verb.number, verb.task, self._submit
        if type(layer) is not int:
            layer = int(layer)  # of numpy, which traces and messages cannot hold
        lane, work, own_reads, own_writes = batch.bound[number]
        if verb.moves:
            batch.progress = self._left[number] + layer * STRIDE
        if lane is None:
            return batch.last  # type: ignore[return-value]  # every progress past INPUT was left by a task
        assert work is not None, "a verb with a lane has a work"
        task = kind(lane, work, verb.name, layer, batch.index, -1, operands, self._number, batch.generated)
        if verb.moves:
            batch.last = task
        elif self._state.engine.submitted >= self._last_task:  # other verbs can be repeated without an end
            raise too_many(verb.name, self._state.plan.task_limit)
        policy = _getframe(2)  # a verb calls this, a policy calls the verb
        task.code = policy.f_code
        task.instruction = policy.f_lasti
        return submit(task, own_reads + reads if reads else own_reads, own_writes + writes)

    def _enter(self, task: Task, reads: tuple[Block, ...], writes: tuple[Block, ...]) -> Task:
        """Submit a task that a verb has made itself, note the policy's line in the task, and return the task.

        reads, writes: the blocks of data that the task reads and writes.

        Raises:
            PolicyError: the step has submitted as many tasks as a step may.
        """
        policy = _getframe(2)  # a verb calls this, a policy calls the verb
        task.code = policy.f_code
        task.instruction = policy.f_lasti
        if type(task.layer) is not int or type(task.expert) is not int:
            task.layer, task.expert = int(task.layer), int(task.expert)
        self._submit(task, reads, writes)
        if task.id >= self._last_task:
            raise too_many(task.verb, self._state.plan.task_limit)
        return task

    def _view(self, views: Views[K], key: K) -> View[K]:
        return views.show(key, self._state.engine, self._number)

    def _enter_layer(self, verb: Verb, batch: MicroBatch, layer: int) -> None:
        """Set the costs of a micro-batch's next verbs to those of this layer's kind.

        Raises:
            OutOfOrder: the micro-batch has been through all layers.
        """
        if layer not in self.layers:
            raise self._no_layer(verb.name, layer)
        kind = self._state.works.kind_of[layer]
        if batch.works is not batch.works_at[batch.stage.number][kind]:
            batch.enter(batch.stage, kind)

    def _activations(self, batch: MicroBatch, *, leaves: bool) -> tuple[Block, ...]:
        """Return a tuple with the block of the micro-batch's activations within a layer; empty if there is none.

        leaves: whether the micro-batch leaves the layer now. The block then becomes free for another micro-batch,
            unless keys and values in it have yet to be saved.
        """
        block = batch.activations
        if block is None:
            return ()
        if leaves and batch.kv.unsaved < 0:
            batch.activations = None
            self._state.free_activations.append(block)
        return (block,)

    def _where(self, batch: MicroBatch) -> str:
        if batch.progress == START:
            return "the start" if batch.phase == "prefill" else f"the end of step {self._number - 1}"
        if batch.progress == self._state.stride + START:
            return f"the end of step {self._number}"
        return f"step {self._number} {self._point(batch.progress)}{self._unsaved(batch)}"

    def _point(self, progress: int) -> str:
        """Return a progress in words: the layer, and the micro-batch's state in that layer, such as "L3 routed"."""
        layer, within = divmod(progress, STRIDE)
        return f"L{layer} {PROGRESS[within]}"

    def _unsaved(self, batch: MicroBatch) -> str:
        return ", its keys and values not saved: offload_kv them" if batch.kv.unsaved >= 0 else ""

    def _require_layer(self, method: str, layer: object) -> None:
        """Raise OutOfOrder if the model has no such layer; the message names the method."""
        if layer not in self.layers:
            raise self._no_layer(method, layer)

    def _present(self, method: str, micro_batch: int) -> MicroBatch:
        """Return the micro-batch with this number; raise OutOfOrder, naming `method`, if the step has no such one."""
        try:
            return self._batches[micro_batch]
        except (KeyError, TypeError):
            raise self._no_micro_batch(method, micro_batch) from None

    def _not_there(self, verb: Verb, layer: object, micro_batch: object) -> OutOfOrder:
        """Return the error for a verb that is called with a layer or a micro-batch that does not exist."""
        if verb.in_layer and layer not in self.layers:
            return self._no_layer(verb.name, layer)
        return self._no_micro_batch(verb.name, micro_batch)

    def _no_layer(self, method: str, layer: object) -> OutOfOrder:
        named = f"L{layer}" if isinstance(layer, int) else f"layer {layer!r}"
        known = f"its layers are L0 to L{len(self.layers) - 1}: loop over step.layers"
        return OutOfOrder(f"{method}: the model has no {named}: {known}")

    def _no_expert(self, method: str, layer: int, expert: int) -> PolicyError:
        """Return the error of a method for an expert that a layer does not have."""
        experts = self._state.plan.layout.experts_of(layer)
        known = f"its experts are E0 to E{len(experts) - 1}" if experts else "it has no experts"
        return PolicyError(f"{method}: L{layer} has no E{expert}: {known}")

    def _no_micro_batch(self, method: str, micro_batch: object) -> OutOfOrder:
        named = f"mb{micro_batch}" if isinstance(micro_batch, int) else f"micro-batch {micro_batch!r}"
        known = f"they are mb0 to mb{len(self._batches) - 1}"
        planned = self._state.plan.micro_batches
        if micro_batch in planned and len(self._batches) < len(planned):
            known = "its sequences have ended, or have yet to begin"
        return OutOfOrder(
            f"{method}: there is no {named} in this step: {known}: loop over step.micro_batches"
        )

    def _swapped(self, verb: Verb, layer: int, micro_batch: int) -> bool:
        """Test whether a verb would be in order with layer and micro-batch exchanged, for a hint in the error."""
        other = self._batches.get(layer)
        needed = self._needed[verb.number] + micro_batch * STRIDE
        return verb.in_layer and layer != micro_batch and other is not None and other.progress == needed

    def _out_of_order(self, verb: Verb, layer: int, batch: MicroBatch) -> OutOfOrder:
        """Make the error of a verb that was called too early or too late in the micro-batch's step."""
        if not self.attends and verb.elsewhere is None:
            return OutOfOrder(
                f"{verb.name}: node {self.node} does not attend, as the plan is centralised: call it only "
                "if step.attends"
            )
        about = f"L{layer}, mb{batch.index}" if verb.in_layer else f"mb{batch.index}"
        if verb.when == "unsaved":
            return OutOfOrder(
                f"{verb.name}({about}): mb{batch.index} has no keys and values to save in L{layer}: call attention "
                f"before; it is at {self._where(batch)}"
            )
        needed = self._needed[verb.number] + layer * STRIDE
        needs = (
            "the end of the step before" if needed == START else f"step {self._number} {self._point(needed)}"
        )
        if verb.when == "until":
            needs += " or earlier in the step"
        elif verb.when == "earlier":
            needs = f"step {self._number} routed in a layer before L{layer}"
        remedy = self._next_verbs(batch)
        if self._swapped(verb, layer, batch.index):
            remedy = f": the layer comes first: {verb.name}({batch.index}, {layer}) would be in order"
        return OutOfOrder(
            f"{verb.name}({about}) needs mb{batch.index} at {needs}, but it is at {self._where(batch)}{remedy}"
        )

    def _next_verbs(self, batch: MicroBatch) -> str:
        """Return, as the end of a message, the verbs that may advance a micro-batch now; empty if none may."""
        if batch.kv.unsaved >= 0:  # `_where` names the remedy
            return ""
        layer = batch.progress // STRIDE
        in_layer = f"({layer}, {batch.index})"
        calls = [
            verb.name + (in_layer if verb.in_layer else f"({batch.index})")
            for verb in VERBS
            if verb.moves
            and (layer in self.layers or not verb.in_layer)
            and self._needed[verb.number] + (layer if verb.in_layer else -1) * STRIDE == batch.progress
        ]
        return f": {' or '.join(calls)} comes next" if calls else ""


def _submit_kernels(
    submit: Callable[..., Task],
    kernel_class: int,
    task: Task,
    reads: Sequence[Block],
    writes: Sequence[Block],
    after: Sequence[Task] = (),
    priority_class: int = DEMAND,
) -> Task:
    """Submit a task; its priority class is `priority_class` if it is a transfer of pages, else `kernel_class`."""
    if not isinstance(task, PageTransfer):
        priority_class = kernel_class
    return submit(task, reads, writes, after, priority_class)


@cache
def _progress(stride: int, attends: bool) -> tuple[list[int], list[int]]:
    """Return two lists by verb number: the progress that each verb needs, and the progress after it, both in layer 0.

    For another layer, callers add `STRIDE` times the layer's number. For `embed` and `sample`, which belong to no
    layer, they use -1 as this number. Since `sample` comes after all layers, its two numbers also include `stride`.

    Args:
        stride: the number by which a micro-batch's progress grows in a step.
        attends: whether the node computes attention. If not, the verbs that it lacks need the progress `NEVER`, which
            no micro-batch reaches.
    """
    needed, left = [], []
    for verb in VERBS:
        offset = stride if verb.name == "sample" else 0
        needs = verb.needs if attends else verb.elsewhere
        needed.append(NEVER if needs is None else offset + needs)
        left.append(offset + verb.leaves)
    return needed, left


def too_many(verb: str, limit: int) -> PolicyError:
    """Return the error of a step that submits more than `limit` tasks.

    verb: name of the verb whose task exceeds the limit.
    """
    return PolicyError(
        f"{verb}: the step has submitted {limit:,} tasks, its limit: end the loop, or assign plan.task_limit in "
        "Policy.plan"
    )


def gate_of(step: Verbs) -> VerbGate:
    """Return the `VerbGate` of a step, which tells when the policy may call its verbs."""
    return step._gate
