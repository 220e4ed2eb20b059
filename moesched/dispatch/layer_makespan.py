"""Assigns a layer's experts to host and accelerator so that the layer's makespan is the least.

Resident experts run on the accelerator from the start. Each missing expert is either fetched and runs on the
accelerator when it has arrived, or runs on the host. Fetches follow each other, and so do the host's experts. Hidden
states for the host's experts are copied to the host first, and their outputs are copied back last. All experts take
equally long to fetch. Host experts and fetches share the bandwidth of host memory, so each is slower while both are
active. All times are in seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple, Protocol, TypeVar

N = TypeVar("N", int, float)

FEW = 10
"""Largest number of experts for which all assignments are searched; for more, only those by thresholds of tokens."""
NEAR = 1.01
"""An assignment is accepted if its makespan is within this factor of a lower bound."""


class LayerCosts(Protocol):
    """Latencies of running one expert and of copying rows, if nothing else runs.

    An expert never takes less time if it gets more tokens.
    """

    @property
    def transfer(self) -> float:
        """Seconds to move one expert's weights to the accelerator; equal for all experts."""

    def at_host(self, tokens: int) -> float:
        """Return the seconds that one expert with this number of tokens takes on the host."""

    def at_accelerator(self, tokens: int) -> float:
        """Return the seconds that one expert with this number of tokens takes on the accelerator.

        The time to fetch its weights is not included.
        """

    def to_host(self, tokens: int) -> float:
        """Return the seconds to copy the hidden states of `tokens` tokens to the host."""

    def from_host(self, rows: int) -> float:
        """Return the seconds to copy `rows` rows of expert outputs from the host back to the accelerator."""

    def side_by_side(self, tokens: int) -> tuple[float, float]:
        """Return the speeds of a host expert of `tokens` tokens and of a fetch while both run; 1 is full speed."""


class LayerDecision(NamedTuple):
    """The experts of a layer that do not run where they are kept, and the layer's makespan.

    Attributes:
        away: experts on the accelerator that run on the host, as indices into `ChosenExperts.resident`.
        fetched: experts that are fetched to the accelerator, in this order, as indices into `ChosenExperts.missing`.
        seconds: time from the end of routing until the last output is on the accelerator.
    """

    away: tuple[int, ...]
    fetched: tuple[int, ...]
    seconds: float


