"""Removes each wait, lifetime and copy of the CUDA path in turn; the tests of the lagging device have to fail.

    python benchmarks/lagging_mutants.py [NUMBER ...]

Prints a line for each mutant, and ends with 1 if one was not found. Works in a copy of the tree.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

TREE = Path(__file__).parent.parent
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


def main() -> None:
    """Run the mutants with these numbers, by default all."""
    numbers = [int(each) for each in sys.argv[1:]] or range(len(MUTANTS))
    survived = [number for number in numbers if not _is_found(number)]
    if survived:
        sys.exit(f"not found: {survived}")


def _is_found(number: int) -> bool:
    mutant = MUTANTS[number]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(
            TREE, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "out", "__pycache__")
        )
        file = tree / "devices" / "torch" / mutant.file
        before = file.read_text()
        if mutant.text not in before:
            sys.exit(f"mutant {number}: {mutant.file} has no {mutant.text!r}")
        file.write_text(before.replace(mutant.text, mutant.instead))
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "60", *TESTS],
            cwd=tree,
            capture_output=True,
            text=True,
        )
    found = ran.returncode == 1
    by = next((line for line in ran.stdout.splitlines() if line.startswith("FAILED")), "")
    print(
        f"{number:2} {mutant.file}: {mutant.text.strip()[:50]!r}: {'found by ' + by[7:80] if found else 'NOT FOUND'}"
    )
    return found


if __name__ == "__main__":
    main()
