"""Runs of several things in turn, those done again during which other processes were busy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

from moesched.calibration.other_load import OtherLoad

MOST_OTHER_CORES = 0.1
"""What others may keep busy during a run that need not be done again."""

K = TypeVar("K", bound=Hashable)
Figures = dict[str, float]


class Run(NamedTuple):
    """What a run came to, and the cores that others kept busy meanwhile."""

    others: float
    figures: Figures


def measure_in_turn(
    measures: Mapping[K, Callable[[], Figures]],
    repeats: int,
    most: int,
    tell: Callable[[K, Run], object] = lambda name, run: None,
) -> dict[K, list[Run]]:
    """So many undisturbed runs of each, or as near to that as `most` runs come; the least disturbed come first.

    All have their first run before any has its second one, as the machine's speed drifts.
    """
    runs: dict[K, list[Run]] = {name: [] for name in measures}
    for turn in range(1, most + 1):
        for name, measure in measures.items():
            undisturbed = sum(run.others <= MOST_OTHER_CORES for run in runs[name])
            if undisturbed < min(turn, repeats):
                load = OtherLoad()
                figures = measure()
                runs[name].append(Run(load.cores(), figures))
                tell(name, runs[name][-1])
    return {name: sorted(each, key=lambda run: run.others)[:repeats] for name, each in runs.items()}
