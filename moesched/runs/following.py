"""Runs the steps of cluster nodes that serve requests, other than the first node, which alone knows the requests."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.runs.generation import Sampled, load
from moesched.runs.notices import Notices
from moesched.runs.serving import served_step
from moesched.seams import Policy
from moesched.steps.run_state import RunState


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
