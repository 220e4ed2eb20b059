"""The test suite beside busy cores, several times at one commit: which tests fail on a machine that is short of time?

A round is `make test`, or with `--only` pytest on some files. Rounds of the same commit stay in the result file, which
is written after each one, so that they may be run on several days. It is in out/, since a test compares the tables of
the docs with all results of the tree: copy it to benchmarks/results/ in the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from _options import CLUSTER, Benchmark, track
from _results import ROOT, commit

MESSAGE_CHARACTERS = 2_000

BENCHMARK = Benchmark(
    __doc__,
    "busy_tests",
    measures=(*CLUSTER, "tests", "Makefile", "pyproject.toml"),
    parts=sorted(path.name for path in (ROOT / "tests").glob("test_*.py")),
    rounds=10,
    rounds_help="run the tests this often",
)
BENCHMARK.parser.add_argument(
    "--busy", type=int, default=2, metavar="N", help="busy processes beside the tests"
)
BENCHMARK.parser.add_argument(
    "--beside", default="", metavar="TEXT", help="other work that keeps the cores busy, for the result"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds, print what failed, write the result; 1 where a test failed."""
    BENCHMARK.out = ROOT / "out" / BENCHMARK.out.name
    BENCHMARK.out.parent.mkdir(exist_ok=True)
    options = BENCHMARK.parse(arguments)
    files = [] if options.only == BENCHMARK.parts else [f"tests/{name}" for name in options.only]
    stored: list[dict[str, Any]] = BENCHMARK.stored().get("runs", [])
    runs = [run for run in stored if run["commit"] == commit() and run["files"] == files]
    with busy_processes(options.busy):
        for _ in track(range(options.rounds), "running the tests", still=True):
            runs.append(one_round(files, options.busy, options.beside))
            failed = [run for run in runs if run["exit_code"]]
            print(f"{len(failed)} of {len(runs)} rounds failed; the last one took {runs[-1]['seconds']:g} s")
            for failure in runs[-1]["failures"]:
                print(f"  {failure['test']}: {failure['message'].splitlines()[0]}")
            BENCHMARK.write({"rounds": len(runs), "failed_rounds": len(failed), "runs": runs})
    return int(bool(failed))


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that compute without a pause."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def one_round(files: Sequence[str], busy: int, beside: str) -> dict[str, Any]:
    """The outcome of the suite, or of some of its files."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *files] if files else ["make", "test"]
        environment = os.environ | {"PYTEST_ADDOPTS": f"--junit-xml={report}"}
        started = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
        outcome = outcome_of(report) if report.exists() else {"tests": 0, "failures": []}
    if done.returncode and not outcome["failures"]:
        said = (done.stdout + done.stderr)[-MESSAGE_CHARACTERS:]
        outcome["failures"] = [{"test": " ".join(command), "message": said}]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "files": list(files),
        "busy_processes": busy,
        "beside": beside,
        "load_average": round(os.getloadavg()[0], 1),
        "seconds": round(seconds, 1),
        "exit_code": done.returncode,
        **outcome,
    }


def outcome_of(report: Path) -> dict[str, Any]:
    """Counts of a JUnit report, and its failures with their messages."""
    suites = ElementTree.parse(report).getroot().findall("testsuite")
    failures = [
        {
            "test": f"{case.get('classname')}::{case.get('name')}",
            "message": (problem.get("message") or problem.text or "")[:MESSAGE_CHARACTERS],
        }
        for suite in suites
        for case in suite.findall("testcase")
        for problem in (*case.findall("failure"), *case.findall("error"))
    ]
    counts = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped", "errors")
    }
    return {**counts, "failures": failures}


if __name__ == "__main__":
    sys.exit(main())
