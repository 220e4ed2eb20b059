"""The engine's rows of one tree, for engine_paired.py: reads the name of a row, prints its microseconds per task.

The arguments are the size of a page in bytes and a machine file: two trees then simulate the same graph.
"""

from __future__ import annotations

import sys

try:
    from benchmarks.speed import engine
except ImportError:  # trees before the folders by purpose
    import engine  # type: ignore[import-not-found, no-redef]  # only those trees have it

from moesched.machines import load_machine


def microseconds(row: str) -> float:
    """Of a task, in a row of the engine's benchmark."""
    return engine.REAL[row]() if row in engine.REAL else 1e6 / engine.VIRTUAL[row]()


if __name__ == "__main__":
    engine.PAGE_BYTES = int(sys.argv[1])
    machine = load_machine(sys.argv[2])
    vars(engine)["load_machine"] = lambda _: (
        machine
    )  # a tree of an earlier revision names a machine of its own
    for line in sys.stdin:
        print(microseconds(line.strip()), flush=True)
