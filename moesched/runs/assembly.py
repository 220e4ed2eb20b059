"""Assembles the parts of a run: for each rank its lanes, engine, run state, and the coroutine that generates tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from moesched.engine import Engine
from moesched.runs.generation import Generation, TokenHandling
from moesched.runs.outcome import Outcome
from moesched.runs.planning import make_lanes
from moesched.runs.ranks import Rank
from moesched.seams import KeepsRowsApart, LaneKind
from moesched.steps.plan import Plan
from moesched.steps.run_state import RunState
from moesched.steps.works import RowsOfExperts
from moesched.tasks import Lane

EngineType = TypeVar("EngineType", bound=Engine)


class RankRun(NamedTuple, Generic[EngineType]):
    """The parts of one rank's run. The driver needs them during the run; the report is made from them afterwards.

    Attributes:
        rank: the rank's plan, policy and device.
        lanes: the rank's lanes, by name.
        engine: orders the rank's tasks.
        run_state: the state that all steps share.
        generation: has the coroutine that lets the policy schedule all steps, and collects the tokens.
    """

    rank: Rank
    lanes: dict[str, Lane]
    engine: EngineType
    run_state: RunState
    generation: Generation

    @property
    def plan(self) -> Plan:
        """The rank's plan."""
        return self.rank.plan

    def outcome(self) -> Outcome:
        """Return the raw results of the run so far."""
        generation, engine = self.generation, self.engine
        busy = {lane.name: lane.busy for lane in engine.lanes} if generation.ended else generation.busy
        return Outcome(
            loaded=generation.loaded,
            step_ends=generation.step_ends,
            tokens=generation.tokens,
            scores=generation.scores,
            busy={
                lane.name: busy.get(lane.name, 0) - generation.busy_loading.get(lane.name, 0)
                for lane in engine.lanes
            },
            tasks=engine.submitted - engine.joins,
            first_tokens=generation.first_tokens,
            sampled=generation.sampled,
            scheduled=len(generation.step_ends),
            previews=self.run_state.previews.ahead,
            forecasts=self.run_state.previews.by_predictor,
        )


def assemble(
    rank: Rank,
    make_engine: Callable[[Iterable[Lane]], EngineType],
    *,
    kinds: Mapping[str, LaneKind] | None = None,
    tokens: TokenHandling | None = None,
    steps: int | None = None,
    age: int = 0,
    chosen: RowsOfExperts | None = None,
) -> RankRun[EngineType]:
    """Make the parts of one rank's run, ready for a driver.

    Args:
        rank: the rank's plan, policy and device.
        make_engine: makes the rank's engine, given its lanes.
        kinds: the kind of each lane on the rank's device, by the lane's name.
        tokens: stop tokens, and the callback for new tokens.
        steps: number of steps to run; by default all of the plan's batch.
        age: number of decode steps whose keys and values the KV cache already holds when decoding begins.
        chosen: takes a `post_attention` task, and returns how many tokens chose each expert, in any order, no zeros.
            None on hardware, and in a simulation where a task takes its mean time over all possible choices of experts.
    """
    lanes = make_lanes(rank.plan, kinds)
    engine = make_engine(lanes.values())
    run_state = RunState(rank.plan, engine, lanes, steps=steps, age=age, chosen=chosen)
    hardware: object = rank.hardware
    device = "" if hardware is None else type(hardware).__name__
    if isinstance(hardware, KeepsRowsApart):
        tokens = (tokens or TokenHandling())._replace(rows_apart=hardware.rows_apart)
    return RankRun(rank, lanes, engine, run_state, Generation(run_state, rank.policy, tokens, device))
