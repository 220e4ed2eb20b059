"""Transports between processes, opened by addresses and keys, by rank, or from the environment."""

from __future__ import annotations

import inspect
import os
from typing import Literal

from moesched import plugins
from moesched.cluster.endpoints import endpoint
from moesched.cluster.messages import Begin
from moesched.errors import BadInput
from moesched.seams import Transport

Way = Literal["addresses", "rank", "environment"]


def way_of(transport: str) -> Way:
    """Return the way in which a transport's ranks find each other, as the parameters of its constructor show it.

    Each way has its parameters:
    "addresses": `(addresses, rank, *, keys, listen, epoch, lost_after_seconds)`; connections are encrypted.
    "rank": `(rank, ranks, *, meeting)`; the transport finds rank 0 by the variables MASTER_ADDR and MASTER_PORT.
    "environment": `()`; the program that started the processes has set all variables that the transport needs.

    Raises:
        BadInput: there is no transport of that name, or it does not connect processes.
    """
    parameters = inspect.signature(plugins.find("transports", transport)).parameters
    if "addresses" in parameters:
        return "addresses"
    if {"rank", "ranks", "meeting"} <= parameters.keys():
        return "rank"
    if "ranks" in parameters or any(each.default is each.empty for each in parameters.values()):
        raise BadInput(f"transport {transport} does not connect processes: use --transport zeromq")
    return "environment"


def meet(
    transport: str,
    begin: Begin,
    rank: int,
    *,
    secret: str,
    listen: str,
    lost_after: float,
) -> Transport:
    """Open a node's transport to the other members of an epoch, for one order.

    Args:
        transport: name of the transport.
        begin: the launcher's message with the members, the epoch and the order.
        rank: the node's index among the members.
        secret: the node's secret key.
        listen: the address to listen at, for a transport that meets by addresses.
        lost_after: seconds of silence after which a node counts as lost.
    """
    cls = plugins.find("transports", transport)
    way = way_of(transport)
    members = begin.members
    if way == "addresses":
        return cls(
            [endpoint(member.address, member.port) for member in members],
            rank,
            keys=(secret, [member.key for member in members]),
            listen=listen,
            epoch=begin.epoch,
            lost_after_seconds=lost_after,
        )
    if way == "rank":
        os.environ |= {
            "MASTER_ADDR": members[0].address,
            "MASTER_PORT": str(members[0].port),
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # torchrun's store is at another port
        }
        return cls(rank, len(members), meeting=f"epoch {begin.epoch}, order {begin.order}")
    return cls()
