"""`moesched chat`: conversations in the terminal with a running server."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from moesched.cli.main import main


class Answering(BaseHTTPRequestHandler):
    """A server that repeats the last message, with a control character, and notes what it was asked."""

    asked: list[Any] = []  # noqa: RUF012  # one for each server, set by its fixture
    keys: list[str | None] = []  # noqa: RUF012  # as well
    paths: list[str] = []  # noqa: RUF012  # as well

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.keys.append(self.headers["Authorization"])
        self._send(b'{"data": [{"id": "repeater"}]}')

    def do_POST(self) -> None:
        self.paths.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        text = body["messages"][-1]["content"]
        if text == "fail":
            self._send(b'{"error": {"message": "too long: shorten it"}}', 400)
            return
        pieces = [{"choices": [{"delta": {"content": each}}]} for each in (text[:1], text[1:], "\x1b!\nbye")]
        events = [*pieces, {"choices": [], "usage": {}}]
        if text == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if text == "nonsense":
            events = [{"choices": 5}]
        if text == "break":
            events = [*pieces, {"error": {"message": "the engine has ended"}}]
        end = b"" if text == "close" else b"data: [DONE]\n\n"
        self._send(b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events) + end)

    def _send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a server that repeats."""
    Answering.asked, Answering.keys, Answering.paths = [], [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def said(lines: str, *options: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", *options])


def test_each_line_is_a_message_and_the_conversation_goes_on(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said("hello\n\nagain\n", "--url", url, "--temperature", "0", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == "hello\\x1b!\nbye\nagain\\x1b!\nbye\n"
    first, second = Answering.asked
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("repeater", 0.0, None)
    assert [each["content"] for each in second["messages"]] == ["hello", "hello\x1b!\nbye", "again"]
    assert [each["role"] for each in second["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("", "/v1"),
        ("/", "/v1"),
        ("/v1", "/v1"),
        ("/v1/", "/v1"),
        ("/proxied/v1", "/proxied/v1"),
        ("/other", "/other"),
    ],
)
def test_a_path_of_the_address_stands_for_v1(
    url: str, path: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said("hello\n", "--url", url + path, monkeypatch=monkeypatch) == 0
    assert Answering.paths == [f"{base}/models", f"{base}/chat/completions"]


def test_the_key_of_the_environment_is_sent(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESCHED_API_KEY", "secret")
    assert said("", "--url", url, monkeypatch=monkeypatch) == 0
    assert Answering.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("way", "code", "says"),
    [
        ("fail", 2, "too long: shorten it"),
        ("break", 1, "the engine has ended"),
        ("close", 1, "broke off: the connection ended"),
        ("nonsense", 1, "another form than OpenAI's API"),
    ],
    ids=["refused", "ended", "cut off", "of another form"],
)
def test_an_answer_that_does_not_come_fails_with_the_reason(
    way: str,
    code: int,
    says: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said(f"{way}\n", "--url", url, monkeypatch=monkeypatch) == code
    assert says in capsys.readouterr().err


def test_a_key_of_the_environment_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOESCHED_API_KEY", "two\nlines")
    assert said("", monkeypatch=monkeypatch) == 2
    assert "MOESCHED_API_KEY has no key" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A terminal at which these lines are typed; Ctrl-C is pressed where one says so."""

    def isatty(self) -> bool:
        return True

    def readline(self, size: int = -1) -> str:  # type: ignore[override]  # as StringIO has it
        assert sys.stdout is sys.__stdout__, "elsewhere Python lets nobody edit a line"
        line = super().readline(size)
        if line == "Ctrl-C\n":
            raise KeyboardInterrupt
        return line


@pytest.mark.parametrize("disturbance", ["fail", "nonsense", "interrupt", "Ctrl-C", ""])
def test_at_a_terminal_no_error_and_no_ctrl_c_ends_the_conversation(
    disturbance: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(f"hello\n{disturbance}\nagain\n"))
    assert main(["chat", "--url", url]) == 0
    assert [each["content"] for each in Answering.asked[-1]["messages"]] == [
        "hello",
        "hello\x1b!\nbye",
        "again",
    ]


def test_at_a_terminal_what_came_of_an_answer_is_kept_and_a_new_conversation_has_nothing_of_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("break\nmore\n/new\nhello\n"))
    assert main(["chat", "--url", url]) == 0
    conversations = [[each["content"] for each in asked["messages"]] for asked in Answering.asked]
    assert conversations == [["break"], ["break", "break\x1b!\nbye", "more"], ["hello"]]
