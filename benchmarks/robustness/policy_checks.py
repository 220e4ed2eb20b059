"""Check every shipped policy with `moesched check`, each in a process of its own: are there false alarms?

No shipped policy has a fault, so each that is found is a false alarm, or a bug. The cells are the small cases and the
grid of models, machines and batch sizes that the command has by default.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most, none_of, together
from moesched import plugins

BAR_SECONDS = 60


def claims(result: Result) -> Iterator[Claim]:
    """The shipped policies under `moesched check`."""
    policies = result["policies"]
    faults = sum(bool(each["faults"] or each["unchecked"]) for each in policies)
    slowest = max(each["seconds"] for each in policies)
    yield together(
        "shipped policies with a fault, or a case unchecked, in `moesched check`, and the slowest",
        none_of("", faults, len(policies)),
        at_most("", slowest, result["bar_seconds"], "{:.0f} s"),
    )


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=["adversarial", *plugins.names("policies")],
    rounds_help="checks of each policy; the longest counts",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the policies, and write what was found; 1 where there is a fault."""
    options = BENCHMARK.parse(arguments)
    found = []
    for policy in track(options.only, "checking policies", still=True):
        rounds = [checked(policy) for _ in range(options.rounds)]
        found.append(max(rounds, key=lambda each: (each["faults"], each["seconds"])))
    return BENCHMARK.write({"bar_seconds": BAR_SECONDS, "policies": found})


def checked(policy: str) -> dict[str, Any]:
    """Run the command on a policy, and count what it found."""
    started = perf_counter()
    command = [sys.executable, "-m", "moesched", "check", policy, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = perf_counter() - started
    if done.returncode not in (0, 1):
        raise SystemExit(f"`moesched check {policy}` ended with code {done.returncode}: {done.stderr}")
    report = json.loads(done.stdout)
    fitting = sum(cell["seconds"] is not None for cell in report["cases"])
    return {
        "policy": policy,
        "seconds": round(seconds, 1),
        "faults": len(report["faults"]),
        "messages": [f"{fault['line']}: {fault['message']}" for fault in report["faults"]],
        "small_cases": report["trials"],
        "cells": fitting,
        "cells_that_do_not_fit": len(report["cases"]) - fitting,
        "unchecked": len(report["unchecked"]),
    }


if __name__ == "__main__":
    sys.exit(main())
