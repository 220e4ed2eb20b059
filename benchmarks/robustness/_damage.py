"""Policies with one verb call damaged, or that change what they see, or call verbs at a wrong time."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from typing import Any, Literal, NamedTuple, get_args

from benchmarks.robustness import _meddling
from benchmarks.robustness._meddling import meddle
from moesched.errors import PolicyError
from moesched.seams import Policy
from moesched.steps.memory import Pool
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import DONE, Decision, Task

Kind = Literal[
    "drop",
    "repeat",
    "swap",
    "exchange",
    "mistake",
    "insist",
    "assign",
    "mutate",
    "replan",
    "thread",
    "late",
    "leave",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
MEANINGS = {
    "drop": "the call was left out",
    "repeat": "the call was made twice",
    "swap": "the call was made after the one that follows it",
    "exchange": "the call named another micro-batch, and the next such call of the same verb the first one",
    "mistake": "the call named another layer, another expert, or the pages of another layer",
    "insist": "six random calls were made before it, and refusals ignored: a call that is refused must leave no trace",
    "assign": "an attribute of something that plan, step, pools or values show was assigned before it",
    "mutate": "a container of something that plan, step, pools or values show was changed before it",
    "replan": "an attribute or a container that the plan shows was changed at the end of planning",
    "thread": "a random call was made on another thread before it, which has to be refused and leave no trace",
    "late": "a random call of this step was made in the next one, which has to be refused and leave no trace",
    "leave": "SystemExit, KeyboardInterrupt, GeneratorExit or the like was raised instead of it",
}
LEAVING = (SystemExit(0), SystemExit("bye"), KeyboardInterrupt(), GeneratorExit(), BaseException("mine"))
SEES = ("assign", "mutate")
CHANGES = (*SEES, "thread", "late", "leave", "replan")
MADE_BY_A_DATACLASS = "<string>"
VERBS = (
    "embed",
    "pre_attention",
    "attention",
    "offload_qkv",
    "cpu_attention",
    "load_hidden",
    "load_kv",
    "offload_kv",
    "post_attention",
    "route",
    "preview_route",
    "offload_routed",
    "run_expert",
    "load_routed",
    "combine",
    "sample",
    "fetch",
    "copy_to_pinned",
    "promote",
    "cancel",
    "evict",
)
MOVES = ("fetch", "copy_to_pinned", "promote", "cancel", "evict")
"""The verbs that take pages and a pool."""


class Damage(NamedTuple):
    """Damage to one of a run's verb calls, counted from 0; -1 damages none."""

    kind: Kind
    call: int


NONE = Damage("drop", -1)


