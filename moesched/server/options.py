"""Options of the server for HTTP: address, key and limits."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated

from moesched.errors import BadInput
from moesched.options import Option, Options
from moesched.system.input_file import read_input
from moesched.system.plain_text import shown

HTTP = "HTTP"
"""Heading of options in the help."""
KEY_VARIABLE = "MOESCHED_API_KEY"
MOST_KEY_BYTES = 10_000


class FrontOptions(Options):
    """Options for the address, the key and the limits of a server."""

    host: Annotated[
        str, Option("Address to listen at. Others than loopback need a key.", "ADDRESS", group=HTTP)
    ] = "127.0.0.1"
    port: Annotated[int, Option("Port; 0 for a free one.", "N", group=HTTP, ge=0, le=65_535)] = 8000
    api_key_file: Annotated[
        Path | None,
        Option(
            f"File with the key that clients have to send. By default what {KEY_VARIABLE} says, if it is set.",
            "FILE",
            group=HTTP,
        ),
    ] = None
    proxies: Annotated[
        tuple[str, ...],
        Option(
            "Address of a proxy whose X-Forwarded-For names the client, or a network such as 10.0.0.0/8; repeatable. "
            "By default that header is ignored.",
            "ADDRESS",
            flag="--proxy",
            group=HTTP,
        ),
    ] = ()
    queue: Annotated[
        int,
        Option(
            "Answers that may wait for a place; more are told to come later (429).", "N", group=HTTP, ge=0
        ),
    ] = 64
    max_tokens: Annotated[
        int, Option("Most tokens of a chat's answer where the request does not say.", "N", group=HTTP, ge=1)
    ] = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.host.strip():
            raise BadInput(
                "--host is empty: give an address, such as 127.0.0.1 for this machine alone, or 0.0.0.0 for others too"
            )
        for each in self.proxies:
            _require_address(each)

    def key(self) -> str | None:
        """Return the API key that clients have to send; None if they need none.

        Raises:
            BadInput: the key cannot be read, or is missing and other machines reach the address.
        """
        if self.api_key_file is not None:
            return read_key(self.api_key_file)
        key = environment_key()
        if key is None and not is_loopback(self.host):
            raise BadInput(
                f"--host {self.host} lets others in: set a key with --api-key-file FILE, or in {KEY_VARIABLE}"
            )
        return key


def environment_key() -> str | None:
    """Return the API key in the environment; None if the variable is not set.

    Raises:
        BadInput: the variable has no usable key.
    """
    given = os.environ.get(KEY_VARIABLE)
    return None if given is None else _checked(given.strip(), KEY_VARIABLE)


def read_key(file: Path) -> str:
    """Read an API key from a file.

    Raises:
        BadInput: the file cannot be read, or has no usable key.
    """
    data = read_input(file, "API key", MOST_KEY_BYTES)
    return _checked(data.decode("ascii", "replace").strip(), str(file))


def _checked(key: str, where: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise BadInput(f"{where} has no key: give one of ASCII characters without spaces")
    return key


def _require_address(proxy: str) -> None:
    """Check that a proxy is given as an IP address, or as the address of a network.

    Raises:
        BadInput: the text is neither.
    """
    try:
        ipaddress.ip_network(proxy)
    except ValueError as error:
        raise BadInput(f"--proxy {shown(proxy)}: {error}: give an address, such as 127.0.0.1") from error


def is_loopback(host: str) -> bool:
    """Test whether an address is a loopback address, which other machines cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
