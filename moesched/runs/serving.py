"""Continuous batching: schedules steps of requests that join and leave between steps, until no more arrive.

The same coroutine runs on hardware and on the virtual clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Literal

import msgspec

from moesched.drivers.policies import scheduled
from moesched.errors import BadInput
from moesched.requests.logprobs import Logprob, ScoredToken
from moesched.requests.next_token import NO_TOKEN
from moesched.requests.rows import Rows
from moesched.runs.device_values import checked_tokens
from moesched.runs.generation import Sampled, load
from moesched.runs.notices import Notice, Notices
from moesched.seams import Policy
from moesched.serving.admission import Admission
from moesched.serving.arrivals import Arrivals
from moesched.serving.places import Places
from moesched.serving.request import Request
from moesched.steps.run_state import RunState
from moesched.steps.step import Step
from moesched.system.plain_text import shown
from moesched.tasks import Phase, Task
from moesched.trace.recording import WAIT
from moesched.work import Demand, Work

ARRIVALS = "arrivals"
"""The lane whose tasks last until the next request arrives."""

IDLE = Demand(0.0, ())
"""The demand of waiting: it uses nothing."""

IDLE_NOTICE_SECONDS = 5.0
"""Seconds after which other nodes are told that there are still no requests; shorter than an exchange's time limit."""

Ending = Literal["stop", "length", "left", "not finite"]
"""The reason why a request ended: a stop token, its last token, a cancellation, or bad logits."""


class Served(msgspec.Struct):
    """A request and its outcome so far. Times are nanoseconds since the first request could run; -1 if not known yet.

    Attributes:
        entered: time at which the request got a place in a micro-batch.
        tokens: its generated tokens so far; a stop token is kept.
        prompt: log probabilities of the prompt's tokens, with None for the first; empty if not asked for.
        times: the time of each generated token.
        ended: time at which the request had its last token, or had left.
        ending: reason why the request gets no more tokens; None while it runs or waits.
    """

    request: Request
    entered: int = -1
    tokens: list[int] = []
    prompt: list[Logprob | None] = []
    times: list[int] = []
    ended: int = -1
    ending: Ending | None = None


class Occupancy(msgspec.Struct):
    """Use of the micro-batches and the KV cache by requests. Each list has one number for each step.

    Attributes:
        starts: time at which the step began, on the same clock as `times`. This is the end of the step before or, if
            there was a wait for a request, the end of that wait.
        times: time at which the step ended; nanoseconds since the first request could run.
        held: tokens that the requests' cache blocks had room for at the end of the step, before ended requests freed
            theirs.
        running: number of requests that had a place in a micro-batch when the step ended, including those that ended
            with it.
        waiting: number of requests that waited for a place when the step ended.
    """

    starts: list[int] = []
    times: list[int] = []
    held: list[int] = []
    running: list[int] = []
    waiting: list[int] = []


class ServingListener:
    """Base of listeners that follow requests which are served. Every method does nothing; a listener overrides some.

    The methods are called on the thread that runs the policy.
    """

    def loaded(self, serving: Serving) -> None:
        """Called once the weights are loaded, so that requests can run."""

    def token(self, served: Served) -> None:
        """Called when a request has one more token, has ended, or both; `served.ending` is None until it ends."""

    def step(self, serving: Serving) -> None:
        """Called when a step of `serving` has ended, after the calls of `token` for its tokens."""


