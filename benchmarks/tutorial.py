"""Follow docs/policies.md word for word in a fresh clone: does every command print what the page shows?

The clone is of the commit of this tree, and is installed as the README says, which is timed apart. Then each block of
the page is done in its order: files are written, and commands are typed at the clone's root. Blocks that the page marks
as not run, since they need CUDA, ssh or the network, are left out.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from _options import EXECUTION, Benchmark, track
from _results import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from doc_blocks import Block, agrees, blocks, commands

PAGE = Path("docs") / "policies.md"
BAR_SECONDS = 600
INSTALLED = ".venv/installed-dev"

BENCHMARK = Benchmark(
    __doc__,
    "tutorial",
    measures=(*EXECUTION, "moesched/cli", "moesched/testing", "docs/policies.md", "Makefile"),
    parts=("policies",),
    rounds_help="clones; the last one counts",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Clone, install, follow the page, write what was found; 1 where a command prints something else."""
    options = BENCHMARK.parse(arguments)
    for _ in range(options.rounds):
        with TemporaryDirectory() as folder:
            clone = Path(folder) / "moesched"
            subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
            installing = seconds_of(["make", INSTALLED], clone)
            steps = [
                step for block in track(to_follow(clone), "following the page") for step in done(block, clone)
            ]
    seconds = sum(step["seconds"] for step in steps)
    print(f"{len(steps)} steps in {seconds:.0f} s, after an installation of {installing:.0f} s")
    BENCHMARK.write(
        {
            "page": str(PAGE),
            "bar_seconds": BAR_SECONDS,
            "seconds": round(seconds, 1),
            "installation_seconds": round(installing, 1),
            "steps": steps,
        }
    )
    return int(not all(step["as_shown"] for step in steps))


def to_follow(clone: Path) -> list[Block]:
    """The blocks that a reader writes or types."""
    return [block for block in blocks(clone / PAGE) if block.runs and block.language not in ("text", "toml")]


def done(block: Block, clone: Path) -> list[dict[str, Any]]:
    """Write a block's file, or type its commands; returns the commands with what came of them."""
    if block.file:
        (clone / block.file).write_text(block.text, encoding="utf-8")
        return []
    return [typed(command, shown, clone) for command, shown in commands(block)]


def typed(command: list[str], shown: str, clone: Path) -> dict[str, Any]:
    """One command, as typed into a terminal."""
    environment = os.environ | {"PATH": f"{clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    started = perf_counter()
    ended = subprocess.run(
        command,
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = perf_counter() - started
    as_shown = agrees(shown, ended.stdout)
    if not as_shown:
        print(f"$ {shlex.join(command)}\n{ended.stdout}\nand the page shows:\n{shown}")
    return {"command": shlex.join(command), "seconds": round(seconds, 1), "as_shown": as_shown}


def seconds_of(command: list[str], folder: Path) -> float:
    """Run a command to its end."""
    started = perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
