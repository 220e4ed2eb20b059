"""The clock of an emulated machine, which runs slower than real time."""

from __future__ import annotations

from time import perf_counter_ns, sleep

from moesched.seams import Dilations

SPUN_NANOSECONDS = 80_000
"""Real nanoseconds at the end of a wait that are spent in a loop, since a sleep ends late, `sleep(0)` by some 60 µs."""

NAP_NANOSECONDS = 2_000_000
"""Real nanoseconds of the longest sleep before the clock is read again, whose pace may have changed."""


class DilatedClock:
    """The clock of an emulated machine: stands at 0 until `run`, then runs slower than real time by the dilation."""

    def __init__(self) -> None:
        self._pace: tuple[int, int, float] | None = None
        """The real and the emulated nanoseconds at the last change of dilation, and the dilation since then."""

    @property
    def dilation(self) -> float:
        """The real seconds for each emulated second, at present."""
        return 1.0 if self._pace is None else self._pace[2]

    def now(self) -> int:
        """Nanoseconds of the emulated machine since the first `run`."""
        if self._pace is None:
            return 0
        real, emulated, dilation = self._pace
        return emulated + int((perf_counter_ns() - real) / dilation)

    def run(self, dilation: float) -> None:
        """Start the clock, or go on with another dilation from now on."""
        self._pace = perf_counter_ns(), self.now(), dilation

    def wait_until(self, moment: int) -> None:
        """Wait until the emulated machine's clock shows `moment`.

        On an idle core this returns some 20 µs of real time later. Other threads can run meanwhile, except at the very
        end.
        """
        while (left := (moment - self.now()) * self.dilation) > SPUN_NANOSECONDS:
            sleep(min(left - SPUN_NANOSECONDS, NAP_NANOSECONDS) / 1e9)
        while self.now() < moment:
            pass


class Pace:
    """Sets the clock's dilation: first that of prefill; that of decode once all prompts have their first token.

    prompts: number of prefill's chunks at whose end tokens are sampled.
    """

    def __init__(self, time: DilatedClock, dilations: Dilations, prompts: int) -> None:
        self._time = time
        self._decode = dilations.decode
        self._left = prompts
        time.run(dilations.prefill)

    def count_prefilled(self) -> None:
        """Count a chunk whose tokens were sampled; to be called on a single lane."""
        self._left -= 1
        if not self._left:
            self._time.run(self._decode)