class Serving:
    """Serves requests, from their arrival to their last token.

    Each step is a prefill or a decode step. While some requests have prompt tokens left and others decode, the two
    kinds take turns. A step is submitted while the previous step runs, so a request that ends with a stop token takes
    part in one more step.

    Args:
        places: the micro-batches that requests join and leave, with their KV cache; no request has a place yet.
        arrivals: the requests, as they arrive and leave.
        admission: chooses which waiting request gets a place next.
        stop_tokens: ids of tokens, each of which ends its request.
        listener: told of each token and each step; None for no listener.
        keeps_history: whether to keep the requests that have ended and the occupancy of all steps; otherwise
            `requests` loses each request as it ends, and `occupancy` has only the last step.
        on_step: called with each step's number and rows by micro-batch, before it is submitted; None for no call.
        notices: sends the rows of each step to the other nodes; None if there are none.
        device: name of the device's class, for errors about the tokens that it samples; if it is empty, as in a
            simulation, tokens are not checked.

    Attributes:
        loaded: time at which the weights were loaded; nanoseconds on the driver's clock.
        requests: the requests that arrived, by number.
        occupancy: numbers of requests and tokens in the micro-batches at each step.
        steps: number of steps that have ended.
        notices: sends the rows of each step to the other nodes; None without other nodes.
    """

    def __init__(
        self,
        run_state: RunState,
        policy: Policy,
        places: Places,
        arrivals: Arrivals,
        admission: Admission,
        *,
        stop_tokens: Collection[int] = (),
        listener: ServingListener | None = None,
        keeps_history: bool = True,
        notices: Notices | None = None,
        on_step: Callable[[int, Mapping[int, Rows]], object] | None = None,
        device: str = "",
    ) -> None:
        self.loaded = 0
        self.steps = 0
        self.requests: dict[int, Served] = {}
        self.occupancy = Occupancy()
        self.notices = notices
        self._run = run_state
        self._policy = policy
        self._places = places
        self._arrivals = arrivals
        self._admission = admission
        self._stop_tokens = frozenset(stop_tokens)
        self._listener = listener or ServingListener()
        self._device = device
        self._keeps_history = keeps_history
        self._on_step = on_step
        self._waiting: dict[int, Request] = {}
        """The requests without a place, by number, in the order of arrival."""
        self._before: Phase = "decode"
        self._since = 0
        """Start of the present step, as `Occupancy.starts` has it."""

    async def run(self) -> Mapping[int, Served]:
        """Run steps until no more requests arrive and all have ended; returns the requests by number."""
        self.loaded = await load(self._run)
        self._listener.loaded(self)
        index = 0
        running: tuple[dict[int, Rows], list[Sampled]] | None = None
        while True:
            self._look()
            self._admit()
            rows = self._next_rows(index)
            if rows:
                if self._on_step is not None:
                    self._on_step(index, rows)
                self._give_notice(rows, index)
                following = await served_step(self._run, self._policy, index, rows)
                if running is not None:
                    await self._collect(index - 1, *running)
                index, running = index + 1, (rows, following)
            elif running is not None:
                await self._collect(index - 1, *running)
                running = None
            elif self._arrivals.over:
                self._give_notice(None, index)
                return self.requests
            else:
                self._give_notice({}, index)
                await self._wait(index)
                self._since = self._now()

    @property
    def running(self) -> int:
        """Number of requests that have a place in a micro-batch now."""
        return len(self._places)

    @property
    def waiting(self) -> int:
        """Number of requests that have arrived, and wait for a micro-batch with room."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Number of tokens that the running requests' blocks of the KV cache have room for now."""
        return self._places.held

    @property
    def busy(self) -> dict[str, int]:
        """Nanoseconds that each lane ran, by its name, apart from the lane that waits for arrivals."""
        return {name: lane.busy for name, lane in self._run.lanes.items() if name != ARRIVALS}

    def _now(self) -> int:
        return self._run.engine.now() - self.loaded

    def _look(self) -> None:
        """Take in the requests that arrived since the last call, and end those that were cancelled."""
        now = self._now()
        news = self._arrivals.news(now)
        for request in news.came:
            self._places.capacity.require(request)
            self.requests[request.number] = Served(request)
            self._waiting[request.number] = request
        for number in news.departed:
            served = self.requests.get(number)
            if served is not None and served.ending is None:
                self._end(served, "left", now)
            self._waiting.pop(number, None)

    def _admit(self) -> None:
        """Give waiting requests places in micro-batches, in the order of admission, until one finds no place.

        Raises:
            BadInput: the order is not a sequence, has a request that does not wait, repeats a request, or lacks one.
        """
        if not self._waiting:
            return
        order = self._admission.order(tuple(self._waiting.values()))
        if not isinstance(order, Sequence):
            raise self._misplaced(f"is {shown(order)}")
        for request in order:
            if not isinstance(request, Request):
                raise self._misplaced(f"has {shown(request)}, which is no request")
            if self._waiting.get(request.number) is not request:
                raise self._misplaced(f"has request {request.number}, which does not wait, or has it twice")
            if not self._places.enter(request):
                break
            self._admission.entered(request)
            self.requests[request.number].entered = self._now()
            del self._waiting[request.number]
        else:
            if self._waiting:
                raise self._misplaced(f"lacks request {min(self._waiting)}, which waits")

    def _misplaced(self, what: str) -> BadInput:
        return BadInput(
            f"the order of admission of {type(self._admission).__name__} {what}: return each waiting request once"
        )

    def _next_rows(self, index: int) -> dict[int, Rows]:
        """Return the rows of step `index`, of prefill or decode in turn, by micro-batch; empty if there are none."""
        turns: tuple[Phase, Phase] = (
            ("prefill", "decode") if self._before == "decode" else ("decode", "prefill")
        )
        for phase in turns:
            rows = self._places.rows(phase, index)
            if rows:
                self._before = phase
                return rows
        return {}

    def _give_notice(self, notice: Notice, index: int) -> None:
        if self.notices is not None:
            self.notices.give(notice, index)

    async def _collect(self, index: int, rows: Mapping[int, Rows], samples: Sequence[Sampled]) -> None:
        """Wait for a step's tokens, pass them on, and free the blocks of requests that are done.

        Args:
            index: the step's number.
            rows: the step's rows by micro-batch.
            samples: the tasks that sample the step's tokens, each with its requests.
        """
        end, parts = 0, {row.request for each in rows.values() for row in each.rows if not row.samples}
        for requests, sample in samples:
            tokens = await sample
            if self._device and requests:
                tokens = checked_tokens(tokens, len(requests), sample, self._device, least=NO_TOKEN)
            end = max(end, sample.end - self.loaded)
            for number, token in zip(requests, tokens if requests else (), strict=True):
                served = self.requests.get(number)
                if served is not None and served.ending is None:
                    self._take(served, token, sample.end - self.loaded, is_part=number in parts)
        self._note(end)
        self._places.collected(index)
        self._listener.step(self)

    def _take(self, served: Served, token: int, now: int, *, is_part: bool) -> None:
        """Add a token to a request at the time `now` in nanoseconds, and end the request with its last token.

        The token `NO_TOKEN` says that the logits are not finite: it ends the request, and is not added.

        is_part: whether the step computed only a part of the prompt; then only log probabilities are kept.
        """
        if token == NO_TOKEN:
            self._end(served, "not finite", now)
            return
        if isinstance(token, ScoredToken):
            served.prompt += token.prompt or ()
        if is_part:
            return
        served.tokens.append(token)
        served.times.append(now)
        if token in self._stop_tokens:
            self._end(served, "stop", now)
        elif len(served.tokens) == served.request.new_tokens:
            self._end(served, "length", now)
        else:
            self._listener.token(served)

    def _end(self, served: Served, ending: Ending, now: int) -> None:
        number = served.request.number
        served.ending, served.ended = ending, now
        self._places.leave(number)
        self._listener.token(served)
        if not self._keeps_history:
            del self.requests[number]

    def _note(self, now: int) -> None:
        self.steps += 1
        if not self._keeps_history:
            self.occupancy = Occupancy()
        seen = self.occupancy
        seen.starts.append(self._since)
        seen.times.append(now)
        seen.held.append(self.held)
        seen.running.append(self.running)
        seen.waiting.append(self.waiting)
        self._since = now

    async def wait_for_news(self) -> None:
        """Wait in real time until a request arrives or leaves, or no more will come.

        With other nodes, the wait ends after `IDLE_NOTICE_SECONDS` at the latest: the nodes are then told that there
        are still no requests.
        """
        most = None if self.notices is None else IDLE_NOTICE_SECONDS
        with suppress(TimeoutError):
            async with asyncio.timeout(most):
                await self._arrivals.wait(self._now())

    async def _wait(self, index: int) -> None:
        """Wait until the next request arrives, as a task of the step `index` on the lane for arrivals."""
        lane = self._run.lanes[ARRIVALS]
        work = Work(WAIT, ARRIVALS, nanoseconds=self._arrivals.until_next(self._now()), demand=IDLE)
        await self._run.engine.submit(Task(lane, work, WAIT, step=index))


async def served_step(
    run_state: RunState, policy: Policy, index: int, rows: Mapping[int, Rows]
) -> list[Sampled]:
    """Have a policy submit one step of continuous batching.

    Args:
        index: the step's number.
        rows: the step's rows (requests and their new tokens), by micro-batch.

    Returns:
        the tasks that sample the step's tokens, each with its requests.
    """
    run_state.serve(rows)
    step = Step(run_state, index)
    await scheduled(policy, step)
    return step.close()
