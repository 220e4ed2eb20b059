"""A server under thousands of requests: is one lost, is a block held afterwards, does memory grow?

`moesched serve examples/tiny-mixtral` gets requests of random lengths, numbers of answers and stop strings, 64 at once.
A tenth of their clients go away, and a tenth of the requests cannot be answered. Memory is compared after a fifth and
after all.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from benchmarks.record.benchmark import Benchmark
from benchmarks.record.claims import Claim, Result, all_of, at_most, none_of
from benchmarks.record.results import ROOT
from benchmarks.shared.servers import Server, connected, idle_state, memory_of, running

REQUESTS, AT_ONCE = 5_000, 64
PATIENCE_SECONDS = 120
MOST_GROWTH = 2.0
COMMAND = [sys.executable, "-m", "moesched", "serve", str(ROOT / "examples" / "tiny-mixtral")]
COMMAND += ["--port", "0", "--queue", "256"]
WRONG: list[dict[str, Any]] = [
    {"temperature": -1},
    {"nope": 1},
    {"prompt": 5},
    {"model": "other"},
    {"max_tokens": 10**6},
    {"prompt": [99_999]},
]


def claims(result: Result) -> Iterator[Claim]:
    """Nothing is lost, held or grows."""
    words = f"server, {result['requests']:,} requests, {AT_ONCE} at once:"
    yield all_of(f"{words} answered whole, refused or left", result["ended"], result["requests"])
    yield none_of(f"{words} tokens of the KV cache that are held afterwards", result["held"], result["room"])
    for name, growth in result["growth_percent"].items():
        yield at_most(f"{words} growth of the {name}'s memory", growth, MOST_GROWTH, "{:.1f} %")


BENCHMARK = Benchmark(__file__, __doc__, claims=claims, parts=("requests",))


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask, and write what became of the requests."""
    BENCHMARK.parse(arguments)
    with running(COMMAND) as server:
        return BENCHMARK.write(asyncio.run(asked(server)))


async def asked(server: Server) -> Result:
    """Ask all requests."""
    random, ends, turn = Random(1), Counter[str](), asyncio.Semaphore(AT_ONCE)

    async def bounded() -> None:
        async with turn:
            ends[await one(server.port, random)] += 1

    first = REQUESTS // 5
    await asyncio.gather(*[bounded() for _ in range(first)])
    before = memory_of(server.process)
    await asyncio.gather(*[bounded() for _ in range(REQUESTS - first)])
    after = memory_of(server.process)
    state = await idle_state(server.port)
    return {
        "requests": REQUESTS,
        "ended": sum(count for end, count in ends.items() if not end.startswith("lost")),
        "ends": dict(sorted(ends.items())),
        "held": state["held"],
        "room": state["room"],
        "megabytes": {name: [round(before[name] / 1e6), round(after[name] / 1e6)] for name in before},
        "growth_percent": {name: round(100 * (after[name] / before[name] - 1), 2) for name in before},
    }


async def one(port: int, random: Random) -> str:
    """Ask one request; returns what became of it."""
    kind, streamed = random.random(), random.random() < 0.5
    body: dict[str, Any] = {
        "model": "tiny-mixtral",
        "prompt": " ".join(["Return the"] * random.randint(1, 30)),
        "max_tokens": random.randint(1, 60),
        "n": random.choice([1, 1, 1, 2]),
        "stop": random.choice([None, None, "the", ["zz", ". "]]),
        "stream": streamed,
    }
    if kind < 0.1:
        body |= random.choice(WRONG)
    reader, writer = await connected(port, body)
    try:
        if kind >= 0.9:
            await asyncio.sleep(random.random() / 4)
            return "left"
        answer = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    except (OSError, TimeoutError) as error:
        return f"lost: {type(error).__name__}"
    finally:
        writer.transport.abort()
    status = answer.split(b" ", 2)[1].decode()
    whole = b"[DONE]" if streamed and status == "200" else b"}"
    return status if whole in answer and status in ("200", "400", "404", "429") else f"lost: {status}"


if __name__ == "__main__":
    sys.exit(main())
