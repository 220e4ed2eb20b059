"""The clock of a machine that is emulated in slow motion, and waiting until a moment on it."""

from __future__ import annotations

from time import perf_counter_ns, sleep

from moesched.seams import Dilations

SPUN_NANOSECONDS = 80_000
"""The last part of a wait, which is spun, since sleeps end late, even `sleep(0)` by some 60 µs; real time."""

NAP_NANOSECONDS = 2_000_000
"""The longest sleep before the clock is read again, since its pace may have changed; real time."""


class DilatedClock:
    """A clock of an emulated machine: stands at 0 until `run`, then runs slower than the real clock by the dilation."""

    def __init__(self) -> None:
        self._pace: tuple[int, int, float] | None = None
        """Real and emulated nanoseconds at the last change of pace, and the dilation since; replaced as a whole."""

    @property
    def dilation(self) -> float:
        """Real seconds for each emulated second, at present."""
        return 1.0 if self._pace is None else self._pace[2]

    def now(self) -> int:
        """Nanoseconds of the emulated machine since the first `run`."""
        if self._pace is None:
            return 0
        real, emulated, dilation = self._pace
        return emulated + int((perf_counter_ns() - real) / dilation)

    def run(self, dilation: float) -> None:
        """Run with another dilation from now on."""
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
    """Sets the clock's dilation: first that of prefill, and that of decode once every prompt has its first token.

    prompts: number of prefill chunks that end with the sampling of a token.
    """

    def __init__(self, time: DilatedClock, dilations: Dilations, prompts: int) -> None:
        self._time = time
        self._decode = dilations.decode
        self._left = prompts
        time.run(dilations.prefill)

    def count_prefilled(self) -> None:
        """Count a chunk whose tokens were sampled; called on a single lane."""
        self._left -= 1
        if not self._left:
            self._time.run(self._decode)
