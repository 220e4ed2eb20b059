"""Records which rows (tokens) of an expert run in which `run_expert` task, and checks that each row runs once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from moesched.errors import OutOfOrder, PolicyError
from moesched.steps.micro_batch import MicroBatch, RoutingState
from moesched.tasks import RowRange


class Share(NamedTuple):
    """The rows that a task of an expert runs in one micro-batch.

    Attributes:
        batch: the micro-batch.
        tokens: number of rows that the expert has there.
        rows: the range of these rows that the task runs.
    """

    batch: MicroBatch
    tokens: int
    rows: range


def named_micro_batches(micro_batch: int | Collection[int], rows: range | None) -> tuple[int, ...]:
    """Return the numbers of the micro-batches that a call of `run_expert` names, as a tuple.

    rows: the range of rows that the call names; None for all rows.

    Raises:
        PolicyError: the call names none, or several together with a range of rows.
    """
    if not isinstance(micro_batch, Collection):
        return (micro_batch,)
    numbers = tuple(micro_batch)
    if not numbers:
        raise PolicyError("run_expert: no micro-batch is named: give one that is routed, or several")
    if rows is not None and len(numbers) > 1:
        raise PolicyError("run_expert: rows are those of one micro-batch: call it for each of them")
    return numbers


def require_each_once(shares: Iterable[Share]) -> None:
    """Check that no micro-batch is in two of the shares.

    Raises:
        PolicyError: a micro-batch is named twice.
    """
    seen = set()
    for batch, _, _ in shares:
        if batch.index in seen:
            raise PolicyError(f"run_expert: mb{batch.index} is named twice: name each micro-batch once")
        seen.add(batch.index)


def share_of(batch: MicroBatch, layer: int, expert: int, tokens: int, rows: range | None) -> Share:
    """Check the rows of a pending expert that a call of `run_expert` names, and return them as a `Share`.

    Args:
        tokens: number of rows that the expert has in the micro-batch.
        rows: the range of rows that the call names; None for all rows.

    Raises:
        PolicyError: the expert has no such rows.
        OutOfOrder: some of the rows have run already.
    """
    if rows is None:
        require_whole(batch, layer, expert)
        return Share(batch, tokens, range(tokens))
    about = _about(batch, layer, expert)
    left = batch.routing.rows_left.get(expert, (range(tokens),))
    if not isinstance(rows, range) or rows.step != 1 or not rows:
        raise PolicyError(
            f"run_expert: rows is {rows!r}, no range of rows of {about}: give one such as range(0, {tokens})"
        )
    if rows.start < 0 or rows.stop > tokens:
        raise PolicyError(f"run_expert: {in_words([rows])} go beyond {about}, which has rows 0:{tokens}")
    if not any(each.start <= rows.start and rows.stop <= each.stop for each in left):
        raise OutOfOrder(
            f"run_expert: of {in_words([rows])} of {about} some have run already: {in_words(left)} are left"
        )
    return Share(batch, tokens, rows)


def require_whole(batch: MicroBatch, layer: int, expert: int) -> None:
    """Check that none of the rows that a pending expert has in a micro-batch have run.

    Raises:
        OutOfOrder: some rows have run.
    """
    left = batch.routing.rows_left.get(expert)
    if left is not None:
        raise OutOfOrder(
            f"run_expert: a part of {_about(batch, layer, expert)} has run already: run what is left of it, "
            f"{in_words(left)}, such as rows={left[0]}"
        )


def mark_as_run(share: Share, expert: int) -> None:
    """Note that a task runs the rows of a share, so that they are no longer pending."""
    routing, rows = share.batch.routing, share.rows
    if len(rows) == share.tokens:
        _end(routing, expert)
        return
    left = tuple(
        part
        for each in routing.rows_left.pop(expert, (range(share.tokens),))
        for part in (
            range(each.start, min(each.stop, rows.start)),
            range(max(each.start, rows.stop), each.stop),
        )
        if part
    )
    if left:
        routing.rows_left[expert] = left
    else:
        _end(routing, expert)


def _end(routing: RoutingState, expert: int) -> None:
    if routing.pending is not None:
        routing.pending.discard(expert)


def ranges_of(shares: Iterable[Share]) -> tuple[RowRange, ...]:
    """Return the ranges of rows that a task runs, for its field `ranges`; empty for all rows of one micro-batch."""
    ranges = tuple(RowRange(batch.index, rows.start, rows.stop) for batch, _, rows in shares)
    whole = all(len(rows) == tokens for _, tokens, rows in shares)
    return () if whole and len(ranges) == 1 else ranges


def missing(routing: RoutingState) -> str:
    """Return the experts that have yet to run, in words, each with its missing rows if it ran in part."""
    return ", ".join(
        f"E{expert} ({in_words(routing.rows_left[expert])})" if expert in routing.rows_left else f"E{expert}"
        for expert in sorted(routing.pending or ())
    )


def _about(batch: MicroBatch, layer: int, expert: int) -> str:
    return f"E{expert} of L{layer} mb{batch.index}"


def in_words(ranges: Iterable[range]) -> str:
    """Return ranges of rows in words, such as "rows 0:3 and 5:9"."""
    return "rows " + " and ".join(f"{each.start}:{each.stop}" for each in ranges)
