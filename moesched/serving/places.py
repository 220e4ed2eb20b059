"""Places (micro-batches whose requests change): the requests in each, their KV cache, and their next rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moesched.requests.rows import Row, Rows
from moesched.serving.capacity import Capacity
from moesched.serving.request import Request
from moesched.tasks import Phase

NEVER = -1
"""Value of `Seat.last_step` for a request that was not part of any step yet."""


class Seat:
    """A running request, with the micro-batch that it joined and its progress.

    Attributes:
        request: the request.
        place: the number of the micro-batch.
        cached: number of the request's tokens that steps have taken so far; its next row begins after them.
        tokens_left: number of tokens that may still be sampled for the request.
        last_step: number of the last step that the request was part of; `NEVER` if it was part of none.
    """

    __slots__ = ("cached", "last_step", "place", "request", "tokens_left")

    def __init__(self, request: Request, place: int) -> None:
        self.request = request
        self.place = place
        self.cached = 0
        self.tokens_left = request.new_tokens
        self.last_step = NEVER

    @property
    def phase(self) -> Phase:
        """The phase of the request's next row: prefill while tokens of the request's prompt are left, then decode."""
        return "prefill" if self.to_come else "decode"

    @property
    def to_come(self) -> int:
        """Number of tokens of the request's prompt that have yet to pass the layers."""
        return max(0, self.request.prompt - self.cached)

    def row(self, step: int, tokens: int) -> Row:
        """Take the request's next `tokens` tokens into the step `step`, and return them as a row."""
        request, start, prompts = self.request, self.cached, self.phase == "prefill"
        generated = request.new_tokens - self.tokens_left
        self.cached = start + tokens
        samples = not self.to_come
        self.tokens_left -= samples
        self.last_step = step
        return Row(
            request.number,
            start,
            tokens,
            generated,
            samples,
            request.ids[start : self.cached] if prompts and request.ids is not None else None,
            request.sampling,
            request.blocks_tokens,
            request.logprobs,
            self._following,
        )

    @property
    def _following(self) -> int | None:
        """Id of the prompt's next token: the first one that no step has taken yet.

        None at the prompt's end, or if the request does not ask for log probabilities of its prompt.
        """
        request = self.request
        is_scored = request.scores_prompt and self.to_come
        return request.ids[self.cached] if is_scored and request.ids is not None else None


class _Place:
    """One micro-batch whose requests change, and the room that they take in its KV cache.

    Attributes:
        seats: the micro-batch's requests, by number.
        held: number of tokens that the requests' blocks of the KV cache have room for.
    """

    def __init__(self) -> None:
        self.seats: dict[int, Seat] = {}
        self.held = 0
        self.departed: list[int] = []
        """Requests whose blocks of the KV cache have become free since the place's last step."""


class Places:
    """The places (micro-batches), as many as a `Capacity` has, and the requests that run in them.

    A request keeps its place until all of its tokens are generated or `leave` is called. The request's KV cache blocks
    are freed once `collected` is called for the last step that it was part of, since tasks may write to them until
    then.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._places = [_Place() for _ in range(capacity.places)]
        self._seats: dict[int, Seat] = {}
        self._leaving: set[int] = set()

    def __len__(self) -> int:
        """Return the number of requests that hold blocks of the KV cache."""
        return len(self._seats)

    def __contains__(self, request: object) -> bool:
        """Test whether the request with this number runs."""
        return request in self._seats and request not in self._leaving

    @property
    def held(self) -> int:
        """Number of tokens that the requests' blocks of the KV cache have room for."""
        return sum(place.held for place in self._places)

    def enter(self, request: Request) -> bool:
        """Give a request a place (micro-batch) that has room for its prompt and answer: of several, the least full one.

        Returns:
            False if no place has room.
        """
        tokens, capacity = request.blocks_tokens, self.capacity
        fitting = [
            (place.held, number)
            for number, place in enumerate(self._places)
            if len(place.seats) < capacity.sequences
            and place.held + tokens <= capacity.cache_tokens
            and self._takes_prompt(place, request)
        ]
        if not fitting:
            return False
        _, number = min(fitting)
        place, seat = self._places[number], Seat(request, number)
        place.held += tokens
        place.seats[request.number] = self._seats[request.number] = seat
        return True

    def rows(self, phase: Phase, step: int) -> dict[int, Rows]:
        """Take the next step's rows of this phase, and return them by place number; empty if no request has any."""
        by_place: dict[int, list[Seat]] = {}
        for seat in self._next(phase):
            by_place.setdefault(seat.place, []).append(seat)
        rows = {}
        for number in sorted(by_place):
            place, seats = self._places[number], by_place[number]
            shares = [(seat, 1) for seat in seats] if phase == "decode" else self._cut(seats)
            mine = tuple([seat.row(step, tokens) for seat, tokens in shares])
            rows[number] = Rows(phase, mine, tuple(place.departed))
            place.departed = []
        return rows

    def leave(self, request: int) -> None:
        """Have a request take part in no further step; no effect on a request that does not run."""
        seat = self._seats.get(request)
        if seat is None:
            return
        if seat.last_step == NEVER:
            self._free(seat)
        else:
            self._leaving.add(request)

    def collected(self, step: int) -> None:
        """Note that the results of a step are known: free the blocks of requests that are done and in no later step.

        Args:
            step: the step's number.
        """
        done = [seat for seat in self._seats.values() if self._is_over(seat) and seat.last_step <= step]
        for seat in done:
            self._free(seat)
            self._places[seat.place].departed.append(seat.request.number)

    def _cut(self, seats: Iterable[Seat]) -> list[tuple[Seat, int]]:
        """Choose the prompts, or parts of prompts, of a place's next step: as many tokens as the capacity permits.

        seats: the place's requests that have prompt tokens left, in the order in which they are taken.

        Returns:
            Pairs of a request's seat and the number of its prompt tokens in the step.
        """
        room, shares = self.capacity.chunk or self.capacity.prompt_tokens, list[tuple[Seat, int]]()
        for seat in seats:
            if room <= 0:
                break
            tokens = min(seat.to_come, room)
            shares.append((seat, tokens))
            room -= tokens
        return shares

    def _free(self, seat: Seat) -> None:
        number, place = seat.request.number, self._places[seat.place]
        place.held -= seat.request.blocks_tokens
        del place.seats[number], self._seats[number]
        self._leaving.discard(number)

    def _next(self, phase: Phase) -> Iterator[Seat]:
        return (seat for seat in self._seats.values() if seat.phase == phase and not self._is_over(seat))

    def _is_over(self, seat: Seat) -> bool:
        return seat.tokens_left == 0 or seat.request.number in self._leaving

    def _takes_prompt(self, place: _Place, request: Request) -> bool:
        """Test whether a place's next prefill has room for a prompt, or for its first part if prompts are cut."""
        to_come = sum(seat.to_come for seat in place.seats.values())
        if self.capacity.chunk:
            return to_come < self.capacity.chunk
        return to_come + request.prompt <= self.capacity.prompt_tokens
