"""A client of a running server: conversations whose answers come piece by piece. It needs only the standard library."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from moesched.errors import BadInput, MoeschedError
from moesched.system.plain_text import shown

SECONDS = 600.0
"""The longest wait for a piece of an answer, in seconds."""
DATA = b"data: "
DONE = DATA + b"[DONE]"
OF_ANOTHER_FORM = (ValueError, LookupError, TypeError, AttributeError)
"""Errors that reading an answer raises if the answer is not JSON or lacks the expected fields."""


class Client:
    """Asks a server that speaks OpenAI's API.

    Args:
        url: the server's address; `/v1` is added if it has no path.
        key: the API key that the server requires; None if it requires none.

    Raises:
        BadInput: the address is no HTTP address, or has a query, a fragment, a user or a password.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            self._secure = parts.scheme == "https"
            self._host, self._port = parts.hostname or "", parts.port
            self._connection()
        except (ValueError, HTTPException):
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"{shown(url)} is no address: give one such as http://127.0.0.1:8000")
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise BadInput(
                f"{shown(url)} is more than an address and a path: give one such as http://127.0.0.1:8000/v1, "
                "and a key with --api-key-file"
            )
        self._url = url
        self._base = parts.path.rstrip("/") or "/v1"
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )

    def model(self) -> str:
        """Ask for the name of the served model.

        Raises:
            BadInput: the server cannot be reached, or asks for a key.
        """
        with closing(self._connection()) as connection:
            listed = self._asked(connection, "GET", f"{self._base}/models")
            try:
                return str(json.loads(listed.read())["data"][0]["id"])
            except (OSError, HTTPException, *OF_ANOTHER_FORM):
                raise BadInput(f"{self._url} is no server of models: give the address of one") from None

    def chat(self, messages: Sequence[Mapping[str, str]], **settings: Any) -> Generator[str]:
        """Send a conversation in OpenAI's form, and yield the pieces of the answer's text.

        Args:
            settings: further fields of the request.

        Raises:
            BadInput: the server cannot be reached, or does not take the request.
            MoeschedError: the answer broke off.
        """
        body = json.dumps({"messages": messages, "stream": True, **settings}).encode()
        with closing(self._connection()) as connection:
            response = self._asked(connection, "POST", f"{self._base}/chat/completions", body)
            try:
                yield from _pieces(response)
            except (OSError, HTTPException) as error:
                raise MoeschedError(f"the answer of {self._url} broke off: {error}") from error
            except OF_ANOTHER_FORM as error:
                raise MoeschedError(f"{self._url} answers in another form than OpenAI's API") from error

    def _connection(self) -> HTTPConnection:
        kind = HTTPSConnection if self._secure else HTTPConnection
        return kind(self._host, self._port, timeout=SECONDS)

    def _asked(
        self, connection: HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> HTTPResponse:
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
        except (OSError, HTTPException, UnicodeError) as error:
            raise BadInput(
                f"cannot reach {self._url}: {error}: start a server with `moesched serve MODEL`, or give its --url"
            ) from error
        if response.status == HTTPStatus.UNAUTHORIZED:
            raise BadInput(
                f"{self._url} asks for another API key: give --api-key-file, or set MOESCHED_API_KEY"
            )
        if response.status != 200:
            raise BadInput(f"{self._url}: {_fault(response)}")
        return response


def _pieces(response: HTTPResponse) -> Iterator[str]:
    for line in response:
        if line.startswith(DONE):
            return
        if not line.startswith(DATA + b"{"):
            continue
        event = json.loads(line.removeprefix(DATA))
        if "error" in event:
            raise MoeschedError(str(event["error"]["message"]))
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text
    raise ConnectionError("the connection ended before it did")


def _fault(response: HTTPResponse) -> str:
    try:
        return str(json.loads(response.read())["error"]["message"])
    except (OSError, HTTPException, *OF_ANOTHER_FORM):
        return f"it answered {response.status} {response.reason}"
