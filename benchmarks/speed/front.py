"""The server's front: its processor time for a token, and the time that it adds to each, with 16 streams at once.

The engine is a fake one that gives each stream a token every 20 ms. For the processor time texts come from the
tokenizer of examples/tiny-mixtral. For the time that it adds tokens are the microseconds at which the engine wrote
them, of a model without a tokenizer, so that the text of a piece says when its tokens were written; the client runs on
the same cores.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
import numpy as np

import fake_engine
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most
from benchmarks.record.results import ROOT
from benchmarks.shared.servers import request, running
from moesched.server.messages import Ask, Token

USERS, TOKENS = 16, 250
PACE_SECONDS = 0.02
MOST_PROCESSOR_MS, MOST_ADDED_MS = 0.15, 2.0
SAYS = list(range(300, 340))
PROGRAM = """
import sys
from pathlib import Path
from moesched.server.options import FrontOptions
from moesched.server.serve import ServerCallbacks, serve
from moesched.system.collector import rare_collections
from moesched.system.signals import ends_in_order
say = ServerCallbacks(lambda starting: None, lambda url, ready, notes: print(url, flush=True), lambda answers: None)
with rare_collections(), ends_in_order():
    serve(Path(sys.argv[1]), FrontOptions(port=0), sys.argv[2:], say)
"""


class StampingEngine(fake_engine.FakeEngine):
    """An engine whose tokens are the microseconds at which they were made."""

    def _next(self, ask: Ask, count: int) -> Token:
        token = super()._next(ask, count)
        return msgspec.structs.replace(token, token=time.monotonic_ns() // 1000)


def claims(result: Result) -> Iterator[Claim]:
    """Both bars."""
    words = f"server, {USERS} streams: the front's"
    for row in result["cases"]:
        if row["part"] == PROCESSOR:
            yield at_most(
                f"{words} processor time for a token", row["milliseconds"], MOST_PROCESSOR_MS, "{:.3f} ms"
            )
        else:
            words = f"{words} time from the engine's token to the client"
            yield Claim(f"{words}, median", f"{row['median']:.2f} ms")
            yield at_most(f"{words}, p99", row["p99"], MOST_ADDED_MS, "{:.2f} ms")


PROCESSOR, ADDED = "processor time", "time added"
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=(PROCESSOR, ADDED),
    rounds=3,
    rounds_help="streams of 5 s; medians of rounds",
    also=("tests/fake_engine.py",),
    keeps_parts=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the parts, and write them."""
    options = BENCHMARK.parse(arguments)
    code = 0
    for part in options.only:
        rounds = track(range(options.rounds), part, still=True)
        measured = processor_times(rounds) if part == PROCESSOR else added_times(rounds)
        code = BENCHMARK.write({"cases": BENCHMARK.joined("cases", part, measured)})
    return code


def processor_times(rounds: Iterable[int]) -> Result:
    """The front's processor time for a token, in milliseconds."""
    model = ROOT / "examples" / "tiny-mixtral"
    times = [processor_ms(model) for _ in rounds]
    return {"milliseconds": round(median(times), 4), "rounds": times}


def added_times(rounds: Iterable[int]) -> Result:
    """The time from the engine to the client, in milliseconds: median and p99 of tokens, medians of rounds."""
    with TemporaryDirectory() as without_tokenizer:
        times = [added_ms(Path(without_tokenizer)) for _ in rounds]
    percents = {"median": 50, "p99": 99}
    return {
        name: round(median(float(np.percentile(each, percent)) for each in times), 3)
        for name, percent in percents.items()
    }


def command(model: Path, kind: str) -> list[str]:
    """A server before this script as its engine."""
    engine = [sys.executable, "-P", "-c", f"import sys; sys.path[:0] = {sys.path!r}; " + ENGINE, kind]
    return [sys.executable, "-P", "-c", PROGRAM, str(model), *engine]


ENGINE = "from benchmarks.speed.front import be_engine; be_engine(sys.argv[1])"


def be_engine(kind: str) -> None:
    """Be the engine of a server: "plain" or "stamping"."""
    make = StampingEngine if kind == "stamping" else fake_engine.FakeEngine
    asyncio.run(fake_engine.main({"says": SAYS, "pace": PACE_SECONDS}, make))


def processor_ms(model: Path) -> float:
    """The front's processor time for each token."""
    with running(command(model, "plain")) as server:
        stream(server.port, 5)
        before = server.process.cpu_times()
        stream(server.port, TOKENS)
        after = server.process.cpu_times()
    seconds = after.user + after.system - before.user - before.system
    return round(1000 * float(seconds) / (USERS * TOKENS), 4)


def added_ms(model: Path) -> list[float]:
    """The time from the engine to the client of each token."""
    with running(command(model, "stamping")) as server:
        stream(server.port, 5)
        arrived = stream(server.port, TOKENS)
    return [
        (now - int(word)) / 1000
        for now, data in arrived
        for line in data.splitlines()
        if line.startswith(b"data: {")
        for word in json.loads(line[6:])["choices"][0]["text"].split()
    ]


def stream(port: int, tokens: int) -> list[tuple[int, bytes]]:
    """Stream answers to all users at once; returns what came, each with the microsecond at which it did."""
    body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": tokens, "stream": True}
    arrived = []
    with ExitStack() as stack:
        clients = stack.enter_context(DefaultSelector())
        for _ in range(USERS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(request(body))
            clients.register(client, EVENT_READ, client)
        while clients.get_map():
            for key, _ in clients.select():
                data = key.data.recv(1 << 16)
                arrived.append((time.monotonic_ns() // 1000, data))
                if not data:
                    clients.unregister(key.fileobj)
    return arrived


if __name__ == "__main__":
    sys.exit(main())
