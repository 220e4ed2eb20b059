"""Networks between the nodes of a cluster, described in TOML profiles.

Every figure of a shipped profile has its source beside it in the file.
"""

from __future__ import annotations

import msgspec

from moesched.machines.toml_library import (
    Price,
    Rate,
    Seconds,
    convert_profile,
    decode_profile,
    profile_names,
    profile_text,
)

NETWORK = "network"
"""Name of the lane and the resource that carry exchanges between nodes."""


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A network between the nodes of a cluster; each node has one network card.

    Attributes:
        latency_seconds: the least time of one exchange among all nodes, software included.
        bandwidth: bytes per second of one card.
        price_usd: price of each node's card; 0 if the card is part of every machine.
    """

    name: str
    latency_seconds: Seconds
    bandwidth: Rate
    price_usd: Price = 0.0
    description: str = ""

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of one exchange among all nodes, in which a card transfers `nbytes` bytes."""
        return self.latency_seconds + nbytes / self.bandwidth


def network_names() -> list[str]:
    """Return the names of the shipped profiles of networks."""
    return profile_names("moesched.machines.networks")


def load_network(name_or_file: str) -> Network:
    """Load a network: a shipped profile by its name, or a TOML file by its path.

    Raises:
        BadInput: there is no such profile or file, or the file does not describe a network.
    """
    text = profile_text("moesched.machines.networks", "network", name_or_file)
    return convert_profile(decode_profile(text, "network", name_or_file), Network, "", name_or_file)
