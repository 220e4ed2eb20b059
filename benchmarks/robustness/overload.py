"""A server that gets ten times what it carries: is everyone answered or refused, and those let in soon enough?

`moesched serve mixtral-0.8b` has 16 places and a queue of 64. What it carries is measured with as many clients as it
lets in, each of which asks again once it has its answer. Then requests arrive at random, ten times as many a second,
each by a connection of its own. The last ones that were refused come back when they were told to. Requests are lists of
token ids, and answers are streamed; times count from before the connection.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil

from benchmarks.record.benchmark import Benchmark
from benchmarks.record.claims import Claim, Result, all_of, at_most, none_of
from benchmarks.shared.kept_models import kept_model
from benchmarks.shared.servers import Server, connected, idle_state, memory_of, page, running

MODEL = "mixtral-0.8b"
PLACES, QUEUE = 16, 64
PROMPT, NEW_TOKENS = 64, (8, 24)
TIMES, MOST_TTFT, MOST_GROWTH = 10, 1.2, 2.0
WARM_UP, SECONDS = 10.0, 60.0
PAGES = 2_000
"""Requests for a page before the front's memory is noted, which grows until Python first collects garbage."""
RETURNING = 40
PATIENCE_SECONDS = 300


def claims(result: Result) -> Iterator[Claim]:
    """Nothing is lost, and nobody who is let in waits too long."""
    words = f"server of {MODEL}, {TIMES} times what it carries for {result['seconds']:g} s:"
    yield Claim(f"{words} requests a second that it carries", f"{result['carried']:.1f}")
    yield all_of(
        f"{words} answered whole, or refused with 429",
        result["answered"] + result["refused"],
        result["asked"],
    )
    yield at_most(
        f"{words} time to the first token, p99, over that in which a full queue of {QUEUE} is carried",
        result["ttft"]["p99"] / result["queue_seconds"],
        MOST_TTFT,
        "{:.2f}x",
    )
    yield all_of(f"{words} let in at once when they come back as told", result["let_in"], result["came_back"])
    yield none_of(f"{words} tokens of the KV cache that are held afterwards", result["held"], result["room"])
    for name, growth in result["growth_percent"].items():
        yield at_most(f"{words} growth of the {name}'s memory", growth, MOST_GROWTH, "{:.1f} %")


