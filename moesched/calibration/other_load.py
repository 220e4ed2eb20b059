"""How busy others keep this machine while something is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path


class OtherLoad:
    """Cores that other processes, and the machine's host, kept busy since it was made.

    Interrupts are left out: they serve this process's reads as well as anybody's.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter(), _busy_seconds_of_others()

    def cores(self) -> float:
        """0 where the system does not tell."""
        start, busy = self._since
        return max(0.0, _busy_seconds_of_others() - busy) / (time.perf_counter() - start)


def _busy_seconds_of_others() -> float:
    try:
        numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _, _, _, _, stolen = map(int, numbers)
    everybody = (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return everybody - own.user - own.system
