"""The seam of transports: they carry collectives between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


class Exchange(NamedTuple):
    """Description of one collective of a run; all ranks that take part in it give the same one.

    Attributes:
        ticket: the exchange's number in the sequence of all collectives, from 0.
        signature: text that says what is exchanged; ranks with different signatures get an error that names both.
        step, layer: numbers of the step and the layer that the exchange belongs to; -1 for none.
    """

    ticket: int
    signature: str = ""
    step: int = -1
    layer: int = -1


class Transport(Protocol):
    """Carries out collectives between ranks, on arrays in host memory.

    A call names the calling `rank`. Calls come in the same order on all ranks, each on the thread of a lane, which is
    blocked until the result is there. A call returns the same bits on every rank that gets a result. Parts are not
    changed, and their owners may change them once the call returns; results belong to the caller. Each rank has a
    transport of its own, unless the ranks are threads of one process, which may share one.

    Raises:
        TransportError: a rank does not arrive in time, is lost, or is in another exchange. Every call may raise it, on
            each rank that waits for the others.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Connect to the other ranks, in one of four ways; the framework knows the way by the parameters' names.

        `(ranks)`: the ranks are threads that share this transport. `(addresses, rank, *, keys, listen, epoch,
        lost_after_seconds)`: the ranks are processes, each at one of the addresses, and connections are encrypted.
        `(rank, ranks, *, meeting)`: the ranks are processes, which find rank 0 by the environment variables MASTER_ADDR
        and MASTER_PORT, and meet only those that give the same name `meeting`. `()`: the ranks are processes that take
        all settings from the environment.
        """

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """Return the sum of all ranks' parts, which have one shape and type, added in the order of the ranks."""

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """Return the array of the rank `root`, on all ranks; the others pass None, and need not know its shape."""

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """Return the parts of all ranks in their order, on the rank `root`; None on the others. Shapes may differ."""

    async def aclose(self) -> None:
        """Free everything; waiting ranks get a TransportError. Called once, by the owner; must not raise."""


@runtime_checkable
class Abandons(Protocol):
    """A transport on which a rank can announce that it takes no part in an exchange."""

    def abandon(self, rank: int, exchange: Exchange, reason: str) -> None:
        """End an exchange with a TransportError that gives the reason, on the ranks that wait for `rank`."""
