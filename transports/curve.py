"""The CURVE keys by which ranks authenticate each other and encrypt their ZeroMQ connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import zmq

from moesched.cluster.curve.keys import key_problem, public_key
from moesched.errors import BadInput


class Keys(NamedTuple):
    """The CURVE keys that a rank needs; each key is 40 characters of Z85.

    Attributes:
        secret: the rank's own secret key.
        public: the public keys of all ranks, in order.
    """

    secret: str
    public: Sequence[str]

    def __repr__(self) -> str:
        return f"Keys(secret=…, public={self.public!r})"


def check_keys(keys: Keys, rank: int, ranks: int) -> None:
    """Check that a rank can use these keys in a group of `ranks` ranks.

    Raises:
        BadInput: the number of public keys is not `ranks`, a key is invalid, two are equal, or the secret key does not
            belong to the rank.
    """
    if len(keys.public) != ranks:
        raise BadInput(f"{len(keys.public)} public keys for {ranks} ranks; each rank has one")
    for each, key in enumerate(keys.public):
        problem = key_problem(key)
        if problem:
            raise BadInput(
                f"the public key of rank {each} is not valid: {problem}: make one with `moesched keygen`"
            )
    if len(set(keys.public)) < ranks:
        raise BadInput("two ranks have the same public key; make one for each with `moesched keygen`")
    if public_key(keys.secret) != keys.public[rank]:
        raise BadInput(f"the secret key does not belong to the public key of rank {rank}")


def seal(socket: zmq.Socket[bytes], keys: Keys, rank: int, peer: int | None) -> None:
    """Encrypt a socket of a rank with CURVE.

    Args:
        peer: the rank that the socket connects to; None for the socket on which the rank listens.
    """
    socket.curve_publickey = keys.public[rank].encode()
    socket.curve_secretkey = keys.secret.encode()
    if peer is None:
        socket.curve_server = True
        socket.set_string(zmq.ZAP_DOMAIN, "moesched")
    else:
        socket.curve_serverkey = keys.public[peer].encode()
