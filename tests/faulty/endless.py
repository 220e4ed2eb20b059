"""Policies that do not end; `#!` marks the line that Ctrl-C must name."""
from __future__ import annotations

import asyncio
import time

from sound import Streams


class NeverEnds(Streams):
    async def decode(self, step):
        print("decoding", flush=True)
        while True:
            pass  #!


class AwaitsOneHandleForEver(Streams):
    async def decode(self, step):
        handle = step.embed(0)
        await handle
        print("decoding", flush=True)
        while True:
            await handle  #!


class NeverEndsOnHardware(Streams):
    async def decode(self, step):
        if asyncio._get_running_loop() is None:  # in the rehearsal on the virtual clock
            await self.prefill(step)
            return
        print("decoding", flush=True)
        while True:
            pass  #!


class SwallowsEverything(Streams):
    async def decode(self, step):
        while True:
            try:
                step.embed("no micro-batch")  #!
            except BaseException:
                pass


class CountsInC(Streams):
    async def decode(self, step):
        sum(iter(int, 1))  #!


class SleepsForEver(Streams):
    def plan(self, plan):
        super().plan(plan)
        time.sleep(10**6)  #!