class Damaged:
    """A policy that makes one verb call wrongly.

    Attributes:
        calls: the verbs that were called so far, in order.
        struck: the verb that was damaged.
    """

    def __init__(self, policy: Policy, damage: Damage) -> None:
        self.policy = policy
        self.damage = damage
        self.calls: list[str] = []
        self.struck = ""
        self._held: Late | None = None
        self._exchange: tuple[str, Any, Any] | None = None
        self._pools: list[Pool] = []
        self._late: Step | None = None
        self._handles: list[Task] = []
        self._plan: Plan

    def plan(self, plan: Plan) -> None:
        """The policy's own plan."""
        self._plan = plan
        self.policy.plan(plan)
        if self.damage.kind == "replan":
            self.struck = "plan"
            choose = Random(self.damage.call)
            meddle(choose, {"plan": plan}, choose.choice(SEES))

    async def prefill(self, step: Step) -> None:
        """The policy's prefill, with its calls counted."""
        await self.policy.prefill(DamagedStep(step, self))  # type: ignore[arg-type]

    async def decode(self, step: Step) -> None:
        """The policy's decode step, with its calls counted."""
        await self.policy.decode(DamagedStep(step, self))  # type: ignore[arg-type]

    def call(self, step: Step, verb: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Make a call, or whatever the damage makes of it."""
        self.calls.append(verb)
        self._pools += [each for each in (*arguments, *named.values()) if isinstance(each, Pool)]
        if self._late is not None and self._late is not step:
            late, self._late = self._late, None
            self._require_refusal(late)
        if len(self.calls) - 1 == self.damage.call:
            return self._strike(step, verb, arguments, named)
        result = getattr(step, verb)(*self._exchanged(verb, arguments), **named)
        if self._held is not None:
            held, self._held = self._held, None
            held.make()
        if isinstance(result, Decision):
            self._handles.append(result)
        return result

    def _strike(self, step: Step, verb: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self.struck = verb
        method = getattr(step, verb)
        if self.damage.kind == "drop":
            return Late(verb, lambda: None)
        if self.damage.kind == "repeat":
            method(*arguments, **named)
            return method(*arguments, **named)
        if self.damage.kind == "swap":
            self._held = Late(verb, lambda: method(*arguments, **named))
            return self._held
        if self.damage.kind == "insist":
            for number in range(6):
                self._intrude(step, 6 * self.damage.call + number)
            return method(*arguments, **named)
        if self.damage.kind in CHANGES:
            self._change(step)
            return method(*arguments, **named)
        if self.damage.kind == "mistake":
            return method(*_mistaken(step, verb, arguments), **named)
        position = micro_batch_position(verb)
        if position < 0:  # on threads, this call may be another one than in the run without damage
            return method(*arguments, **named)
        mine = arguments[position]
        other = (mine + 1) % len(step.micro_batches)
        self._exchange = (verb, other, mine)
        return method(*arguments[:position], other, *arguments[position + 1 :], **named)

    def _change(self, step: Step) -> None:
        """Change what the policy sees, or call a verb where none may be called, or leave."""
        choose = Random(self.damage.call)
        if self.damage.kind in SEES:
            values = {f"value {n}": task.value for n, task in enumerate(self._handles) if task.state == DONE}
            pools = {pool.name: pool for pool in self._pools}
            meddle(choose, {"step": step, "plan": self._plan, **pools, **values}, self.damage.kind)
        elif self.damage.kind == "thread":
            elsewhere(lambda: self._require_refusal(step))
        elif self.damage.kind == "late":
            self._late = step
        elif self.damage.kind == "leave":
            raise choose.choice(LEAVING).with_traceback(None)

    def _require_refusal(self, step: Step) -> None:
        """Make a random call that has to be refused."""
        try:
            self._intrude(step, self.damage.call, forgiven=())
        except PolicyError:
            return
        raise AssertionError("the call was not refused")

    def _intrude(self, step: Step, seed: int, forgiven: tuple[type[Exception], ...] = (PolicyError,)) -> None:
        """Make a random call; the policy does not care whether it is refused."""
        choose = Random(seed)
        i, j = choose.choice(step.layers), choose.choice(step.micro_batches)
        verb = choose.choice([verb for verb in VERBS if self._pools or verb not in MOVES])
        arguments: tuple[Any, ...] = (i, j)
        named: dict[str, Any] = {}
        if verb in MOVES:
            arguments = (choose.sample(step.pages(i), choose.randint(1, 2)), choose.choice(self._pools))
            named = {"source": choose.choice([None, *self._pools])} if verb == "fetch" else {}
        elif verb in ("embed", "sample"):
            arguments = (j,)
        elif verb == "run_expert":
            arguments = (i, choose.choice(step.pages(i)).expert, j)
            named = {"at": choose.choice(("accelerator", "host"))}
        with suppress(*forgiven):
            getattr(step, verb)(*arguments, **named)

    def _exchanged(self, verb: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a call; the second half of an exchange gets the other micro-batch."""
        if self._exchange is None or self._exchange[0] != verb:
            return arguments
        position = micro_batch_position(verb)
        if arguments[position] != self._exchange[1]:
            return arguments
        mine = self._exchange[2]
        self._exchange = None
        return (*arguments[:position], mine, *arguments[position + 1 :])


class DamagedStep:
    """A step whose verbs go through the damage."""

    def __init__(self, step: Step, damaged: Damaged) -> None:
        self._step = step
        self._damaged = damaged

    def __getattr__(self, name: str) -> Any:
        if name not in VERBS:
            return getattr(self._step, name)
        return lambda *arguments, **named: self._damaged.call(self._step, name, arguments, named)


def elsewhere(call: Callable[[], object]) -> None:
    """Make a call on another thread; raises what it raises."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


class Late:
    """The handle of a call that is not made yet, or never; awaiting it makes the call, if there is one."""

    def __init__(self, verb: str, make: Callable[[], Any]) -> None:
        self.verb = verb
        self._make: Callable[[], Any] | None = make
        self._handle: Any = None

    def make(self) -> None:
        """Make the call, unless it was made."""
        if self._make is not None:
            make, self._make = self._make, None
            self._handle = make()

    def __await__(self) -> Generator[Any, Any, Any]:
        self.make()
        return (yield from self._handle.__await__()) if self._handle is not None else {}


class End(NamedTuple):
    """End of a damaged run.

    Attributes:
        how: "raised" at the policy's own line, by a verb or by the policy's own code; "raised at the end" of the step,
            for a call that was missing there, naming the line that came last; "harmless", with the right tokens;
            "wrong" tokens; "elsewhere", an error at no line of the policy; "other", an error of another kind; "stuck".
    """

    how: Literal["raised", "raised at the end", "harmless", "wrong", "elsewhere", "other", "stuck"]
    what: str = ""

    @property
    def well(self) -> bool:
        """True if a damaged policy may end like this."""
        return self.how in ("raised", "raised at the end", "harmless")


def end_of(damaged: Damaged, run: Callable[[], bool]) -> End:
    """Run a damaged policy; `run` says whether it came to the right tokens."""
    try:
        return End("harmless") if run() else End("wrong", f"{damaged.damage} of {damaged.struck}")
    except BaseException as error:
        what = f"{type(error).__name__}: {error}"
        trace = traceback.extract_tb(error.__traceback__)
        files = [frame.filename for frame in trace if frame.filename != MADE_BY_A_DATACLASS]
        own = {inspect.getfile(cls) for cls in type(damaged.policy).__mro__ if cls is not object}
        if damaged.damage.kind in CHANGES and not isinstance(error, AssertionError):
            own |= {__file__, _meddling.__file__}
        if files[-1] in own or (own.intersection(files) and isinstance(error, PolicyError)):
            return End("raised", what)
        if not isinstance(error, PolicyError):
            return End("other", what)
        # Calls go through this file, so it stands for the policy's in the message.
        return End("raised at the end" if f"{__file__}:" in str(error) else "elsewhere", what)


def choose_damage(choose: Random, calls: Sequence[str]) -> Damage:
    """A random damage to a random call of those that an undamaged run made."""
    kind = choose.choice(KINDS)
    able = [n for n, verb in enumerate(calls) if kind != "exchange" or micro_batch_position(verb) >= 0]
    return Damage(kind, choose.choice(able))


def _mistaken(step: Step, verb: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A call's arguments with one of them wrong."""
    layers = len(step.layers)
    if verb == "run_expert":
        layer, expert, *others = arguments
        experts = max(page.expert for page in step.pages(layer)) + 1
        return (layer, (expert + 1) % experts, *others)
    if verb in ("embed", "sample"):
        return ((arguments[0] + 1) % len(step.micro_batches), *arguments[1:])
    if verb in MOVES:
        pages, *others = arguments
        moved = [step.pages((page.layer + 1) % layers)[_place(step, page)] for page in pages]
        return (moved, *others)
    return ((arguments[0] + 1) % layers, *arguments[1:])


def _place(step: Step, page: Any) -> int:
    return list(step.pages(page.layer)).index(page)


def micro_batch_position(verb: str) -> int:
    """Position of the micro-batch among a verb's arguments; -1 if it takes none."""
    names = list(inspect.signature(getattr(Step, verb)).parameters)[1:]
    return names.index("micro_batch") if "micro_batch" in names else -1
