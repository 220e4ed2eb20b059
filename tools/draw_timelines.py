"""Draw the timelines of docs/ideas: the papers' policies beside their rivals, on the virtual clock.

    python tools/draw_timelines.py [FOLDER]

Each picture has one panel per policy, all on the same scale, from the start of one layer of a decode step.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import moesched
from moesched.analysis.families import COLOURS, Family, family_of
from moesched.analysis.pictures import drawing, write_picture
from moesched.trace import Recording, Slice

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
STEP, LAYER = 2, 8
"""The decode step and the layer at whose start the pictures begin."""

CHARACTER = 0.008
"""Width of a character, as a part of the panel."""

THINNEST = 0.0005
"""Width of the shortest task that is drawn, as a part of the panel."""

INCHES_OF_LANE = 0.26
DARK: tuple[Family, ...] = ("attention", "experts", "weights")
"""Families whose colours carry white text."""


class Picture(NamedTuple):
    """One picture.

    Attributes:
        policies: the policies from top to bottom, each with a title.
        milliseconds: the length of the window.
        by_expert: whether tasks are told apart by experts, and not by micro-batches and layers.
        given: what all simulations are given.
    """

    name: str
    policies: dict[str, str]
    lanes: tuple[str, ...]
    milliseconds: float
    by_expert: bool
    given: dict[str, Any]


Lane = tuple[int, str]
"""A lane of a node."""


MIXTRAL = {"model": "mixtral-8x7b", "gen": 3}
ALL = (
    Picture(
        name="timelines-moe-lightning",
        policies={
            "cgopipe": "cgopipe: CPU attention, weights in pages between the micro-batches",
            "fastdecode": "fastdecode: CPU attention, weights of a layer in one transfer",
            "flexgen_cpu": "flexgen_cpu: CPU attention, one micro-batch after the other",
            "flexgen": "flexgen: attention on the GPU, which needs the KV cache there",
        },
        lanes=("accelerator", "host", "host->gpu", "gpu->host", "host->pinned"),
        milliseconds=700,
        by_expert=False,
        given=MIXTRAL | {"machine": "t4", "workload": "mtbench", "batch_size": 2048, "micro_batch_size": 256},
    ),
    Picture(
        name="timelines-twiddler",
        policies={
            "lru_offload": "lru_offload: every missing expert is moved",
            "layer_split": "layer_split: some layers' experts stay on the CPU",
            "twiddler": "twiddler: each missing expert where it is faster",
        },
        lanes=("accelerator", "host", "host->gpu"),
        milliseconds=66,
        by_expert=True,
        given=MIXTRAL | {"machine": "rtx6000", "workload": "uniform", "batch_size": 1},
    ),
    Picture(
        name="timelines-mac-cluster",
        policies={
            "ep_naive": "ep_naive: two exchanges per layer",
            "ep_busy_full": "ep_busy_full: one exchange, every expert runs",
            "ep_router_aided": "ep_router_aided: one exchange, chosen experts run",
            "ep_balanced": "ep_balanced: more copies, the least loaded node runs",
        },
        lanes=("accelerator", "network"),
        milliseconds=8,
        by_expert=True,
        given={
            "model": "dbrx",
            "gen": 3,
            "machine": "m2-ultra",
            "nodes": 2,
            "network": "10gbe",
            "workload": "uniform",
            "batch_size": 1,
        },
    ),
)


def main() -> None:
    """Simulate the runs and draw all pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=PICTURES)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for picture in ALL:
        with drawing():
            write_picture(draw(picture), folder / f"{picture.name}.svg")


