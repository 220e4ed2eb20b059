"""`moesched timeline`: a window of one or several runs as a picture for papers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from moesched.cli import options
from moesched.cli.files import Writes
from moesched.cli.output import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesched.analysis.timeline_picture import TitledTimeline
    from moesched.trace.recording import About

HELP = options.paragraphs(
    "Draw a window of runs, measured or predicted: lanes as rows, tasks in the colour of their family, the critical "
    "path outlined. Several runs stand one below the other, on one scale of time from the start of each window.",
    "By default it draws the first decode step whose time is within 10% of the median, and says which. Tasks are named "
    "where the name fits, so choose a few layers to read them; those too narrow to see are merged. It needs "
    "matplotlib: pip install 'moesched[plots]'.",
)

EPILOGUE = """Examples:

  moesched timeline out/cgopipe.json --out cgopipe.svg --layers 4:5

  moesched timeline out/measured.json out/predicted.json --out both.png \\
      --steps 3"""

Out = Annotated[
    Path,
    Parameter(group=options.OUTPUT, metavar="OUT", help="The picture; its name ends in .svg or .png."),
    Writes("picture"),
]
Steps = Annotated[
    str,
    Parameter(
        metavar="A:B", show_default=False, help="Steps A to B, both included, or one step. 0 is the prefill."
    ),
]
Layers = Annotated[
    str,
    Parameter(
        metavar="A:B",
        show_default=False,
        help="Only while the kernels of layers A to B run in the first of these steps.",
    ),
]
Span = Annotated[
    str,
    Parameter(
        metavar="A:B", show_default=False, help="Times since the start of the run instead, such as 1.2s:1.5s."
    ),
]
Lanes = Annotated[
    str,
    Parameter(
        metavar="LANE,LANE", show_default=False, help="Lanes to draw. By default those that run tasks then."
    ),
]
Width = Annotated[
    float | None,
    Parameter(metavar="INCHES", help="By default 7, the width of two columns of a paper; one has about 3.3."),
]


def add_to(app: App) -> None:
    """Add the command."""
    app.command(timeline, name="timeline", help=HELP, help_epilogue=EPILOGUE, sort_key=5)


def timeline(
    first: Annotated[Path, Parameter(name="TRACE", help="A trace that --trace wrote.")],
    /,
    *others: Annotated[Path, Parameter(name="TRACE", help="Traces to draw below it.")],
    out: Out,
    steps: Steps = "",
    layers: Layers = "",
    window: Span = "",
    lanes: Lanes = "",
    width: Width = None,
    json: options.Json = False,
) -> None:
    """See HELP."""
    from moesched.analysis.pictures import require_picture
    from moesched.analysis.timeline import choose_window, timeline_of
    from moesched.analysis.timeline_picture import TitledTimeline, draw_timelines, require_width
    from moesched.cli.output import Bar, print_json
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
    """The windows that were drawn, as JSON values."""
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
    """A run's title: its policy, model and machine, and whether times were measured."""
    place = f" on {about.machine}" if about.machine else ""
    model = f", {about.model}" if about.model else ""
    return f"{about.policy or 'run'}{model}{place}, {about.figures}"
