"""Draw a part of a trace as text: a row for each lane, and in it the layers that the lane works for.

    python examples/timeline.py [TRACE --step N --layers FIRST LAST]

Digits are the last digits of layers. A dot marks a moment in which the lane is busy for less than half of the time, a
space one in which it is idle. Without a trace, two layers of `layer_streaming` are simulated and drawn: the link
brings layer 6 while the accelerator computes layer 5.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import moesched
from moesched.errors import BadInput
from moesched.trace import Recording, Slice
from moesched.units import format_seconds

COLUMNS = 64
"""The width of a row; with its name it fits a terminal of 80 columns."""


def draw(recording: Recording, step: int, layers: Sequence[int]) -> list[str]:
    """The lanes of the first node, from the first kernel of these layers to the last one; without idle lanes."""
    kernels = [
        each
        for each in recording.slices
        if (each.step, each.lane.name) == (step, "accelerator") and each.task.layer in layers
    ]
    if not kernels:
        sys.exit(
            f"timeline.py: the trace has no layers {layers[0]} to {layers[-1]} in step {step}: "
            "give others with --layers FIRST LAST, and --step"
        )
    start, end = kernels[0].start, max(each.end for each in kernels)
    width = (end - start) / COLUMNS
    lines = [f"step {step}, {format_seconds((end - start) / 1e9)}; a column is {format_seconds(width / 1e9)}"]
    for lane in recording.lanes:
        shown = [each for each in recording.slices if each.lane == lane and lane.rank == 0]
        row = "".join(cell(shown, start + k * width, start + (k + 1) * width) for k in range(COLUMNS))
        if row.strip():
            lines.append(f"{lane.name:<12} |{row}|")
    return lines


def cell(slices: Sequence[Slice], start: float, end: float) -> str:
    """One column of a lane: the layer with the most time in it."""
    busy: defaultdict[int, float] = defaultdict(float)
    for each in slices:
        busy[each.task.layer] += max(0.0, min(each.end, end) - max(each.start, start))
    layer = max(busy, key=busy.__getitem__, default=0)
    share = sum(busy.values()) / (end - start)
    return str(layer % 10) if share >= 0.5 else "." if share > 0 else " "


def main() -> None:
    """Draw the trace that was named, or one of our own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--step", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs=2, default=(5, 6))
    arguments = parser.parse_args()
    first, last = arguments.layers
    with TemporaryDirectory() as folder:
        path = arguments.trace or simulated(Path(folder) / "trace.json")
        try:
            recording = moesched.read_trace(path).recording
        except BadInput as error:
            sys.exit(f"timeline.py: {error}")
        print("\n".join(draw(recording, arguments.step, range(first, last + 1))))


def simulated(path: Path) -> Path:
    """The trace of a shipped policy."""
    moesched.simulate_model(
        "mixtral-8x7b",
        machine="t4",
        policy="layer_streaming",
        workload="mtbench",
        gen=4,
        batch_size=512,
        micro_batch_size=64,
        trace=path,
    )
    return path


if __name__ == "__main__":
    main()
