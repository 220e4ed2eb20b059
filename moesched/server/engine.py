"""The engine's process: takes requests from its standard input, and writes their tokens to its standard output.

The HTTP process (the front) starts `python -m moesched.server.engine OPTIONS`, with the fields of `ServedOptions` as
JSON. The engine ends at once when its standard input is closed; after a `Close`, once all requests are done.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from moesched.errors import BadInput, MoeschedError
from moesched.jobs.served_model import ServedModel, served_model
from moesched.jobs.served_options import ServedOptions
from moesched.requests.logprobs import ScoredToken, WantedLogprobs
from moesched.requests.sampling import Sampling
from moesched.runs.serving import Served, Serving, ServingListener
from moesched.server.messages import (
    Ask,
    Broken,
    Close,
    Ending,
    Failed,
    Frames,
    Leave,
    Ready,
    Refused,
    Starting,
    State,
    ToEngine,
    ToFront,
    Token,
    frame,
)
from moesched.serving.capacity import Capacity
from moesched.serving.live import LiveArrivals
from moesched.serving.request import Request
from moesched.system.scratch import remove_all
from moesched.tasks import Task

STATE_SECONDS = 0.2
"""Seconds between two messages about a busy engine's state; one is also sent when it becomes busy or idle."""
READ_BYTES = 1 << 16
NOT_FINITE = (
    "the logits of this answer are not finite, as those of a damaged checkpoint may be: a run of the same prompt by "
    "`moesched run` names the tensor"
)

Send = Callable[[list[ToFront]], object]


class TokenSender(ServingListener):
    """Sends tokens to the front, the HTTP process, after each step, and the engine's state from time to time.

    Args:
        ready: the message to send once weights are loaded.
        capacity: the run's limits; messages of the engine's state have its number of KV cache tokens.
    """

    def __init__(self, send: Send, ready: Ready, capacity: Capacity) -> None:
        self._send = send
        self._ready = ready
        self._room = capacity.places * capacity.cache_tokens
        self._messages: list[ToFront] = []
        self._told = 0.0
        self._ran = False

    def loaded(self, serving: Serving) -> None:
        """Send the message that weights are loaded, and a state without requests."""
        self._send([self._ready, State(0, 0, 0, self._room, 0, busy_seconds(serving))])

    def token(self, served: Served) -> None:
        """Keep a message until the step ends: about a new token, or about a request whose logits are not finite."""
        number, ending = served.request.number, served.ending
        if ending == "left":
            return
        if ending == "not finite":
            self._messages.append(Broken(number, NOT_FINITE))
        else:
            self._messages.append(message_of(served, ending))

    def step(self, serving: Serving) -> None:
        """Send the messages of the step, and from time to time the engine's state."""
        now, runs = time.monotonic(), bool(serving.running)
        if now - self._told >= STATE_SECONDS or not (runs and self._ran):
            self._told, self._ran = now, runs
            self._messages.append(self._state(serving))
        self._send(self._messages)
        self._messages = []

    def _state(self, serving: Serving) -> State:
        busy = busy_seconds(serving)
        return State(serving.running, serving.waiting, serving.held, self._room, serving.steps, busy)


def busy_seconds(serving: Serving) -> dict[str, float]:
    """Return the seconds that each lane was busy so far, by its name."""
    return {name: nanoseconds / 1e9 for name, nanoseconds in serving.busy.items()}


class LoadMeter:
    """Observer that sends the number of loaded pages of weights to the HTTP process, a few times a second."""

    def __init__(self, send: Send, pages: int) -> None:
        self._send = send
        self._pages = pages
        self._done = 0
        self._told = 0.0

    def ended(self, task: Task) -> None:
        """Count a page if the ended task loaded one; at most a few times a second, send the number."""
        if task.verb != "load":
            return
        self._done += 1
        now = time.monotonic()
        if now - self._told >= STATE_SECONDS:
            self._told = now
            self._send([Starting("loading weights", self._done, self._pages)])


