"""A fake engine as a process, whose answers wait after their first token while another process has a file locked."""

from __future__ import annotations

import asyncio
import fcntl
import sys
from pathlib import Path

import msgspec

from fake_engine import FakeEngine, main
from moesched.server.messages import Ask, Token


class LockedEngine(FakeEngine):
    """Waits for the lock of a file, the program's second argument."""

    def _next(self, ask: Ask, count: int) -> Token:
        if count:
            with Path(sys.argv[2]).open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        return super()._next(ask, count)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1]), LockedEngine))
