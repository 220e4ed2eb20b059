"""An all-reduce of 24 KB (one token's partial sum of DBRX) between 2 processes, each pinned to a core, over loopback.

Both processes hold every transport open and take them in turns, EXCHANGES at a time, so that what else the machine
does meets all alike; the first tenth of each turn is not counted. Every exchange is the whole: send, receive, add.

zeromq, CURVE, in the engine    the transport on the network lane of the real-time driver: from one exchange's end to
                                the next one's, submitted ahead (submitted) or each awaited by the policy (awaited)
zeromq, CURVE, called           the same without engine
bare zeromq                     two DEALERs, no header, no checks, no timeout: what the library itself takes
grpc                            grpc.aio, one call for each part, as in RACS'24; its messages are not encrypted
gloo, envoy                     the other transports

Then a token: 40 layers, each 200 µs of products on a lane beside, then the exchange, as a policy submits them. What
it takes beyond the products is the overhead. Bare sockets do the same without engine.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from statistics import median, quantiles
from typing import Any

import zmq

from benchmarks.record.benchmark import Benchmark, progress
from benchmarks.record.claims import Claim, Result, at_least, at_most
from benchmarks.record.tables import table_of
from benchmarks.speed._all_reduce_cases import CASES, LAYERS, Setup, measure

BAR_PLAIN, BAR_CURVE, BAR_TOKEN, BAR_GRPC = 100e-6, 120e-6, 4e-3, 4.0
BAR_OVER_BARE = 1.4
EXCHANGES = 150
IN_ENGINE, BARE = "zeromq, {}, in the engine, submitted", "bare zeromq, {}"


def claims(result: Result) -> Iterator[Claim]:
    """Between two processes, over loopback."""
    seconds, over_bare = result["seconds"], result["over_bare"]
    plain, curve = (seconds[IN_ENGINE.format(keys)]["p50"] for keys in ("plain", "CURVE"))
    token = result[f"overhead_seconds_of_{LAYERS}_layers"]["zeromq, CURVE"]["p50"]
    for words, figure, bar in (
        ("all-reduce of 24 KB, plain, submitted to the engine, median", plain, BAR_PLAIN),
        ("all-reduce of 24 KB, encrypted, submitted to the engine, median", curve, BAR_CURVE),
        ("40 encrypted exchanges of a token, beyond its products", token, BAR_TOKEN),
    ):
        yield at_most(words, 1e6 * figure, 1e6 * bar, "{:,.0f} µs")
    for keys, said in {"plain": "plain", "CURVE": "encrypted"}.items():
        words = f"an exchange in the engine over one of bare sockets, {said}"
        yield at_most(words, over_bare[keys], BAR_OVER_BARE, "{:.2f}x")
    yield at_least("gRPC's median over ours, encrypted", seconds["grpc"]["p50"] / curve, BAR_GRPC, "{:.1f}")


PERCENTILES = {"µs, p50": "{p50:.0f}", "p10": "{p10:.0f}", "p90": "{p90:.0f}", "p99": "{p99:.0f}"}


def tables(result: Result) -> dict[str, str]:
    """Transports beside each other."""
    overheads = result["overhead_seconds_of_40_layers"]
    named = result["seconds"] | {
        f"{name}: overhead of the 40 exchanges of a token": each for name, each in overheads.items()
    }
    rows = [
        {"name": name, **{p: 1e6 * seconds for p, seconds in figures.items()}}
        for name, figures in named.items()
    ]
    return {
        "all-reduce": table_of(
            rows, {f"an all-reduce of {result['bytes']} bytes between 2 ranks": "{name}", **PERCENTILES}
        )
    }


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    tables=tables,
    parts=CASES,
    rounds=24,
    rounds_help="turns of each transport",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in two processes and write the figures."""
    options = BENCHMARK.parse(arguments)
    with progress.status("exchanging"):
        seconds, tokens = in_two_processes(options.rounds, options.only)
    figures = {name: summary(times) for name, times in seconds.items()}
    overheads = {name: summary(times) for name, times in tokens.items()}
    return BENCHMARK.write(
        {
            "bytes": 6144 * 4,
            "ranks": 2,
            "seconds": figures,
            f"overhead_seconds_of_{LAYERS}_layers": overheads,
            "over_bare": {keys: over_bare(seconds, keys, options.rounds) for keys in ("plain", "CURVE")}
            if options.only == CASES
            else {},
        }
    )


def over_bare(seconds: dict[str, list[float]], keys: str, rounds: int) -> float:
    """An exchange in the engine over one of bare sockets: the median of the ratios of each round's medians."""
    ours, bare = (medians(seconds[name.format(keys)], rounds) for name in (IN_ENGINE, BARE))
    return median(mine / floor for mine, floor in zip(ours, bare, strict=True))


def medians(seconds: list[float], rounds: int) -> list[float]:
    """The median of each round."""
    size = len(seconds) // rounds
    return [median(seconds[start : start + size]) for start in range(0, len(seconds), size)]


def in_two_processes(
    rounds: int, only: Sequence[str]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The seconds of each exchange and of each token's overhead, of rank 0, by what was measured."""
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    setup = Setup(
        ports=free_ports(32),
        keys=[tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(2)],
        exchanges=EXCHANGES,
        rounds=rounds,
        only=tuple(only),
    )
    near, far = context.Pipe()
    ranks = [
        context.Process(
            target=run_rank, args=(setup, rank, cores[rank % len(cores)], far if rank == 0 else None)
        )
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    far.close()
    try:
        found: tuple[dict[str, list[float]], dict[str, list[float]]] = near.recv()
        return found
    except EOFError:
        raise SystemExit("a rank failed; what it printed says why") from None
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()


def run_rank(setup: Setup, rank: int, core: int, results: Connection | None) -> None:
    """One rank, on its core."""
    os.sched_setaffinity(0, {core})
    found = measure(setup, rank)
    if results is not None:
        results.send(found)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def summary(seconds: list[float]) -> dict[str, Any]:
    """The figures of one row."""
    tenths, hundredths = quantiles(seconds, n=10), quantiles(seconds, n=100)
    return {
        "p10": tenths[0],
        "p50": median(seconds),
        "p90": tenths[-1],
        "p99": hundredths[-1],
        "n": len(seconds),
    }


if __name__ == "__main__":
    sys.exit(main())
