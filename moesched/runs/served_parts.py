"""The parts of a node that serves requests: its lanes, engine, run state, and the coroutine that its driver runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from moesched.engine import Engine
from moesched.errors import BadInput
from moesched.requests.rows import Rows
from moesched.runs.generation import Sampled, load
from moesched.runs.notices import Notices
from moesched.runs.planning import make_lanes
from moesched.runs.serving import ARRIVALS, Serving, ServingListener, served_step
from moesched.seams import LaneKind, Policy
from moesched.serving.admission import Admission, FirstCome
from moesched.serving.arrivals import Arrivals
from moesched.serving.capacity import Capacity
from moesched.serving.places import Places
from moesched.steps.plan import Plan
from moesched.steps.run_state import RunState
from moesched.steps.works import RowsOfExperts
from moesched.tasks import Lane

EngineType = TypeVar("EngineType", bound=Engine)
Main = TypeVar("Main", Serving, "Following")


class ServingSetup(NamedTuple):
    """A plan with its policy, and the requests that are served with it.

    Attributes:
        plan: the policy's plan, made for a batch that fills all of `capacity`.
        capacity: the largest number of requests and tokens that may run together.
        arrivals: the requests, as they arrive and leave.
        admission: chooses which waiting request runs next; by default the one that came first.
        stop_tokens: ids of tokens, each of which ends its request.
        listener: told of each token and each step; None for no listener.
        keeps_history: whether to keep requests that have ended, and the occupancy of all steps.
    """

    plan: Plan
    policy: Policy
    capacity: Capacity
    arrivals: Arrivals
    admission: Admission | None = None
    stop_tokens: Collection[int] = ()
    listener: ServingListener | None = None
    keeps_history: bool = True


def require_one_accelerator(plan: Plan, policy: Policy, nodes: int = 1) -> None:
    """Raise BadInput if a plan uses several accelerators of a machine, or its number of nodes is not `nodes`."""
    if len(plan.stages) > 1 or plan.layout.config.ranks > 1:
        raise BadInput(
            f"policy {type(policy).__name__} is for several accelerators, and requests are served by one: choose "
            "another policy, or a machine with one accelerator"
        )
    if plan.nodes.count != nodes:
        raise BadInput(
            f"policy {type(policy).__name__} planned for {plan.nodes.count} nodes, and {nodes} would serve: plan for "
            "these"
        )


class ServedRun(NamedTuple, Generic[EngineType, Main]):
    """The parts of one node that serves; `main` has the coroutine `run`, which the node's driver runs."""

    plan: Plan
    engine: EngineType
    run_state: RunState
    main: Main


def first_node(
    setup: ServingSetup,
    make_engine: Callable[[Iterable[Lane]], EngineType],
    kinds: Mapping[str, LaneKind] | None = None,
    peers: Sequence[Notices] = (),
    on_step: Callable[[int, Mapping[int, Rows]], object] | None = None,
    chosen: RowsOfExperts | None = None,
    device: str = "",
) -> ServedRun[EngineType, Serving]:
    """Make the parts of the first of the nodes that serve, the only one that knows the requests.

    Args:
        make_engine: makes the node's engine, given its lanes.
        kinds: the kind of each lane on the device, by the lane's name.
        peers: on a virtual clock, the objects by which the other nodes receive the rows of each step; else empty.
        on_step: called with each step's number and rows by micro-batch, before it is submitted; None for no call.
        chosen: takes a `post_attention` task, and returns how many of the task's tokens each chosen expert gets; None
            on a device, and in simulations where tokens choose experts uniformly.
        device: name of the device's class, for errors about the tokens that it samples; if it is empty, as in a
            simulation, tokens are not checked.
    """
    plan = setup.plan
    lanes = {**make_lanes(plan, kinds), ARRIVALS: Lane(ARRIVALS)}
    engine = make_engine(lanes.values())
    run_state = RunState(plan, engine, lanes, chosen=chosen)
    notices = Notices(run_state, peers) if plan.nodes.count > 1 else None
    serving = Serving(
        run_state,
        setup.policy,
        Places(setup.capacity),
        setup.arrivals,
        setup.admission or FirstCome(),
        stop_tokens=setup.stop_tokens,
        listener=setup.listener,
        keeps_history=setup.keeps_history,
        notices=notices,
        on_step=on_step,
        device=device,
    )
    return ServedRun(plan, engine, run_state, serving)


def other_node(
    plan: Plan,
    policy: Policy,
    make_engine: Callable[[Iterable[Lane]], EngineType],
    kinds: Mapping[str, LaneKind] | None = None,
) -> ServedRun[EngineType, Following]:
    """Make the parts of a node that gets the rows of each step from the first node.

    Args:
        make_engine: makes the node's engine, given its lanes.
        kinds: the kind of each lane on the device, by the lane's name.
    """
    lanes = make_lanes(plan, kinds)
    engine = make_engine(lanes.values())
    run_state = RunState(plan, engine, lanes)
    return ServedRun(plan, engine, run_state, Following(run_state, policy, Notices(run_state)))


class Following:
    """Runs the steps of a serving node that is not the first: the first node sends it the new tokens of each step.

    Attributes:
        steps: number of steps so far.
        notices: receives each step's rows (requests and their new tokens) from the first node.
    """

    def __init__(self, run_state: RunState, policy: Policy, notices: Notices) -> None:
        self.steps = 0
        self.notices = notices
        self._run = run_state
        self._policy = policy

    async def run(self) -> int:
        """Load the weights, then run steps until the first node announces the end; return the number of steps."""
        await load(self._run)
        samples: Sequence[Sampled] = ()
        while (rows := await self.notices.take(self.steps)) is not None:
            if rows:
                following = await served_step(self._run, self._policy, self.steps, rows)
                await _end_of(samples)
                samples = following
                self.steps += 1
        await _end_of(samples)
        return self.steps


async def _end_of(samples: Sequence[Sampled]) -> None:
    for _, sample in samples:
        await sample
