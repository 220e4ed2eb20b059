"""Run the fixed cases of same_behaviour.py on the checkout that is first on Python's path, and print JSON.

It uses public names only, so that it runs on older checkouts too.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import entry_points
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import moesched

SMALL = {"model": "mixtral-0.8b", "workload": "mtbench", "gen": 3, "requests": 6, "seed": 1, "batch_size": 6}
SIMULATED: dict[str, dict[str, Any]] = {
    "t4, tight": {**SMALL, "machine": "t4", "micro_batch_size": 2, "budgets": {"gpu": "800MB"}},
    "t4, roomy": {**SMALL, "machine": "t4", "micro_batch_size": 3},
    "t4, beams": {**SMALL, "machine": "t4", "micro_batch_size": 2, "beams": 2, "budgets": {"gpu": "1GB"}},
    "t4, chunks": {**SMALL, "machine": "t4", "micro_batch_size": 2, "prefill_chunk": 64},
    "t4 with a disk": {**SMALL, "machine": "t4-nvme", "micro_batch_size": 2, "budgets": {"gpu": "900MB"}},
    "two t4": {**SMALL, "machine": "t4x2", "micro_batch_size": 2},
    "four t4": {**SMALL, "machine": "t4x4", "micro_batch_size": 1},
    "a Mac": {**SMALL, "machine": "m2-ultra", "micro_batch_size": 2, "budgets": {"unified": "1500MB"}},
    "a Mac that unwires": {**SMALL, "machine": "m2-ultra-macos14", "micro_batch_size": 2},
    "two Macs": {**SMALL, "machine": "m2-ultra", "micro_batch_size": 3, "nodes": 2, "network": "10gbe"},
    "three Macs, DBRX": {
        **SMALL,
        "model": "dbrx",
        "machine": "m2-ultra",
        "requests": 2,
        "batch_size": 2,
        "micro_batch_size": 1,
        "nodes": 3,
        "network": "rocev2",
    },
}
PROMPTS = [[5, 9, 301, 17, 44, 8], [12, 7], list(range(40, 75)), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]
REAL: dict[str, dict[str, Any]] = {
    "torch": {"dtype": "float32"},
    "torch, tight": {"dtype": "float32", "budgets": {"host": "26MB"}},
    "torch, bfloat16": {"dtype": "bfloat16"},
    "torch, beams": {"dtype": "float32", "sampling": {"beams": 2}},
    "torch, sampled": {"dtype": "float32", "sampling": {"temperature": 0.8, "top_k": 20, "seed": 7}},
    "torch, chunks": {"dtype": "float32", "prefill_chunk": 8},
    "mlx": {"dtype": "float32", "device": "mlx"},
}


SETTINGS = [
    *(f"simulated on {setting}" for setting in SIMULATED),
    *(f"run on {setting}" for setting in REAL),
]


def main(model: str, *settings: str) -> None:
    """Print the behaviour of every case of some settings as one JSON object."""
    found = {}
    with TemporaryDirectory() as folder:
        for name, policy, case in cases(model, Path(folder) / "trace.json"):
            if name in settings:
                label = f"{name}: {policy}"
                print(label, file=sys.stderr, flush=True)
                found[label] = case()
    json.dump(found, sys.stdout)


def cases(model: str, trace: Path) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """(setting, policy, what to call for its behaviour) of every case."""
    policies = sorted(each.name for each in entry_points(group="moesched.policies"))
    for (setting, options), policy in product(SIMULATED.items(), policies):
        yield f"simulated on {setting}", policy, partial(simulated, options, policy, trace)
    for (setting, options), policy in product(REAL.items(), policies):
        yield f"run on {setting}", policy, partial(real, model, options, policy)


def simulated(options: Mapping[str, Any], policy: str, trace: Path) -> dict[str, Any]:
    """A simulated run's slices and edges, to the nanosecond; or that it is refused."""
    try:
        report = moesched.simulate_model(**options, policy=policy, trace=trace)
    except moesched.BadInput:
        return {"refused": True}
    return {
        "slices": slices_of(trace),
        "edges": edges_of(trace),
        "seconds": [report.prefill_seconds, *report.step_seconds],
        "peak_bytes": report.peak_bytes,
        "tasks": report.tasks,
    }


def slices_of(trace: Path) -> list[list[Any]]:
    """A trace's slices as [process, track, start, duration, name], in order."""
    text = trace.read_bytes()
    events = json.loads(gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text)["traceEvents"]
    names = {
        (event["name"], event["pid"], event.get("tid", 0)): event["args"]["name"]
        for event in events
        if event["name"] in ("process_name", "thread_name")
    }
    slices: list[list[Any]] = []
    for event in events:
        if event["ph"] == "X":
            process = names["process_name", event["pid"], 0]
            track = names["thread_name", event["pid"], event["tid"]]
            slices.append(
                [process, track, nanoseconds(event["ts"]), nanoseconds(event["dur"]), event["name"]]
            )
    return sorted(slices)


def edges_of(trace: Path) -> str:
    """The number of edges of a trace, and a digest of their ends."""
    recording = moesched.read_trace(trace).recording
    spans = [(each.lane, each.start, each.end) for each in recording.slices]
    edges = sorted(
        (spans[producer], spans[consumer])
        for consumer, producers in enumerate(recording.producers)
        for producer in producers
    )
    return f"{len(edges)} {hashlib.sha256(repr(edges).encode()).hexdigest()}"


def nanoseconds(microseconds: float) -> int:
    """A time of a trace."""
    return round(microseconds * 1000)


def real(model: str, options: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """A real run's tokens; or that it is refused."""
    options = dict(options)
    if sampling := options.pop("sampling", None):
        options["sampling"] = moesched.Sampling(**sampling)
    try:
        report = moesched.run_model(
            model, PROMPTS, policy=policy, max_new_tokens=6, batch_size=4, micro_batch_size=2, **options
        )
    except moesched.BadInput:
        return {"refused": True}
    return {"tokens": report.tokens}


if __name__ == "__main__":
    main(*sys.argv[1:])
