"""Collectives between the ranks of one process: each takes its lanes only when all ranks have arrived at it.

Collectives form one sequence, equal on all ranks, numbered by tickets. If ranks submit different operations under one
ticket, or a rank has ended, the collective is cancelled with an error that gives the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesched.engine import Engine
from moesched.errors import PolicyError, TaskCancelled
from moesched.tasks import CANCELLED, Collective


class Rendezvous:
    """Collects each rank's part of a collective, and admits a collective to its lanes once all ranks' parts are ready.

    Args:
        engines: one for each rank.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._alone = engines[0] if len(engines) == 1 else None
        self._waiting: dict[int, dict[int, Collective]] = {}
        self._broken: dict[int, BaseException] = {}
        self._gone: dict[int, tuple[int, BaseException]] = {}
        self.arrived: list[Collective] = []
        self._ranks = {}
        for rank, engine in enumerate(engines):
            engine.arrived = self.arrived
            for lane in engine.lanes:
                self._ranks[lane] = rank

    def collect(self) -> None:
        """Take the ready parts of collectives from the engines, and admit each collective whose parts are all ready."""
        while self.arrived:
            task = self.arrived.pop(0)
            if self._alone is None:
                self._arrive(self._ranks[task.lane], task)
            elif task.state != CANCELLED:
                self._alone.admit(task)

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Record that a rank's coroutine has ended, and cancel the collectives that lack this rank's part.

        error: the exception that ended the coroutine; None if it returned. After an error, the collectives that have
            this rank's part and still wait for other ranks are cancelled, too.
        """
        reason = error or PolicyError(f"rank {rank} ended without a part in it")
        self._gone[rank] = (self._engines[rank].tickets, reason)
        for ticket, parts in list(self._waiting.items()):
            withdrawn = error is not None if rank in parts else ticket >= self._engines[rank].tickets
            if withdrawn:
                self._break(ticket, reason)

    def _arrive(self, rank: int, task: Collective) -> None:
        ticket = task.ticket
        parts = self._waiting.setdefault(ticket, {})
        if task.state != CANCELLED:
            parts[rank] = task
        if task.cause is not None:
            self._break(ticket, task.cause)
            return
        for gone, (tickets, error) in self._gone.items():
            if gone != rank and ticket >= tickets:
                self._broken.setdefault(ticket, error)
        if ticket in self._broken:
            self._break(ticket, self._broken[ticket])
            return
        if len(parts) < len(self._engines):
            return
        signatures = {part.signature for part in parts.values()}
        if len(signatures) > 1:
            said = "; ".join(f"rank {rank}: {part.signature}" for rank, part in sorted(parts.items()))
            problem = PolicyError(f"the ranks disagree on collective #{ticket}: {said}")
            for part in parts.values():
                part.cause = problem
            self._break(ticket, problem)
            return
        del self._waiting[ticket]
        for rank, part in sorted(parts.items()):
            self._engines[rank].admit(part)

    def _break(self, ticket: int, cause: BaseException) -> None:
        """Cancel all ranks' parts of a collective, also parts that arrive later."""
        self._broken[ticket] = cause
        for rank, part in sorted(self._waiting.pop(ticket, {}).items()):
            if part.cause is None:
                part.cause = TaskCancelled(f"collective #{ticket} {part.signature} cannot happen: {cause}")
            self._engines[rank].admit(part)
