"""`moesched timeline`: draws a window of one or several runs as a picture for papers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from moesched.analysis.pictures import require_picture
from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.output import Bar, print_json, say
from moesched.jobs.options import OUTPUT
from moesched.options import Option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesched.analysis.timeline_picture import TitledTimeline
    from moesched.trace.recording import About

EPILOGUE = """Examples:

  moesched timeline out/cgopipe.json --out cgopipe.svg --layers 4:5

  moesched timeline out/measured.json out/predicted.json --out both.png \\
      --steps 3"""


@command(EPILOGUE)
def timeline(
    first: Annotated[Path, Option("A trace that --trace wrote.", flag="TRACE")],
    others: Annotated[tuple[Path, ...], Option("Traces to draw below it.", flag="TRACE")],
    out: Annotated[
        Path,
        Option("The picture; its name ends in .svg or .png.", "OUT", group=OUTPUT, writes="picture"),
    ],
    steps: Annotated[
        str,
        Option("Steps A to B, both included, or one step. 0 is the prefill.", "A:B"),
    ] = "",
    layers: Annotated[
        str,
        Option("Only while the kernels of layers A to B run in the first of these steps.", "A:B"),
    ] = "",
    window: Annotated[
        str,
        Option("Times since the start of the run instead, such as 1.2s:1.5s.", "A:B"),
    ] = "",
    lanes: Annotated[
        str,
        Option("Lanes to draw. By default those that run tasks then.", "LANE,LANE"),
    ] = "",
    width: Annotated[
        float | None,
        Option("By default 7, the width of two columns of a paper; one has about 3.3.", "INCHES"),
    ] = None,
    json: options.Json = False,
) -> None:
    """Draw a window of runs, measured or predicted, as a picture.

    Lanes are rows, tasks are coloured by family (attention, experts, weights and so on), and the critical path is
    outlined. Several runs are drawn one below the other, with equal scale of time; each window starts at zero.

    By default it draws the first decode step whose time is within 10% of the median, and says which. A task has a label
    if its name fits; with fewer --layers, more names fit. Tasks too narrow to see are merged. It needs matplotlib:
    pip install 'moesched[plots]'.
    """
    from moesched.analysis.timeline import choose_window, timeline_of
    from moesched.analysis.timeline_picture import TitledTimeline, draw_timelines, require_width
    from moesched.trace import read_trace

    traces = [first, *others]
    inches = require_width(width)
    require_picture(out, option="")
    names = [name.strip() for name in lanes.split(",") if name.strip()]
    runs = []
    with Bar("drawing") as bar:
        for trace in traces:
            bar.update(0, what=f"reading {trace}")
            run = read_trace(trace)
            chosen = choose_window(run.recording, steps=steps, layers=layers, window=window)
            runs.append(TitledTimeline(title_of(run.about), timeline_of(run.recording, chosen, names)))
        bar.update(0, what=f"drawing {out}")
        draw_timelines(runs, out, inches)
    if json:
        print_json({"picture": str(out), "windows": windows_of(traces, runs)})
        return
    for trace, drawn in zip(traces, runs, strict=True):
        say(f"{trace}: {drawn.timeline.window.described}")
    say(f"picture: {out}")


def windows_of(traces: Sequence[Path], runs: Sequence[TitledTimeline]) -> list[dict[str, object]]:
    """Return the drawn windows as JSON values: trace, window's name, start and end in seconds."""
    return [
        {
            "trace": str(trace),
            "window": run.timeline.window.name,
            "start_seconds": run.timeline.window.start / 1e9,
            "end_seconds": run.timeline.window.end / 1e9,
        }
        for trace, run in zip(traces, runs, strict=True)
    ]


def title_of(about: About) -> str:
    """Return a run's title: policy, model, machine, and whether its times are predicted or measured."""
    place = f" on {about.machine}" if about.machine else ""
    model = f", {about.model}" if about.model else ""
    return f"{about.policy or 'run'}{model}{place}, {about.figures}"
