"""The clock of an emulated machine, which runs slower than real time."""

from __future__ import annotations

from time import perf_counter_ns, sleep

from moesched.seams import Dilations

SPUN_NANOSECONDS = 80_000
"""Real nanoseconds at the end of a wait that are spent in a loop, as sleeps end late: `sleep(0)` by some 60 µs."""

NAP_NANOSECONDS = 2_000_000
"""Longest sleep in real nanoseconds, after which the clock is read again, since the dilation may have changed."""


class DilatedClock:
    """The clock of an emulated machine: stands at 0 until `run`, then runs slower than real time by the dilation."""

    def __init__(self) -> None:
        self._pace: tuple[int, int, float] | None = None
        """The real and the emulated nanoseconds at the last change of dilation, and the dilation since then."""

    @property
    def dilation(self) -> float:
        """Real seconds for each emulated second at present; 1 before the first `run`."""
        return 1.0 if self._pace is None else self._pace[2]

    def now(self) -> int:
        """Nanoseconds of the emulated machine since the first `run`."""
        if self._pace is None:
            return 0
        real, emulated, dilation = self._pace
        return emulated + int((perf_counter_ns() - real) / dilation)

    def run(self, dilation: float) -> None:
        """Start the clock, or change the speed of a clock that runs.

        dilation: real seconds for each emulated second from now on.
        """
        self._pace = perf_counter_ns(), self.now(), dilation

    def wait_until(self, moment: int) -> None:
        """Wait until the emulated machine's clock reaches `moment` (nanoseconds).

        The thread sleeps for most of this time, and spins for the rest, since a sleep may end late.
        """
        while (left := (moment - self.now()) * self.dilation) > SPUN_NANOSECONDS:
            sleep(min(left - SPUN_NANOSECONDS, NAP_NANOSECONDS) / 1e9)
        while self.now() < moment:
            pass


class Pace:
    """Sets a clock's dilation: first the one for prefill; once all prompts have a first token, the one for decode.

    Args:
        time: the clock; the constructor starts it.
        dilations: the dilations for prefill and for decode.
        prompts: number of prefill chunks in which at least one prompt ends. `count_prefilled` is called for each of
            them; prefill has ended with the last of these calls.
    """

    def __init__(self, time: DilatedClock, dilations: Dilations, prompts: int) -> None:
        self._time = time
        self._decode = dilations.decode
        self._left = prompts
        time.run(dilations.prefill)

    def count_prefilled(self) -> None:
        """Count a chunk in which a prompt ends, once its tokens are sampled; always call this from the same thread."""
        self._left -= 1
        if not self._left:
            self._time.run(self._decode)
