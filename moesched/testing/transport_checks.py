"""The conformance suite of transports: runs exchanges between ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial, reduce
from operator import add
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from moesched.errors import TransportError
from moesched.seams import Abandons, Exchange, Transport
from moesched.system.own_loop import run_on_own_loop
from moesched.testing.asserts import require_asserts

Array = npt.NDArray[Any]
T = TypeVar("T")

WAITING = {"all_reduce": (0, 1), "broadcast": (1,), "gather": (0,)}
"""By collective, the ranks that wait for the other one, if there are two ranks and rank 0 is the root."""


def check_transport(make: Callable[[int], Sequence[Transport]], *, patience_seconds: float = 30.0) -> None:
    """Check that a transport keeps the promises of `moesched.seams.Transport`, with one, two and three ranks.

    Args:
        make: takes a number of ranks, and returns a transport for each of them, in order; they may be the same object.
        patience_seconds: how long a call may take to end.

    Raises:
        AssertionError: a promise is broken.
    """
    require_asserts("check_transport")
    for ranks in (1, 2, 3):
        transports = make(ranks)
        try:
            _check_all_reduce(transports, patience_seconds)
            _check_broadcast(transports, patience_seconds)
            _check_gather(transports, patience_seconds)
        except BaseException:
            _close(transports)
            raise
        if ranks == 2:
            _check_close_wakes_the_waiting(transports, patience_seconds)
        else:
            _close(transports)
    for collective in WAITING:
        _check_disagreement_is_named(make(2), collective, patience_seconds)
    _check_an_abandoned_exchange_ends(make(2), patience_seconds)


def _check_all_reduce(transports: Sequence[Transport], patience: float) -> None:
    """Check that all_reduce adds the ranks' parts in the order of ranks; any other order would give other bits."""
    random = np.random.default_rng(0)
    for ticket, rows in enumerate((1, 3, 400, 1)):
        scale = 10.0 ** random.integers(-6, 6, size=(len(transports), rows, 96))
        parts = (random.standard_normal(scale.shape) * scale).astype(np.float32)
        expected = reduce(add, parts).copy()
        exchange = Exchange(ticket, f"{rows} rows")
        calls = [
            partial(_changed_after, partial(one.all_reduce, rank, exchange, parts[rank]), parts[rank])
            for rank, one in enumerate(transports)
        ]
        for total in _at_once(calls, patience):
            assert isinstance(total, np.ndarray), f"all_reduce gives {total!r}, not an array"
            assert total.dtype == expected.dtype and total.shape == expected.shape, "another shape or type"
            assert total.tobytes() == expected.tobytes(), "not the sum in the order of ranks"
            total[:] = 0  # a result belongs to its caller: the others keep theirs
        assert (parts == -1).all(), "a part was changed: a result is no copy"


def _check_broadcast(transports: Sequence[Transport], patience: float) -> None:
    for root in range(len(transports)):
        sent = np.arange(12, dtype=np.int64).reshape(3, 4) + root
        exchange = Exchange(4 + root, "broadcast")
        calls = [
            partial(one.broadcast, rank, exchange, sent if rank == root else None, root)
            for rank, one in enumerate(transports)
        ]
        calls[root] = partial(_changed_after, calls[root], sent)
        expected = sent.copy()
        for found in _at_once(calls, patience):
            assert isinstance(found, np.ndarray), f"broadcast gives {found!r}, not an array"
            assert not np.shares_memory(found, sent), "a result is the root's own array, not a copy"
            assert (found.dtype, found.tolist()) == (sent.dtype, expected.tolist()), "not what the root had"
            found[:] = 0  # a result belongs to its caller: the others keep theirs


def _check_gather(transports: Sequence[Transport], patience: float) -> None:
    ranks = len(transports)
    for root in range(ranks):
        parts = [np.full((rank, 2), rank, np.float32) for rank in range(ranks)]
        exchange = Exchange(4 + ranks + root, "gather")
        calls = [
            partial(_changed_after, partial(one.gather, rank, exchange, parts[rank], root), parts[rank])
            for rank, one in enumerate(transports)
        ]
        for rank, found in enumerate(_at_once(calls, patience)):
            if rank != root:
                assert found is None, "parts on a rank that is not the root"
                continue
            assert found is not None, "no parts on the root"
            assert [(each.dtype, each.tolist()) for each in found] == [
                (np.dtype(np.float32), [[rank, rank]] * rank) for rank in range(ranks)
            ], "not all the parts"
            for each in found:
                each[:] = 0
        assert all((part == -1).all() for part in parts), "a part was changed: the root's result is no copy"


def _changed_after(call: Callable[[], T], part: Array) -> T:
    """Call a function that sends `part`, then overwrite `part`, as callers may do; return the function's result.

    Raises:
        AssertionError: the call changed `part`.
    """
    before = part.tobytes()
    result = call()
    assert part.tobytes() == before, "a part was changed"
    part[:] = -1
    return result


def _check_disagreement_is_named(transports: Sequence[Transport], collective: str, patience: float) -> None:
    part = np.ones(2, np.float32)
    root = () if collective == "all_reduce" else (0,)
    calls = [
        _begun(
            partial(
                getattr(transports[rank], collective), rank, Exchange(0, f"signature {rank}"), part, *root
            )
        )
        for rank in range(2)
    ]
    errors = [_error_of(call, patience) for call in calls]
    for error in (errors[rank] for rank in WAITING[collective]):
        assert isinstance(error, TransportError), "ranks that disagree go on"
        assert "signature 0" in str(error) and "signature 1" in str(error), "it is not said on what"
    _close(transports)


def _check_close_wakes_the_waiting(transports: Sequence[Transport], patience: float) -> None:
    waiting = _begun(partial(transports[0].all_reduce, 0, Exchange(8), np.ones(2, np.float32)))
    _close(transports)
    error = _error_of(waiting, patience)
    assert isinstance(error, TransportError), f"after aclose a waiting rank gets {error!r}"


def _check_an_abandoned_exchange_ends(transports: Sequence[Transport], patience: float) -> None:
    waits, leaves = transports
    if isinstance(leaves, Abandons):
        waiting = _begun(partial(waits.all_reduce, 0, Exchange(0), np.ones(2, np.float32)))
        leaves.abandon(1, Exchange(0), "out of luck")
        error = _error_of(waiting, patience)
        assert isinstance(error, TransportError), f"a rank gets {error!r} from an abandoned exchange"
        assert "out of luck" in str(error), "the reason is not given"
    _close(transports)


def _at_once(calls: Sequence[Callable[[], T]], patience: float) -> list[T]:
    """Make the ranks' calls on concurrent threads, the last rank's first; return the results in the order of ranks."""
    running = [_begun(call) for call in reversed(calls)]
    ended, _ = wait(running, patience, FIRST_EXCEPTION)
    for each in (*ended, *running):
        if (error := _error_of(each, patience)) is not None:
            raise error
    return [each.result() for each in reversed(running)]


def _begun(call: Callable[[], T]) -> Future[T]:
    """Start a call on a daemon thread, since the call may never end; return the future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def _error_of(call: Future[Any], patience: float) -> BaseException | None:
    """Wait for a call, and return its error; None if it has a result."""
    wait([call], patience)
    assert call.done(), f"a call has not ended after {patience:g} s: every one ends in a result or an error"
    return call.exception()


def _close(transports: Sequence[Transport]) -> None:
    for transport in dict.fromkeys(transports):
        run_on_own_loop(transport.aclose)
