"""Damaged files, messages and frames: each is accepted or refused with one line, within 2 s and 500 MB.

Each parser gets its damaged files in a process of its own, `--rounds` of them; then each command that reads such files
gets 200. The result is written after each. With `--atheris SECONDS`, parsers are fuzzed by coverage instead
(pip install 'moesched[fuzz]').
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.record.benchmark import Benchmark, progress
from benchmarks.record.claims import Claim, Result, none_of
from benchmarks.robustness._fuzzed_commands import COMMANDS, damaged_commands
from benchmarks.shared.fresh_process import RowFailed, in_fresh_process
from mutations import mutated
from parsers import PARSERS, Bench

MOST_SECONDS = 2.0
MOST_BYTES = 500_000_000
HANG_SECONDS = 20
FILES_OF_A_COMMAND = 200
SECONDS_OF_ALL = 3600.0
"""Most seconds for all damaged files of a parser or a command."""
LONGEST = 120.0
"""Seconds that a process may take beyond those of its files."""
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
BENCHMARK.parser.add_argument("--seed", type=int, default=0)
BENCHMARK.parser.add_argument("--atheris", type=int, metavar="SECONDS", help="fuzz one parser by coverage")


def main(arguments: Sequence[str] | None = None) -> None:
    """Damage all files and write what came of them."""
    options = BENCHMARK.parse(arguments)
    if options.atheris:
        fuzz_by_coverage(options.only[0], options.atheris)
    result: dict[str, Any] = {kind: BENCHMARK.stored().get(kind, {}) for kind in ("parsers", "commands")}
    for name in options.only:
        kind, count = ("parsers", options.rounds) if name in PARSERS else ("commands", FILES_OF_A_COMMAND)
        with progress.status(f"{count:,} damaged files: {name}"):
            try:
                # In a process of its own, whose peak memory is then its own, too.
                found = in_fresh_process(fuzz, name, count, options.seed, seconds=SECONDS_OF_ALL + LONGEST)
            except RowFailed as error:
                found = {"files": 0, "problems": 1, "first_problems": [str(error)]}
        progress.print(
            f"{name}: {found['files']:,} files, {found['problems']} problems", *found["first_problems"]
        )
        result[kind][name] = found
        BENCHMARK.done(name)
        BENCHMARK.write(result)


def fuzz(name: str, count: int, seed: int) -> dict[str, Any]:
    """Damage the file of a parser or a command again and again; returns counts and problems."""
    tried = parsed if name in PARSERS else commanded
    problems: list[str] = []
    done, slowest, began = 0, 0.0, time.perf_counter()
    with TemporaryDirectory() as folder:
        for problem, seconds in tried(name, count, seed, Path(folder)):
            slowest = max(slowest, seconds)
            if seconds > MOST_SECONDS:
                problem = f"{seconds:.1f} s {problem}"
            if problem:
                problems.append(f"{done}: {problem}")
            done += 1
            if time.perf_counter() - began > SECONDS_OF_ALL:
                break
    return {
        "files": done,
        "slowest_seconds": slowest,
        "problems": len(problems),
        "first_problems": problems[:SHOWN_PROBLEMS],
    }


def parsed(name: str, count: int, seed: int, folder: Path) -> Iterator[tuple[str, float]]:
    """The problem with each of a parser's damaged files, empty if it is accepted or refused, and its seconds."""
    signal.signal(signal.SIGALRM, _hangs)
    bench = Bench(name, folder)
    bench.accepts(bench.example)
    most = _peak_bytes() + MOST_BYTES
    for number in range(count):
        data = mutated(bench.example, Random(f"{seed}/{name}/{number}"))
        start, problem = time.perf_counter(), ""
        signal.alarm(HANG_SECONDS)
        try:
            bench.accepts(data)
        except BaseException as error:  # any other than a refusal is what is looked for
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        signal.alarm(0)
        if _peak_bytes() > most:
            problem, most = f"{_peak_bytes():,} bytes {problem}", _peak_bytes()
        yield problem, time.perf_counter() - start


def commanded(name: str, count: int, seed: int, folder: Path) -> Iterator[tuple[str, float]]:
    """The problem with each of a command's damaged files, empty if there is none, and its seconds."""
    import moesched.devices.torch.device  # noqa: F401  # once, before the forks

    for ended in damaged_commands(name, count, folder, seed):
        yield ended.problem(MOST_SECONDS, _peak_bytes() + MOST_BYTES) or "", ended.seconds


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
