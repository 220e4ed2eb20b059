"""Damaged files, messages and frames: each is accepted or refused with one line, within 2 s and 500 MB.

Each parser gets its damaged files in a process of its own, `--rounds` of them; then each command that reads such files
gets `--commands`. The result is written after each. With `--atheris SECONDS`, parsers are fuzzed by coverage instead
(pip install 'moesched[fuzz]').
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.record.benchmark import Benchmark, progress
from benchmarks.record.claims import Claim, Result, none_of
from benchmarks.robustness._fuzzed_commands import COMMANDS, damaged_commands
from mutations import mutated
from parsers import PARSERS, Bench

MOST_SECONDS = 2.0
MOST_BYTES = 500_000_000
HANG_SECONDS = 20
SHOWN_PROBLEMS = 20


def claims(result: Result) -> Iterator[Claim]:
    """Damaged files and messages, by parser, and damaged files of commands."""
    for kind, words in (("parsers", "files and messages"), ("commands", "files of commands")):
        found = result[kind].values()
        files, problems = (sum(each[name] for each in found) for name in ("files", "problems"))
        if files:
            yield none_of(
                f"damaged {words} that did not end in one line within 2 s and 500 MB", problems, files
            )


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=(*PARSERS, *COMMANDS),
    rounds=100_000,
    rounds_help="damaged files of each parser",
    keeps_parts=True,
)
BENCHMARK.parser.add_argument("--commands", type=int, default=200, help="damaged files of each command")
BENCHMARK.parser.add_argument("--seconds", type=float, default=3600.0, help="most seconds of each parser")
BENCHMARK.parser.add_argument("--seed", type=int, default=0)
BENCHMARK.parser.add_argument("--atheris", type=int, metavar="SECONDS", help="fuzz one parser by coverage")


def main(arguments: Sequence[str] | None = None) -> None:
    """Damage all files and write what came of them."""
    options = BENCHMARK.parse(arguments)
    if options.atheris:
        fuzz_by_coverage(options.only[0], options.atheris)
    result: dict[str, Any] = {kind: BENCHMARK.stored().get(kind, {}) for kind in ("parsers", "commands")}
    for name in options.only:
        parses = name in PARSERS
        work, count = (fuzz_parser, options.rounds) if parses else (fuzz_command, options.commands)
        with progress.status(f"{count:,} damaged files: {name}"):
            found = _apart(work, name, count, options.seed, options.seconds)
        progress.print(
            f"{name}: {found['files']:,} files, {found['problems']} problems", *found["first_problems"]
        )
        result["parsers" if parses else "commands"][name] = found
        BENCHMARK.write(result)


def _apart(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call a function in a process of its own, whose peak memory is then its own, too."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool:
            return {"files": 0, "problems": 1, "first_problems": ["the process died"]}


def fuzz_parser(name: str, rounds: int, seed: int, most_seconds: float) -> dict[str, Any]:
    """Damage one parser's file again and again; returns counts, peaks and problems."""
    signal.signal(signal.SIGALRM, _hangs)
    problems: list[str] = []
    accepted, done, slowest = 0, 0, 0.0
    with TemporaryDirectory() as folder:
        bench = Bench(name, Path(folder))
        bench.accepts(bench.example)
        before, began = _peak_bytes(), time.perf_counter()
        while done < rounds and time.perf_counter() - began < most_seconds:
            data = mutated(bench.example, Random(f"{seed}/{name}/{done}"))
            start = time.perf_counter()
            signal.alarm(HANG_SECONDS)
            try:
                accepted += bench.accepts(data)
            except BaseException as error:  # any other than a refusal is what is looked for
                problems.append(f"{done}: {type(error).__name__}: {str(error)[:300]}")
            signal.alarm(0)
            seconds = time.perf_counter() - start
            if seconds > MOST_SECONDS:
                problems.append(f"{done}: {seconds:.1f} s")
            slowest = max(slowest, seconds)
            done += 1
    grown = _peak_bytes() - before
    if grown > MOST_BYTES:
        problems.append(f"{grown:,} bytes")
    return {
        "files": done,
        "accepted": accepted,
        "refused": done - accepted - len(problems),
        "slowest_seconds": slowest,
        "peak_bytes_more": grown,
        "problems": len(problems),
        "first_problems": problems[:SHOWN_PROBLEMS],
    }


def fuzz_command(name: str, count: int, seed: int, most_seconds: float) -> dict[str, Any]:
    """Run one command on damaged files; returns counts, peaks and problems."""
    import moesched.devices.torch.device  # noqa: F401  # once, before the forks

    codes: dict[int, int] = {}
    problems: list[str] = []
    slowest, peak, began = 0.0, 0, time.perf_counter()
    with TemporaryDirectory() as folder:
        for number, ended in enumerate(damaged_commands(name, count, Path(folder), seed)):
            codes[ended.code] = codes.get(ended.code, 0) + 1
            slowest, peak = max(slowest, ended.seconds), max(peak, ended.memory_bytes)
            if (problem := ended.problem(MOST_SECONDS, _peak_bytes() + MOST_BYTES)) is not None:
                problems.append(f"{number}: {problem}")
            if time.perf_counter() - began > most_seconds:
                break
    return {
        "files": sum(codes.values()),
        "exit_codes": {str(code): codes[code] for code in sorted(codes)},
        "slowest_seconds": slowest,
        "peak_bytes": peak,
        "problems": len(problems),
        "first_problems": problems[:SHOWN_PROBLEMS],
    }


def fuzz_by_coverage(name: str, seconds: int) -> None:
    """Let atheris choose the files, with the example as its corpus; it ends the process."""
    import atheris

    with TemporaryDirectory() as folder:
        bench = Bench(name, Path(folder))
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        (corpus / "example").write_bytes(bench.example)
        atheris.instrument_all()
        atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", str(corpus)], bench.accepts)
        atheris.Fuzz()


def _hangs(*_: object) -> None:
    raise TimeoutError(f"more than {HANG_SECONDS} s")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
