"""Computes the space that a page reserves for timeline and curves, so that nothing moves when scripts draw them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import resources

from moesched.trace.chrome_writer import TitledRun
from moesched.trace.recording import Recording

_CONSTANT = re.compile(r"^(?:export )?const (\w+) = (\d+);", re.MULTILINE)


def reserved(runs: Sequence[TitledRun]) -> str:
    """Return the CSS rule that reserves the space: the height of the lanes in pixels, and the number of curves."""
    curves = sum(_curves(run.recording) for run in runs)
    return f":root {{ --lanes: {lanes_height(runs)}px; --curves: {curves}; }}\n"


def lanes_height(runs: Sequence[TitledRun]) -> int:
    """Return the height of all rows of the timeline, in pixels, as assets/js/rows.js lays the rows out."""
    sizes = _sizes()
    shown = [run for run in runs if run.recording.slices]
    lanes = sum(len(run.recording.lanes) for run in shown)
    tall = sizes["TALL_LANE" if lanes <= sizes["FEW_LANES"] else "LANE"]
    height = sizes["AXIS"] + sizes["BELOW"] + sizes["GAP"] * (len(shown) - 1)
    for run in shown:
        used = {each.lane for each in run.recording.slices}
        ranks = len({lane.rank for lane in run.recording.lanes})
        height += sizes["STEPS"] + sizes["PATH"]
        height += sizes["TITLE"] * bool(run.title) + sizes["RANK"] * ranks * (ranks > 1)
        height += sum(tall if lane in used else sizes["EMPTY_LANE"] for lane in run.recording.lanes)
    return height


def _curves(recording: Recording) -> int:
    memories = {(each.rank, each.memory) for each in recording.memory if each.reserved or each.pages}
    pools = {(each.rank, each.pool) for each in recording.pools if any(each.counted)}
    return (len(memories) + len(pools)) if recording.slices else 0


@cache
def _sizes() -> dict[str, int]:
    """Return the constants that assets/js/rows.js defines, by name."""
    script = resources.files("moesched.report") / "assets" / "js" / "rows.js"
    return {name: int(size) for name, size in _CONSTANT.findall(script.read_text(encoding="utf-8"))}
