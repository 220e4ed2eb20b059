"""Generates the tokens of one batch: a policy schedules all steps, from loading the weights to the last token.

The same coroutine runs on hardware and on the virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from moesched.drivers.policies import scheduled
from moesched.requests.beams import Standing
from moesched.runs.device_values import checked_tokens, require_standings
from moesched.seams import Policy
from moesched.steps.run_state import RunState
from moesched.steps.step import Step
from moesched.tasks import Task

OnTokens = Callable[[dict[int, int]], object]
Sampled = tuple[tuple[int, ...], Task]
"""Requests of a micro-batch, and the task that samples a token for each."""


class TokenHandling(NamedTuple):
    """Stop tokens, and the callback for new tokens.

    Attributes:
        stop_tokens: ids of tokens, each of which ends its request.
        on_tokens: called with a micro-batch's new tokens as {request: token}; None for no callback.
        rows_apart: takes a number of rows. Returns True if, in decode micro-batches of at most this many rows, the
            other rows change no bit of a row's results (`KeepsRowsApart.rows_apart`). None counts as a function that
            returns False.
    """

    stop_tokens: Collection[int] = ()
    on_tokens: OnTokens | None = None
    rows_apart: Callable[[int], bool] | None = None

    def without_receiver(self) -> TokenHandling:
        """Return a copy without the callback, for ranks that generate the same tokens as the first one."""
        return self._replace(on_tokens=None)


class Generation:
    """Generates the tokens of one batch's requests.

    Args:
        tokens: stop tokens, and the callback for new tokens.
        device: name of the device's class, for the error if the device returns values that are no tokens; empty in a
            simulation, where they are not checked.

    Attributes:
        tokens: generated tokens by request, with beam search those of the best beam; a stop token is kept.
        scores: the best beam's score, by request; empty without beam search.
        loaded: time at which the resident weights were loaded; nanoseconds.
        busy_loading: busy time of each lane until `loaded`; nanoseconds.
        busy: busy time of each lane until the last step that ended; nanoseconds.
        ended: whether all steps have ended.
        step_ends: time at which each step, prefill included, had sampled its last micro-batch; nanoseconds.
        first_tokens: time of the first token, by request, of requests that have one; nanoseconds.
        sampled: for each decode step, the time at which each micro-batch's tokens were sampled; nanoseconds.
    """

    def __init__(
        self,
        run_state: RunState,
        policy: Policy,
        tokens: TokenHandling | None = None,
        device: str = "",
    ) -> None:
        stop_tokens, self._on_tokens, self._apart = tokens or TokenHandling()
        self.tokens: list[list[int]] = [[] for _ in run_state.plan.batch.prompts]
        self._beams = run_state.plan.batch.beams
        self.scores: list[float] = [-math.inf] * len(self.tokens) if self._beams > 1 else []
        self.loaded = 0
        self.busy_loading: dict[str, int] = {}
        self.busy: dict[str, int] = {}
        self.ended = False
        self.step_ends: list[int] = []
        self.first_tokens: dict[int, int] = {}
        self.sampled: list[dict[int, int]] = []
        self._run = run_state
        self._policy = policy
        self._device = device
        self._stop_tokens = frozenset(stop_tokens)
        self._stopped: set[int] = set()

    async def run(self) -> list[list[int]]:
        """Load the weights, prefill and decode; return the tokens by request.

        Each step is submitted while the step before it runs.
        """
        self.loaded = await load(self._run)
        self.busy_loading = self.busy = self._busy()
        steps = self._run.steps
        samples = await self._submit(0, last=steps == 1)
        for index in range(1, steps):
            following = await self._submit(index, last=index == steps - 1)
            await self._collect(samples)
            samples = following
            if len(self._stopped) == len(self.tokens):
                break
            if self._stopped:
                self._run.leave_out(self._stopped, self._rows_apart)
        await self._collect(samples)
        self.ended = True
        return self.tokens

    async def _submit(self, index: int, *, last: bool) -> list[Sampled]:
        step = Step(self._run, index, last=last)
        await scheduled(self._policy, step)
        return step.close()

    async def _collect(self, samples: list[Sampled]) -> None:
        """Wait for the `sample` tasks of a step, store their tokens, and pass these to the callback."""
        for requests, sample in samples:
            values = self._checked(await sample, len(requests), sample)
            if sample.phase == "prefill":
                self.first_tokens |= dict.fromkeys(requests, sample.end)
            if self._beams > 1:
                self._take_in(requests, values)
                continue
            fresh = {}
            for request, token in zip(requests, values, strict=True):
                if request not in self._stopped:
                    fresh[request] = token
                    self.tokens[request].append(token)
                    if token in self._stop_tokens:
                        self._stopped.add(request)
            if self._on_tokens is not None and fresh:
                self._on_tokens(fresh)
        decoded = {sample.micro_batch: sample.end for _, sample in samples if sample.phase == "decode"}
        if decoded:
            self.sampled.append(decoded)
        self.step_ends.append(max(sample.end for _, sample in samples))
        self.busy = self._busy()

    def _checked(self, values: Any, sequences: int, sample: Task) -> Any:
        if not self._device:
            return values
        if self._beams > 1:
            require_standings(values, sequences, sample, self._device)
            return values
        return checked_tokens(values, sequences, sample, self._device, least=0)

    def _rows_apart(self, rows: int) -> bool:
        """Test whether ended sequences can be left out of a micro-batch of `rows` rows without changes to the others.

        This is so if the results of the other sequences keep the same bits. With several beams, ranks or nodes no
        sequence is left out: beams of a request stay together, and ranks need equal rows, since their kernels may treat
        different numbers of rows differently.
        """
        plan = self._run.plan
        alone = plan.nodes.count == plan.layout.config.ranks == self._beams == 1
        return alone and self._apart is not None and self._apart(rows)

    def _busy(self) -> dict[str, int]:
        return {name: lane.busy for name, lane in self._run.lanes.items()}

    def _take_in(self, requests: Sequence[int], standings: Sequence[Standing]) -> None:
        """Store the state of each request's beam search, and pass on the tokens of requests whose search is done.

        Args:
            requests: the requests.
            standings: for each request, the tokens and the score of its best beam, and whether the search is done.
        """
        for request, (tokens, score, done) in zip(requests, standings, strict=True):
            if request in self._stopped:
                continue
            self.tokens[request], self.scores[request] = list(tokens), score
            if done:
                self._stopped.add(request)
                if self._on_tokens is not None:
                    for token in tokens:
                        self._on_tokens({request: token})


async def load(run_state: RunState) -> int:
    """Load the resident weights, then the pages that are in pools before the first step.

    Returns:
        the time at which the last page was loaded, in nanoseconds.
    """
    resident = [task for kept in run_state.plan.weights.resident for task in run_state.load(kept)]
    loaded = await _end_of(resident)
    return max(loaded, await _end_of(run_state.fill()))  # slots may have been used to load resident pages


async def _end_of(loads: Sequence[Task]) -> int:
    """Wait for all of these tasks; return the time at which the last one ended, in nanoseconds; 0 if there are none."""
    for task in loads:
        await task
    return max((task.end for task in loads), default=0)
