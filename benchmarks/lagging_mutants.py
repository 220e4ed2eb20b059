"""Removes each wait, lifetime and copy of the CUDA path in turn; the tests of the lagging device have to fail.

Works in a copy of the tree. Each mutant takes as long as these tests, at most; the result names the test that found it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _options import Benchmark, track
from _results import ROOT

TESTS = ["tests/test_cuda_streams.py", "tests/test_lagging_device.py"]


class Mutant(NamedTuple):
    """A text in a file of devices/torch, and what replaces it."""

    file: str
    text: str
    instead: str = "pass"


MUTANTS = (
    Mutant("cuda_streams.py", "stream.wait_event(issued.end)"),
    Mutant("cuda_streams.py", "start.record()"),
    Mutant("cuda_streams.py", "end.record()"),
    Mutant("cuda_streams.py", "self.end.synchronize()"),
    Mutant(
        "cuda_streams.py",
        "with self._module.stream(stream):\n            start",
        "if True:\n            start",
    ),
    Mutant("cuda_streams.py", "del self._issued[issued.number]"),
    Mutant(
        "cuda_streams.py", "self._unused += [issued.start, issued.end]", "self._unused += [issued.start] * 2"
    ),
    Mutant("cuda_streams.py", "blocking=True", "blocking=False"),
    Mutant("stream_clock.py", "event.synchronize()"),
    Mutant("stream_clock.py", "> PERIOD:", "> 10**18:"),
    Mutant("cuda_streams.py", "            stream.synchronize()\n", ""),
    Mutant(
        "device.py",
        "        wait_for_copies(self._compute.accelerator)\n\n    def execute",
        "\n    def execute",
    ),
    Mutant("host_side.py", "wait_for_copies(self._accelerator)  #", "pass  #"),
    Mutant(
        "host_side.py",
        'if self._accelerator.type == "cpu":\n            del state.qkv',
        "if True:\n            del state.qkv",
    ),
    Mutant(
        "host_side.py", "if not task.step:\n            del state.qkv", "if True:\n            del state.qkv"
    ),
    Mutant("attention.py", 'if self._accelerator.type == "cpu" or not task.step:', "if True:"),
    Mutant("copies.py", "_locked_like(tensor).copy_(tensor, non_blocking=True)", "_locked_like(tensor)"),
    Mutant(
        "copies.py",
        "return locked(tensor).to(device, non_blocking=True)",
        "return torch.empty_like(tensor, device=device)",
    ),
    Mutant("host_experts.py", "rows.y_nD[span].copy_(y_nD[span], non_blocking=True)"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen mutants, print the test that found each, write the JSON."""
    options = BENCHMARK.parse(arguments)
    found = {name: found_by(NAMED[name]) for name in track(options.only, "mutants")}
    for name, by in found.items():
        print(f"{name}: {by or 'NOT FOUND'}")
    BENCHMARK.write({"mutants": len(found), "found": sum(map(bool, found.values())), "found_by": found})


def found_by(mutant: Mutant) -> str:
    """The first test that fails with a mutant; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        leave_out = shutil.ignore_patterns(".git", ".venv", "out", "__pycache__")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=leave_out)
        file = tree / "devices" / "torch" / mutant.file
        before = file.read_text()
        if mutant.text not in before:
            sys.exit(f"{mutant.file} has no {mutant.text!r}")
        file.write_text(before.replace(mutant.text, mutant.instead))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "60"]
        ran = subprocess.run([*command, *TESTS], cwd=tree, capture_output=True, text=True, check=False)
    failures = (line for line in ran.stdout.splitlines() if line.startswith("FAILED"))
    return next(failures, "").removeprefix("FAILED ").split(" - ")[0]


NAMED = {
    f"{number} {mutant.file}: {' '.join(mutant.text.split())[:50]}": mutant
    for number, mutant in enumerate(MUTANTS)
}
BENCHMARK = Benchmark(
    __doc__,
    "lagging_mutants",
    measures=("devices/torch", "devices/lagging", *TESTS),
    packages=("torch",),
    parts=NAMED,
    by_machine=False,
)


if __name__ == "__main__":
    main()