class ChosenExperts:
    """The chosen experts of a layer, each given by its number of tokens, with their latencies.

    Args:
        resident: number of tokens of each chosen expert that is on the accelerator, ascending.
        missing: number of tokens of each chosen expert that is not on the accelerator, descending.
        costs: latencies of experts and copies.
        resident_on_host: whether the host also has the weights of the resident experts.
    """

    def __init__(
        self, resident: Sequence[int], missing: Sequence[int], costs: LayerCosts, *, resident_on_host: bool
    ) -> None:
        self.resident, self.missing = resident, missing
        self.movable = len(resident) if resident_on_host else 0
        here, there = costs.at_accelerator, costs.at_host
        self.resident_here, self.missing_here = list(map(here, resident)), list(map(here, missing))
        self.resident_there, self.missing_there = list(map(there, resident)), list(map(there, missing))
        self.transfer = costs.transfer
        self._to_host = costs.to_host(max(resident[-1] if resident else 1, missing[0] if missing else 1))
        self._from_host = costs.from_host
        self._host_rate, self._link_rate = costs.side_by_side(missing[len(missing) // 2] if missing else 1)

    def end(self, host: float, here: float, fetched: Sequence[float], rows: int) -> float:
        """Return the layer's makespan in seconds; it never decreases if an argument grows.

        Args:
            host: seconds of the host's experts without contention; 0 for none.
            here: seconds of the resident experts that run on the accelerator.
            fetched: seconds of each fetched expert on the accelerator, in the order of the fetches.
            rows: number of rows of outputs that the host returns.
        """
        transfer, link_rate = self.transfer, self._link_rate
        busy = self.busy(host, len(fetched))
        held_up = (1.0 - link_rate) * busy
        end, arrival, moving = here, 0.0, 0.0
        for seconds in fetched:
            moving += transfer
            arrival = moving / link_rate
            if arrival > moving + held_up:
                arrival = moving + held_up
            if arrival > end:
                end = arrival
            end += seconds
        if host:
            end = max(end, max(self._to_host + busy, arrival) + self._from_host(rows))
        return end

    def copies(self, rows: int) -> float:
        """Return the seconds to copy hidden states to the host and `rows` rows of outputs back.

        The number of hidden states is assumed to be the largest number of tokens of any chosen expert, even if that
        expert does not run on the host.
        """
        return self._to_host + self._from_host(rows)

    def busy(self, host: float, fetched: int) -> float:
        """Return the seconds that all of the host's experts take, slowed down while experts are fetched.

        Args:
            host: seconds that the host's experts would take without fetches.
            fetched: number of fetched experts.
        """
        throughout = host / self._host_rate
        for_a_time = host + fetched * self.transfer * (1.0 - self._host_rate) / self._link_rate
        return throughout if throughout < for_a_time else for_a_time

    def moving(self, fetched: int, busy: float) -> float:
        """Return the seconds that all fetches take, slowed down while the host runs experts.

        Args:
            fetched: number of fetched experts.
            busy: seconds during which the host runs experts.
        """
        alone = fetched * self.transfer
        throughout, for_a_time = alone / self._link_rate, alone + (1.0 - self._link_rate) * busy
        return throughout if throughout < for_a_time else for_a_time


def decide(layer: ChosenExperts) -> LayerDecision:
    """Choose the assignment of a layer's experts with the least makespan.

    The makespan is within 1 % of the optimum for up to `FEW` chosen experts; for more, a heuristic is used.
    """
    thresholds = _Thresholds(layer)
    if len(layer.resident) + len(layer.missing) > FEW:
        return thresholds.balanced().choice()
    best = thresholds.best()
    return best.choice() if thresholds.none_beats(best) else _Search(layer, best.choice()).best()


class _Threshold(NamedTuple):
    """An assignment of a layer's experts by two thresholds, both numbers of tokens.

    Resident experts below the first threshold run on the host, and missing experts above the second are fetched.

    Attributes:
        seconds: makespan of the layer.
        away: number of resident experts that run on the host.
        fetched: number of missing experts that are fetched.
    """

    seconds: float
    away: int
    fetched: int

    def choice(self) -> LayerDecision:
        return LayerDecision(tuple(range(self.away)), tuple(range(self.fetched)), self.seconds)


class _Thresholds:
    """Assignments by two thresholds of tokens, given as the pair (away, fetched).

    The `away` resident experts with the fewest tokens run on the host, and the `fetched` missing experts with the most
    tokens are fetched. No other assignment with the same two numbers leaves the host less work.
    """

    def __init__(self, layer: ChosenExperts) -> None:
        self._layer = layer
        self._gathered = _sums(layer.missing_here)
        self._here = _sums_of_rest(layer.resident_here)
        self._away, self._away_rows = _sums(layer.resident_there), _sums(layer.resident)
        self._left, self._left_rows = _sums_of_rest(layer.missing_there), _sums_of_rest(layer.missing)

    def balanced(self) -> _Threshold:
        """Return the best of a few assignments: both processors about equally busy, no fetches, or all fetches."""
        even = self._even(0)
        best = self._balanced(0, even)
        if self._layer.movable and not self._host_is_last(0, even):
            sent = bisect_left(range(self._layer.movable), True, 1, key=self._host_is_last)
            for away in (sent - 1, sent):
                best = min(best, self._balanced(away, self._even(away)))
        return best

    def best(self) -> _Threshold:
        """Return an assignment by thresholds whose makespan is within 1 % of the least that thresholds can reach."""
        left, gathered, transfer = self._left, self._gathered, self._layer.transfer
        last = [0.0, *self._layer.missing_here, inf]
        likely = 0
        while left[likely] > (likely + 1) * transfer + last[likely + 1]:
            likely += 1  # one more can be fetched and run before the host is done
        known = 0, likely
        best = self._with(*known)
        enough = best.seconds / NEAR
        for away in range(self._layer.movable + 1):
            sent, here = self._away[away], self._here[away]
            for fetched, waiting in enumerate(left):
                if fetched * transfer + last[fetched] >= enough or here + gathered[fetched] >= enough:
                    break  # more fetches only end later
                if sent + waiting < enough and (away, fetched) != known:
                    best = min(best, self._with(away, fetched))
                    enough = best.seconds / NEAR
        return best

    def none_beats(self, best: _Threshold) -> bool:
        """Test whether it is certain that no assignment, by thresholds or not, is more than 1 % faster than `best`."""
        layer, enough = self._layer, best.seconds / NEAR
        resident, missing = layer.resident_here, layer.missing_here
        if resident[:1] == resident[-1:] and missing[:1] == missing[-1:]:
            return True  # all experts are equal: only their numbers matter
        for away in range(layer.movable + 1):
            here = self._here[0] - self._here[len(layer.resident) - away]
            for fetched, waiting in enumerate(self._left):
                host = self._away[away] + waiting
                if host < enough and here < enough and fetched * layer.transfer < enough:
                    shortest = missing[len(missing) - fetched :]
                    if layer.end(host, here, shortest, 0) < enough:
                        return False
        return True

    def _host_is_last(self, away: int, even: int | None = None) -> bool:
        """Test whether the host's experts take at least as long as the resident experts that stay on the accelerator.

        Args:
            away: number of resident experts that run on the host.
            even: number of missing experts that are fetched, while the host runs all others; None for the number that
                `_even` returns.
        """
        even = self._even(away) if even is None else even
        return self._away[away] + self._left[even] >= self._here[away]

    def _even(self, away: int) -> int:
        """Return the least number of fetches with which the accelerator ends no earlier than the host.

        If no number of fetches is enough, the result is the number of all missing experts. The accelerator ends when
        its experts have run and all fetches have arrived.

        away: number of resident experts that run on the host.
        """
        layer, sent, here = self._layer, self._away[away], self._here[away]

        def accelerator_is_last(fetched: int) -> bool:
            busy = layer.busy(sent + self._left[fetched], fetched)
            host = busy + layer.copies(self._away_rows[away] + self._left_rows[fetched])
            return here + self._gathered[fetched] >= host or layer.moving(fetched, busy) >= host

        return bisect_left(range(len(self._left) - 1), True, key=accelerator_is_last)

    def _balanced(self, away: int, even: int) -> _Threshold:
        best = self._with(away, even)
        for fetched in (max(0, even - 1), 0, len(self._left) - 1):
            if self._least(away, fetched) < best.seconds:
                best = min(best, self._with(away, fetched))
        return best

    def _least(self, away: int, fetched: int) -> float:
        """Return a lower bound, in seconds, of the makespan of the assignment (away, fetched).

        Args:
            away: number of resident experts that run on the host.
            fetched: number of missing experts that are fetched.
        """
        host, here = self._away[away] + self._left[fetched], self._here[away] + self._gathered[fetched]
        return max(host, here, fetched * self._layer.transfer)

    def _with(self, away: int, fetched: int) -> _Threshold:
        layer = self._layer
        host = self._away[away] + self._left[fetched]
        rows = self._away_rows[away] + self._left_rows[fetched]
        end = layer.end(host, self._here[away], layer.missing_here[:fetched], rows)
        return _Threshold(end, away, fetched)


class _Search:
    """Branch-and-bound search over all assignments of a layer's experts.

    Missing experts are assigned first, in descending order of tokens, then resident ones.
    """

    def __init__(self, layer: ChosenExperts, best: LayerDecision) -> None:
        self._layer = layer
        self._best = best
        self._experts = len(layer.missing) + layer.movable
        self._here = layer.missing_here + layer.resident_here[: layer.movable]
        self._there = layer.missing_there + layer.resident_there[: layer.movable]
        self._rows = [*layer.missing, *layer.resident[: layer.movable]]
        moved = [min(there, layer.transfer) for there in layer.missing_there]
        self._least_moved = _sums_of_rest([*moved, *[0.0] * layer.movable])
        self._least = _sums_of_rest(list(map(min, self._here, self._there)))

    def best(self) -> LayerDecision:
        """Return an assignment whose makespan is within 1 % of the least."""
        self._look(0, 0.0, sum(self._layer.resident_here[self._layer.movable :]), (), 0, ())
        return self._best

    def _look(
        self, place: int, host: float, here: float, fetched: tuple[int, ...], rows: int, away: tuple[int, ...]
    ) -> None:
        """Search all assignments that complete a partial one, and keep the best in `self._best`.

        Args:
            place: number of experts that are assigned already.
            host: seconds of the experts assigned to the host.
            here: seconds of the resident experts that run on the accelerator.
            fetched: indices of the missing experts that are fetched.
            rows: number of rows of outputs of the experts assigned to the host.
            away: indices of the resident experts that run on the host.
        """
        layer, enough = self._layer, self._best.seconds / NEAR
        gathered = [self._here[each] for each in fetched]
        computing = host + here + sum(gathered) + self._least[place]
        moving = host + len(fetched) * layer.transfer + self._least_moved[place]
        if computing >= 2 * enough or moving >= 2 * enough:
            return
        end = layer.end(host, here, gathered, rows)
        if end >= enough:
            return
        if place == self._experts:
            self._best = LayerDecision(away, fetched, end)
            return
        there, after, resident = host + self._there[place], place + 1, place - len(layer.missing)
        more = rows + self._rows[place]
        if resident < 0:
            self._look(after, host, here, (*fetched, place), rows, away)
            self._look(after, there, here, fetched, more, away)
        else:
            self._look(after, host, here + self._here[place], fetched, rows, away)
            self._look(after, there, here, fetched, more, (*away, resident))


def _sums(values: Iterable[N]) -> list[N]:
    """Return the sums of the first 0, 1, 2, ... values; the last is the sum of all."""
    sums: list[N] = [0]
    sums += accumulate(values)
    return sums


def _sums_of_rest(values: Sequence[N]) -> list[N]:
    """Return the sum of all values, of all but the first, of all but the first two, and so on; the last sum is 0."""
    sums = _sums(reversed(values))
    sums.reverse()
    return sums