class Receiver:
    """Takes messages from the front, the HTTP process, and passes requests on to the engine's run."""

    def __init__(self, arrivals: LiveArrivals, capacity: Capacity, send: Send) -> None:
        self._arrivals = arrivals
        self._capacity = capacity
        self._send = send

    def take(self, message: ToEngine) -> None:
        """Carry out a message of the HTTP process: run a request, drop one, or close.

        Requests that do not fit are refused.
        """
        if isinstance(message, Ask):
            try:
                request = request_of(message)
                self._capacity.require(request)
            except BadInput as error:
                self._send([Refused(message.number, str(error))])
            else:
                self._arrivals.add(request)
        elif isinstance(message, Leave):
            self._arrivals.remove(message.number)
        elif isinstance(message, Close):
            self._arrivals.close()

    def read(self, source: int) -> None:
        """Take messages from the file descriptor `source` until it is closed, or fails; then end this process."""
        frames = Frames(ToEngine)
        try:
            while data := os.read(source, READ_BYTES):
                for message in frames.feed(data):
                    self.take(message)  # type: ignore[arg-type]  # frames of the front have nothing else
        except Exception:  # an engine that hears nothing more would let everyone wait
            traceback.print_exc()
        remove_all()
        os._exit(1)


def request_of(ask: Ask) -> Request:
    """Convert the front's message to a request.

    Raises:
        BadInput: a setting is out of range.
    """
    return Request(
        number=ask.number,
        prompt=len(ask.ids),
        new_tokens=ask.new_tokens,
        ids=ask.ids,
        sampling=Sampling(temperature=ask.temperature, top_k=ask.top_k, top_p=ask.top_p, seed=ask.seed),
        logprobs=None if ask.logprobs is None else WantedLogprobs(ask.logprobs, ask.echo),
        user=ask.user,
    )


def message_of(served: Served, ending: Ending | None) -> Token:
    """Make the message about a request's newest token; for its first token, with the prompt's log probabilities."""
    number, token = served.request.number, served.tokens[-1]
    if not isinstance(token, ScoredToken):
        return Token(number, token, ending)
    is_first = len(served.tokens) == 1
    return Token(
        number, int(token), ending, token.logprob, served.prompt if is_first and served.prompt else None
    )


def ready(model: ServedModel) -> Ready:
    """Make the message that says which model is served, by which policy, within which limits."""
    planned = model.planned
    capacity = planned.capacity
    return Ready(
        model.checkpoint.config.name,
        planned.policy_name,
        planned.predicted,
        planned.plan.machine.name,
        capacity.places,
        capacity.sequences,
        capacity.cache_tokens,
        capacity.prompt_tokens,
        capacity.context,
        model.checkpoint.config.vocabulary,
    )


def run(options: dict[str, Any], source: int, send: Send) -> None:
    """Serve a model until the front says that no more requests come.

    Args:
        options: the fields of `ServedOptions`.
        source: file descriptor from which the front's messages are read.
        send: writes messages to the front.
    """

    def plans(stage: str) -> None:
        send([Starting(f"planning: {stage}")])

    with served_model(ServedOptions(**options), plans) as model:
        arrivals, capacity = LiveArrivals(), model.planned.capacity
        receiver = Receiver(arrivals, capacity, send)
        threading.Thread(target=receiver.read, args=(source,), name="reads the front", daemon=True).start()
        sender = TokenSender(send, ready(model), capacity)
        meter = LoadMeter(send, model.pages_to_load)
        model.serve(arrivals, sender, observers=[meter])


def main() -> int:
    """Serve a model with the options that the first argument has as JSON, and return the exit code."""
    out = os.dup(1)
    os.dup2(2, 1)  # what others print must not be taken for messages
    lock = threading.Lock()

    def send(messages: list[ToFront]) -> None:
        data = memoryview(frame(messages))
        with lock:
            while data:
                data = data[os.write(out, data) :]

    try:
        run(msgspec.json.decode(sys.argv[1]), 0, send)
    except MoeschedError as error:
        send([Failed(str(error))])
        return 2 if isinstance(error, BadInput) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
