"""Parses and writes addresses of hosts: names, and IPv4 and IPv6 addresses in any spelling."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from moesched.errors import BadInput

ANY = "*"
"""The address to listen at on all interfaces."""


def plain_address(text: str) -> str:
    """Return an IP address in its shortest form, without brackets; a host name is returned unchanged."""
    try:
        return str(ip_address(text.removeprefix("[").removesuffix("]")))
    except ValueError:
        return text


def is_ipv6(address: str) -> bool:
    """Test whether an address is a literal IPv6 address; host names are not, since they are resolved to IPv4."""
    return ":" in address


def place(address: str, port: int) -> str:
    """Join address and port to a text such as [::1]:7000."""
    return f"[{address}]:{port}" if is_ipv6(address) else f"{address}:{port}"


def endpoint(address: str, port: int) -> str:
    """Return ZeroMQ's name for the TCP socket of an address and port, such as tcp://[::1]:7000."""
    return f"tcp://{place(address, port)}"


def listening_at(address: str) -> str:
    """Return the interface to listen on for peers that connect to `address`.

    The interface is `address` if that is an IP address. For a host name it is `ANY`, since a machine often resolves its
    own name to another address than its peers do.
    """
    try:
        ip_address(address)
    except ValueError:
        return ANY
    return address


def reserved_port(address: str) -> socket.socket:
    """Return a socket bound to a free port at `address`; the port is reserved until the socket is closed.

    Raises:
        BadInput: the address is not this machine's.
    """
    found = socket.socket(socket.AF_INET6 if is_ipv6(address) else socket.AF_INET)
    # Lets another socket bind the port while an earlier connection lingers.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("" if address == ANY else address, 0))
    except OSError:
        found.close()
        raise BadInput(not_here(address)) from None
    return found


def not_here(address: str) -> str:
    """Return the error message for an address in the cluster file that is not an address of this machine."""
    return f"{address} is not an address of this machine: correct the cluster file"
