"""The engine's rows of one tree, for engine_paired.py: reads the name of a row, prints its microseconds per task.

The arguments are the size of a page in bytes and a machine file: two trees then simulate the same graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

try:
    from benchmarks.speed import engine
except ImportError:  # trees before the folders by purpose
    import engine  # type: ignore[import-not-found, no-redef]  # only those trees have it

from moesched.machines import load_machine

ROWS: dict[str, Callable[[], float]] = {
    "built": lambda: 1e6 / engine.tasks_per_second(engine.STEPS),
    "replayed": lambda: 1e6 / engine.tasks_per_second(engine.REPLAYED_STEPS, replay=True),
    "sharing": lambda: 1e6 / engine.tasks_per_second(engine.SHARED_STEPS, sharing=True),
    "chain in the loop": lambda: engine.on_lanes(engine.chain, "loop"),
    "fork-join in the loop": lambda: engine.on_lanes(engine.fork_join, "loop", lanes=4),
    "chain on a worker thread": lambda: engine.on_lanes(engine.chain, "thread"),
    "fork-join on worker threads": lambda: engine.on_lanes(engine.fork_join, "thread", lanes=4),
    "chain across two worker threads": lambda: engine.on_lanes(engine.chain, "thread", lanes=2),
    "chain on a worker thread, each awaited": lambda: engine.on_lanes(engine.awaited_chain, "thread"),
}

if __name__ == "__main__":
    engine.PAGE_BYTES = int(sys.argv[1])
    machine = load_machine(sys.argv[2])
    vars(engine)["load_machine"] = lambda _: (
        machine
    )  # a tree of an earlier revision names a machine of its own
    for line in sys.stdin:
        print(ROWS[line.strip()](), flush=True)
