"""Removes each wait, event, lifetime, copy and buffer of the CUDA path in turn; the lagging device has to find it.

Works in a copy of the tree: first the tests of the lagging device run there, up to the first that fails; where none
does, every case of the benchmark `lagging_device` runs, two batches each. The result names what found each. It is
written after each one: a run that was cut off goes on with `--resume`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of
from benchmarks.record.results import ROOT

TESTS = [
    "tests/test_captured.py",
    "tests/test_fixed_steps.py",
    "tests/test_staging_ring.py",
    "tests/test_home_pages.py",
    "tests/test_locked_memory.py",
    "tests/test_cuda_streams.py",
    "tests/test_warm_up.py",
    "tests/test_operators.py",
    "tests/test_serving.py",
    "tests/test_lagging_device.py",
]
SWEEP = ["-m", "benchmarks.robustness._lagging_rows"]


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text in a file, and what replaces it.

    Attributes:
        file: below devices/torch, or from the root if it has a folder.
        lost: what is gone.
    """

    file: str
    lost: str
    text: str
    instead: str = "pass"

    @property
    def path(self) -> str:
        """The file, from the root."""
        return self.file if "/" in self.file else f"devices/torch/{self.file}"


PLANTED = Path(__file__).with_name("lagging_mutants.toml").read_bytes()
MUTANTS = {
    f"{kind}: {mutant.lost}": mutant
    for kind, mutants in msgspec.toml.decode(PLANTED, type=dict[str, list[Mutant]]).items()
    for mutant in mutants
}
SECONDS = 600
"""Time after which tests or cases count as hanging, which finds a mutant too."""


def claims(result: Result) -> Iterator[Claim]:
    """Faults planted in the CUDA path."""
    words = "removed waits, events, lifetimes and copies of the CUDA path that the lagging device finds"
    yield all_of(words, result["found"], result["mutants"])


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=MUTANTS,
    by_machine=False,
    keeps_parts=True,
)
BENCHMARK.parser.add_argument(
    "--resume", action="store_true", help="keep what the result says of found mutants"
)
BENCHMARK.parser.add_argument(
    "--processes", type=int, default=1, metavar="N", help="mutants at a time (default: 1)"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen mutants, print what found each, write the JSON."""
    options = BENCHMARK.parse(arguments)
    found: dict[str, str] = {
        name: by for name, by in BENCHMARK.stored().get("found_by", {}).items() if name in MUTANTS
    }
    names = [name for name in options.only if not (options.resume and found.get(name))]
    with ThreadPoolExecutor(options.processes) as pool:
        futures = [pool.submit(found_by, MUTANTS[name]) for name in names]
        for name, future in zip(names, track(futures, "mutants"), strict=True):
            found[name] = future.result()
            print(f"{name}: {found[name] or 'NOT FOUND'}", flush=True)
            BENCHMARK.done(name)
            BENCHMARK.write(
                {"mutants": len(found), "found": sum(map(bool, found.values())), "found_by": found}
            )


def found_by(mutant: Mutant) -> str:
    """The first test that fails with a mutant, or the first case; empty if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        leave_out = shutil.ignore_patterns(".git", ".venv", "out", "__pycache__", "results")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=leave_out)
        file = tree / mutant.path
        before = file.read_text()
        if mutant.text not in before:
            sys.exit(f"{mutant.path} has no {mutant.text!r}")
        file.write_text(before.replace(mutant.text, mutant.instead))
        return _failing_test(tree) or _failing_case(tree)


def _failing_test(tree: Path) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "60",
        *TESTS,
    ]
    try:
        ran = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "the tests hang"
    failures = (line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    named = next(failures, "").removeprefix("FAILED ").removeprefix("ERROR ").split(" - ")[0]
    return named or ("the tests end early" if ran.returncode else "")


def _failing_case(tree: Path) -> str:
    try:
        ran = subprocess.run(
            [sys.executable, *SWEEP],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "a case of the benchmark hangs"
    return "" if not ran.returncode else (ran.stdout.splitlines() or ["a case of the benchmark"])[-1]


if __name__ == "__main__":
    main()