BENCHMARK = Benchmark(__file__, __doc__, claims=claims, parts=("overload",))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the server carries, send more, and write what became of it."""
    BENCHMARK.parse(arguments)
    model = kept_model(MODEL)
    command = [sys.executable, "-m", "moesched", "serve", str(model), "--port", "0", "--context", "128"]
    command += ["--policy", "resident", "--batch-size", str(PLACES), "--queue", str(QUEUE)]
    with running(command) as server:
        return BENCHMARK.write(asyncio.run(overloaded(server)))


class Outcome(NamedTuple):
    """The end of a request, and its times.

    Attributes:
        status: the status of the response, or why there is none.
        ended: when it ended; seconds on this process's clock.
        ttft: seconds to the first token.
        told: seconds after which it is to come back.
    """

    status: str
    ended: float
    ttft: float = 0.0
    told: int = 0


async def overloaded(server: Server) -> Result:
    """Measure what a server carries, and what it does with ten times as many requests."""
    clients = Clients(server.port)
    carried = await clients.carried(WARM_UP, SECONDS / 2)
    for _ in range(PAGES):
        await page(server.port, "/health")
    before, used = memory_of(server.process), processor_seconds(server.process)
    outcomes = await clients.arriving(TIMES * carried, SECONDS)
    used = processor_seconds(server.process) - used
    returned = await clients.returning([each for each in outcomes if each.status == "429"][-RETURNING:])
    after = memory_of(server.process)
    state = await idle_state(server.port)
    assert b'"ok"' in await page(server.port, "/health")
    assert (await clients.ask()).status == "200"
    ends = Counter(each.status for each in outcomes)
    ttft = [each.ttft for each in outcomes if each.status == "200"]
    told = [each.told for each in outcomes if each.status == "429"]
    return {
        "seconds": SECONDS,
        "carried": carried,
        "carried_meanwhile": rate_of([each.ended for each in outcomes if each.status == "200"]),
        "asked": len(outcomes),
        "answered": ends["200"],
        "refused": ends["429"],
        "ends": dict(sorted(ends.items())),
        "queue_seconds": QUEUE / carried,
        "ttft": percentiles(ttft),
        "told_to_wait": percentiles(told),
        "came_back": len(returned),
        "let_in": sum(each.status == "200" for each in returned),
        "front_ms_per_request": 1000 * used / len(outcomes),
        "client_late_ms": percentiles([1000 * late for late in clients.late]),
        "held": state["held"],
        "room": state["room"],
        "megabytes": {name: [round(before[name] / 1e6), round(after[name] / 1e6)] for name in before},
        "growth_percent": {name: round(100 * (after[name] / before[name] - 1), 2) for name in before},
    }


class Clients:
    """Clients of a server.

    Attributes:
        late: the seconds by which requests were sent after their times.
    """

    def __init__(self, port: int) -> None:
        self.late: list[float] = []
        self._port = port
        self._random = Random(1)

    async def carried(self, warm_up: float, seconds: float) -> float:
        """Requests that end in a second, with as many clients as are let in."""
        began = time.perf_counter() + warm_up
        until = began + seconds
        ended = 0

        async def client() -> None:
            nonlocal ended
            while time.perf_counter() < until:
                outcome = await self.ask()
                assert outcome.status == "200", outcome
                ended += began <= outcome.ended < until

        await asyncio.gather(*[client() for _ in range(PLACES + QUEUE)])
        return ended / seconds

    async def arriving(self, rate: float, seconds: float) -> list[Outcome]:
        """Ask at random times, `rate` a second; returns what became of the requests, in the order of their times."""
        asked, began, at = [], time.perf_counter(), 0.0
        while (at := at + self._random.expovariate(rate)) < seconds:
            await asyncio.sleep(began + at - time.perf_counter())
            self.late.append(time.perf_counter() - began - at)
            asked.append(asyncio.ensure_future(self.ask()))
        return await asyncio.gather(*asked)

    async def returning(self, refused: Sequence[Outcome]) -> list[Outcome]:
        """Have those who were refused come back when they were told to."""

        async def again(outcome: Outcome) -> Outcome:
            await asyncio.sleep(outcome.ended + outcome.told - time.perf_counter())
            return await self.ask()

        return await asyncio.gather(*[again(each) for each in refused])

    async def ask(self) -> Outcome:
        """Ask once."""
        try:
            return await asyncio.wait_for(self._asked(), PATIENCE_SECONDS)
        except (OSError, TimeoutError, EOFError) as error:
            return Outcome(f"lost: {type(error).__name__}", time.perf_counter())

    async def _asked(self) -> Outcome:
        began = time.perf_counter()
        reader, writer = await connected(self._port, self._body())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            status = head.split(b" ", 2)[1].decode()
            if status != "200":
                told = told_in(head)
                lacks = status == "429" and not told
                return Outcome(
                    f"{status} without Retry-After" * lacks or status, time.perf_counter(), told=told
                )
            await reader.readuntil(b"data: {")
            ttft = time.perf_counter() - began
            whole = (await reader.read()).find(b"[DONE]") >= 0
            return Outcome("200" if whole else "lost: cut", time.perf_counter(), ttft)
        finally:
            writer.transport.abort()

    def _body(self) -> bytes:
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": [self._random.randrange(30_000) for _ in range(PROMPT)],
            "max_tokens": self._random.randint(*NEW_TOKENS),
            "temperature": 0,
            "stream": True,
        }
        return msgspec.json.encode(body)


def told_in(head: bytes) -> int:
    """The seconds of `Retry-After`; 0 without it."""
    _, found, rest = head.lower().partition(b"retry-after: ")
    return int(rest.partition(b"\r\n")[0]) if found else 0


def processor_seconds(process: psutil.Process) -> float:
    """Processor time of a process without its children."""
    times = process.cpu_times()
    return float(times.user + times.system)


def rate_of(ends: Sequence[float]) -> float:
    """Requests that ended in a second, without the first and the last ones, at which places were free."""
    full = sorted(ends)[PLACES:-PLACES]
    return (len(full) - 1) / (full[-1] - full[0]) if len(full) > 1 else 0.0


def percentiles(figures: Sequence[float]) -> dict[str, float]:
    """Median, p99 and the largest of some figures."""
    p50, p99, most = np.percentile(figures or [0.0], (50, 99, 100))
    return {"p50": float(p50), "p99": float(p99), "most": float(most)}


if __name__ == "__main__":
    sys.exit(main())
