"""Addresses of hosts: names, and literal ones of IPv4 and IPv6 in any spelling."""

from __future__ import annotations

import socket
from ipaddress import ip_address

ANY = "*"
"""Stands for all interfaces."""


def plain_address(text: str) -> str:
    """A literal address without the brackets of URLs, in its shortest form; names stay as they are."""
    try:
        return str(ip_address(text.removeprefix("[").removesuffix("]")))
    except ValueError:
        return text


def is_ipv6(address: str) -> bool:
    """Test whether a plain address is a literal one of IPv6; names are resolved to IPv4."""
    return ":" in address


def place(address: str, port: int) -> str:
    """Address and port in one text, such as [::1]:7000."""
    return f"[{address}]:{port}" if is_ipv6(address) else f"{address}:{port}"


def endpoint(address: str, port: int) -> str:
    """The endpoint of a TCP socket, as ZeroMQ takes it."""
    return f"tcp://{place(address, port)}"


def listening_at(address: str) -> str:
    """The interface to listen on for peers that connect to an address: the address itself, or `ANY` for a host name.

    A machine often resolves its own name to another address than its peers do.
    """
    try:
        ip_address(address)
    except ValueError:
        return ANY
    return address


def reserved_port(address: str) -> socket.socket:
    """A socket that holds a free port of an interface, until it is closed.

    Raises:
        OSError: the address is not this machine's.
    """
    found = socket.socket(socket.AF_INET6 if is_ipv6(address) else socket.AF_INET)
    # Lets another socket bind the port while an earlier connection lingers.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("" if address == ANY else address, 0))
    return found
