"""Draw the timelines of the docs: the papers' policies beside their rivals, on the virtual clock.

    python tools/draw_timelines.py [FOLDER]

Each picture has one policy below the other, all on the same scale, from the start of one layer of a decode step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import moesched
from moesched.analysis.timeline import Window, choose_window, timeline_of
from moesched.analysis.timeline_picture import TitledTimeline, draw_timelines
from moesched.trace import Recording

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
STEP, LAYER = "2", "8"
"""The decode step and the layer at whose start the pictures begin."""


class Picture(NamedTuple):
    """One picture.

    Attributes:
        policies: the policies from top to bottom, each with a title.
        milliseconds: the length of the window.
        given: what all simulations are given.
    """

    name: str
    policies: dict[str, str]
    lanes: tuple[str, ...]
    milliseconds: int
    given: dict[str, Any]


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
        given=MIXTRAL
        | {
            "machine": "t4",
            "budgets": {"pinned": "16GB"},
            "workload": "mtbench",
            "batch_size": 2048,
            "micro_batch_size": 256,
        },
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
        given=MIXTRAL | {"machine": "rtx6000", "workload": "uniform", "batch_size": 1},
    ),
    Picture(
        name="timelines-mac-cluster",
        policies={
            "ep_naive": "ep_naive: two exchanges per layer",
            "ep_busy_full": "ep_busy_full: one exchange, every expert runs",
            "ep_router_aided": "ep_router_aided: one exchange, each node runs equally many experts",
            "ep_balanced": "ep_balanced: more copies, the least loaded node runs",
        },
        lanes=("accelerator", "network"),
        milliseconds=8,
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
        draw(picture, folder / f"{picture.name}.svg")


def draw(picture: Picture, path: Path) -> None:
    """Draw the policies of a picture below one another."""
    runs = []
    for policy, title in picture.policies.items():
        recording = simulated(policy, picture.given)
        start = choose_window(recording, steps=STEP, layers=LAYER).start
        window = Window(start, start + picture.milliseconds * 1_000_000)
        runs.append(TitledTimeline(title, timeline_of(recording, window, picture.lanes)))
    draw_timelines(runs, path)


def simulated(policy: str, given: dict[str, Any]) -> Recording:
    """The recording of a run on the virtual clock."""
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        moesched.simulate_model(policy=policy, trace=trace, **given)
        return moesched.read_trace(trace).recording


if __name__ == "__main__":
    main()
