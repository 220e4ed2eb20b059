"""Keys of a mesh of ranks: who may come in, over connections that CURVE encrypts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import zmq

from moesched.cluster.curve.keys import key_problem, public_key
from moesched.errors import BadInput


class Keys(NamedTuple):
    """What a rank needs to know of keys; each is 40 characters of Z85.

    Attributes:
        secret: its own.
        public: those of all ranks, in their order.
    """

    secret: str
    public: Sequence[str]

    def __repr__(self) -> str:
        return f"Keys(secret=…, public={self.public!r})"


def check_keys(keys: Keys, rank: int, ranks: int) -> None:
    """Whether a rank can use these keys.

    Raises:
        BadInput: there are too few, one is none, two are alike, or its own public key is another rank's.
    """
    if len(keys.public) != ranks:
        raise BadInput(f"{len(keys.public)} public keys for {ranks} ranks; each rank has one")
    for each, key in enumerate(keys.public):
        problem = key_problem(key)
        if problem:
            raise BadInput(
                f"the public key of rank {each} is none: {problem}: make one with `moesched keygen`"
            )
    if len(set(keys.public)) < ranks:
        raise BadInput("two ranks have the same public key; make one for each with `moesched keygen`")
    if public_key(keys.secret) != keys.public[rank]:
        raise BadInput(f"the secret key does not belong to the public key of rank {rank}")


def seal(socket: zmq.Socket[bytes], keys: Keys, rank: int, peer: int | None) -> None:
    """Let a socket speak CURVE: to one peer, or, where `peer` is None, with all that the watch lets in."""
    socket.curve_publickey = keys.public[rank].encode()
    socket.curve_secretkey = keys.secret.encode()
    if peer is None:
        socket.curve_server = True
        socket.set_string(zmq.ZAP_DOMAIN, "moesched")
    else:
        socket.curve_serverkey = keys.public[peer].encode()
