"""Holds a run of random programs against the same programs executed one task after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.robustness._random_program import RandomRun, Rank, Record, digest
from moesched.tasks import (
    CANCELLED,
    DONE,
    FAILED,
    STATE_NAMES,
    Block,
    Collective,
    Task,
)

KINDS = {
    "value": "a task, a block or an awaited handle had a wrong value",
    "order": "a task ran beside or before one that it had to wait for",
    "end": "a task ended otherwise than it should, such as running although its input had failed",
    "rule": "the engine broke one of its rules, the ledger contradicted itself, or something was left unsettled",
    "error": "the run raised what is no part of the game",
    "stuck": "the run did not end",
}


class Problem(NamedTuple):
    """Something that was wrong with a run; `kind` is one of KINDS."""

    kind: str
    what: str


class Verdict(NamedTuple):
    """Outcome of a run: its tasks by how they ended, and all that was wrong."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    problems: Sequence[Problem] = ()


def judge(run: RandomRun) -> Verdict:
    """Hold a run that has ended against its programs executed one task after another."""
    problems = []
    for rank in run.ranks:
        try:
            rank.engine.check_over()
        except AssertionError as error:
            problems.append(Problem("rule", f"rank {rank.number}: {error}"))
    evaluate(run)
    for rank in run.ranks:
        for record in rank.records:
            problems += _wrong_end(run, record)
        problems += [Problem("value", what) for what in _wrong_awaits(rank) + _wrong_cells(rank)]
        problems += [Problem("order", what) for what in _overlaps(rank)]
    states = [record.task.state for rank in run.ranks for record in rank.records]
    return Verdict(states.count(DONE), states.count(FAILED), states.count(CANCELLED), problems)


def evaluate(run: RandomRun) -> None:
    """Execute the programs in their order, as if nothing failed: ranks in turn, from collective to collective."""
    remaining = [list(rank.records) for rank in run.ranks]
    for ticket in range(max(len(rank.parts) for rank in run.ranks) + 1):
        for records in remaining:
            while records and not isinstance(records[0].task, Collective):
                record = records.pop(0)
                record.expected = digest(record.rank.number, record.task.id, *_inputs(record))
        parts = [records.pop(0) for records in remaining if records]
        for part in parts:
            part.expected = digest(ticket, *(digest(*_inputs(each)) for each in parts))


def _inputs(record: Record) -> list[int]:
    return [writer.expected + number for writer, number in record.inputs]


def _wrong_end(run: RandomRun, record: Record) -> list[Problem]:
    """Problems with the end of a task."""
    task = record.task
    if task.state == DONE and task.value != record.expected:
        return [Problem("value", f"rank {record.rank.number}: {task!r} has a wrong value")]
    what = _unexpected_end(run, record)
    return [Problem("end", f"rank {record.rank.number}: {task!r} {what}")] if what else []


def _unexpected_end(run: RandomRun, record: Record) -> str:
    task = record.task
    fed = all(writer.task.state == DONE for writer, _ in record.inputs)
    on_stream = task.lane.domain is not None  # where a task is handed over before its inputs are there
    if task.state == DONE:
        return "ended well, but should not have" if not fed or record.fails or record.withdrawn else ""
    if task.state == FAILED:
        # An interruption ends what only waits.
        cut_off = run.interrupted and run.kinds[task.lane.name] == "awaitable"
        return "" if cut_off or (record.fails and (fed or on_stream)) else f"failed: {task.cause!r}"
    if task.state != CANCELLED:
        return f"is {STATE_NAMES[task.state]} at the end"
    if record.start >= 0 and not (on_stream and not fed):
        return "ran"
    stopped = run.interrupted or record.rank.ended_badly
    if fed and not (record.withdrawn or stopped or _broken(run, task)):
        return f"was cancelled for no reason: {task.cause!r}"
    return ""


def _broken(run: RandomRun, task: Task) -> bool:
    """Test whether a collective could not take place, for what happened on any rank."""
    if not isinstance(task, Collective):
        return False
    parts = [rank.parts[task.ticket] for rank in run.ranks if task.ticket < len(rank.parts)]
    if len(parts) < len(run.ranks) or any(rank.ended_badly for rank in run.ranks):
        return True
    if any(part.task.state == DONE for part in parts):
        return False
    signatures = {part.task.signature for part in parts if isinstance(part.task, Collective)}
    unfed = any(writer.task.state != DONE for part in parts for writer, _ in part.inputs)
    return len(signatures) > 1 or unfed or any(part.withdrawn for part in parts)


def _wrong_awaits(rank: Rank) -> list[str]:
    return [
        f"rank {rank.number}: awaiting {record.task!r} gave a wrong value"
        for record, value in rank.awaited
        if value != record.expected
    ]


def _wrong_cells(rank: Rank) -> list[str]:
    """Blocks that do not hold at the end what the last task that writes them in program order has left there."""
    return [
        f"rank {rank.number}: {block.name} holds a wrong value at the end"
        for block, (writer, number) in rank.writers.items()
        if writer.task.state == DONE and rank.cells[block] != writer.expected + number
    ]


def _overlaps(rank: Rank) -> list[str]:
    """Tasks that used the same storage at once, or in another order than that of the program."""
    problems = []
    written: dict[Block, Record] = {}
    read: dict[Block, list[Record]] = {}
    for record in rank.records:
        if record.start < 0:
            continue
        for block in record.reads:
            read.setdefault(block, []).append(record)
        earlier = [written[block] for block in (*record.reads, *record.writes) if block in written]
        earlier += [
            reader for block in record.writes for reader in read.get(block, ()) if reader is not record
        ]
        problems += [
            f"rank {rank.number}: {record.task!r} did not wait for {other.task!r}"
            for other in earlier
            if record.start < other.end
        ]
        for block in record.writes:
            written[block] = record
            read[block] = []
    return problems