def draw(picture: Picture) -> Figure:
    """One panel for each policy."""
    recordings = {policy: simulated(policy, picture.given) for policy in picture.policies}
    lanes = {policy: lanes_of(recording, picture) for policy, recording in recordings.items()}
    heights = [len(each) * INCHES_OF_LANE for each in lanes.values()]
    figure = Figure(figsize=(10, sum(heights) + 0.5 * len(heights) + 0.75), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    families: set[Family] = set()
    for axes, (policy, title) in zip(panels, picture.policies.items(), strict=True):
        families |= draw_panel(axes, recordings[policy], lanes[policy], picture)
        axes.set_title(title, fontsize=9.5, loc="left", pad=13)
    panels[-1].set_xlabel("milliseconds", fontsize=9)
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in families]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def simulated(policy: str, given: dict[str, Any]) -> Recording:
    """The recording of a run on the virtual clock."""
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        moesched.simulate_model(policy=policy, trace=trace, **given)
        return moesched.read_trace(trace).recording


def lanes_of(recording: Recording, picture: Picture) -> list[Lane]:
    """The lanes to draw: those of each node in the picture's order, and the network once."""
    ranks = sorted({lane.rank for lane in recording.lanes})
    return [(rank, name) for rank in ranks for name in picture.lanes if rank == 0 or name != "network"]


def draw_panel(axes: Axes, recording: Recording, lanes: list[Lane], picture: Picture) -> set[Family]:
    """Draw the tasks of a window; returns their families."""
    starts = layer_starts(recording)
    span = picture.milliseconds
    bars: defaultdict[tuple[int, Family], list[tuple[float, float]]] = defaultdict(list)
    for each in recording.slices:
        lane = (each.lane.rank, each.lane.name)
        start, end = (clipped(at - starts[LAYER], span) for at in (each.start, each.end))
        if lane not in lanes or end - start < span * THINNEST:
            continue
        family = family_of(each.task)
        row = lanes.index(lane)
        bars[row, family].append((start, end - start))
        text = label(each, picture)
        if (end - start) / span > CHARACTER * (len(text) + 0.6):
            colour = "white" if family in DARK else "black"
            axes.text((start + end) / 2, row, text, fontsize=6.5, color=colour, ha="center", va="center")
    for (row, family), spans in bars.items():
        axes.broken_barh(spans, (row - 0.41, 0.82), color=COLOURS[family], edgecolor="white", linewidth=0.3)
    for layer, start in starts.items():
        at = (start - starts[LAYER]) / 1e6
        if 0 <= at < 0.95 * span:
            axes.axvline(at, color="#666666", linewidth=0.6, linestyle=":", zorder=0)
            axes.text(at, -0.6, f" layer {layer}", fontsize=6.5, color="#555555", va="bottom")
    frame(axes, lanes, span)
    return {family for _, family in bars}


def layer_starts(recording: Recording) -> dict[int, int]:
    """The start of each layer of the step, in nanoseconds."""
    starts: dict[int, int] = {}
    for each in recording.slices:
        if (each.step, each.task.verb) == (STEP, "pre_attention") and each.task.layer >= LAYER:
            starts[each.task.layer] = min(starts.get(each.task.layer, each.start), each.start)
    return starts


def clipped(nanoseconds: int, span: float) -> float:
    """A time in milliseconds, moved into the window."""
    return min(max(nanoseconds / 1e6, 0.0), span)


def frame(axes: Axes, lanes: list[Lane], span: float) -> None:
    """Name the lanes, and leave out what surrounds the bars."""
    nodes = len({rank for rank, _ in lanes}) > 1
    names = [f"node {rank}: {name}" if nodes and name != "network" else name for rank, name in lanes]
    axes.set_yticks(range(len(lanes)), names, fontsize=8)
    axes.set_ylim(len(lanes) - 0.45, -0.6)
    axes.set_xlim(0, span)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def label(each: Slice, picture: Picture) -> str:
    """What tells a task from its neighbours: its layer, its expert or its micro-batch."""
    task = each.task
    if task.type == "Collective":
        return ""
    if task.pages and not picture.by_expert:
        return f"L{task.layer}"
    if task.expert >= 0:
        return f"E{task.expert}"
    return "" if picture.by_expert or task.micro_batch < 0 else f"{task.micro_batch}"


if __name__ == "__main__":
    main()
