"""How nodes' transports are opened, each as it meets its others: by addresses and keys, by rank, or by itself."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any, Literal

from moesched import plugins
from moesched.cluster.messages import Member
from moesched.errors import BadInput
from moesched.seams import Transport

Way = Literal["addresses", "rank", "surroundings"]


def way_of(transport: str) -> Way:
    """How nodes that are processes meet over a transport.

    "addresses": it is made with all addresses, encrypted by keys. "rank": with a rank, of so many, and finds the first
    node by MASTER_ADDR and MASTER_PORT. "surroundings": what started the processes has told it all.

    Raises:
        BadInput: there is none of that name, or it does not join processes.
    """
    parameters = inspect.signature(plugins.find("transports", transport)).parameters
    if "addresses" in parameters:
        return "addresses"
    if "rank" in parameters and "ranks" in parameters:
        return "rank"
    if "ranks" in parameters or any(each.default is each.empty for each in parameters.values()):
        raise BadInput(f"transport {transport} does not join processes: use --transport zeromq")
    return "surroundings"


def meet(
    transport: str,
    members: Sequence[Member],
    place: int,
    *,
    secret: str,
    listen: str,
    epoch: int,
    lost_after: float,
) -> Transport:
    """A node's transport to the other members of an epoch.

    Args:
        place: the node's among the members.
        secret: its key.
        listen: where it is to listen, where it does.
    """
    cls: Any = plugins.find("transports", transport)
    way = way_of(transport)
    opened: Transport
    if way == "addresses":
        opened = cls(
            [f"tcp://{member.address}:{member.port}" for member in members],
            place,
            keys=(secret, [member.key for member in members]),
            listen=listen,
            epoch=epoch,
            lost_after_seconds=lost_after,
        )
    elif way == "rank":
        os.environ |= {"MASTER_ADDR": members[0].address, "MASTER_PORT": str(members[0].port)}
        opened = cls(place, len(members))
    else:
        opened = cls()
    return opened
