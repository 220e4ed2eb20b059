"""Short scripts for an engine: submit tasks by name, end them, and read off which ones started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from moesched.drivers.rendezvous import Rendezvous
from moesched.drivers.validation import CheckedEngine
from moesched.tasks import RUNNING, STATE_NAMES, Block, Collective, Discipline, Kernel, Lane, Task
from moesched.work import Work

WORK = Work("test", "gpu")


class Script:
    """An engine with its rules checked, whose tasks and blocks go by their names.

    Args:
        lanes: the lanes' names, each with `in_order`, `ready_first`, or `stream`: all streams are of one device.
    """

    def __init__(self, **lanes: Discipline | Literal["stream"]) -> None:
        self.lanes = {
            name: Lane(name, domain="device") if kind == "stream" else Lane(name, kind)
            for name, kind in lanes.items()
        }
        self.engine = CheckedEngine(self.lanes.values())
        self.tasks: dict[str, Task] = {}
        self.blocks: dict[str, Block] = {}

    def submit(
        self,
        name: str,
        lane: str,
        reads: str = "",
        writes: str = "",
        *,
        after: Sequence[str] = (),
        urgency: int = 0,
    ) -> Task:
        """A task that reads and writes the blocks with those one-letter names."""
        task = Kernel(self.lanes[lane], WORK, name)
        self.tasks[name] = task
        before = [self.tasks[each] for each in after]
        return self.engine.submit(task, self.of(reads), self.of(writes), before, urgency)

    def collective(
        self, name: str, lane: str, reads: str = "", writes: str = "", says: str = "sum"
    ) -> Collective:
        """This rank's part of a collective."""
        task = Collective(self.lanes[lane], WORK, name, signature=says)
        self.tasks[name] = task
        return self.engine.collective(task, self.of(reads), self.of(writes))

    def finish(self, name: str, value: object = None) -> None:
        """A task ends well."""
        self.engine.finish(self.tasks[name], value)
        self.engine.check()

    def issue(self, name: str) -> None:
        """A stream takes a task in."""
        self.engine.issued(self.tasks[name])
        self.engine.check()

    def fail(self, name: str) -> None:
        """A task raises."""
        self.engine.fail(self.tasks[name], ValueError(f"{name} broke"))
        self.engine.check()

    def cancel(self, name: str) -> bool:
        """A task is withdrawn; says whether it could be."""
        cancelled = self.engine.cancel(self.tasks[name])
        self.engine.check()
        return cancelled

    def started(self) -> list[str]:
        """The tasks that took their lanes since the last call."""
        names = [task.verb for task in self.engine.started]
        self.engine.started.clear()
        return names

    def state(self, name: str) -> str:
        """The state of a task."""
        return STATE_NAMES[self.tasks[name].state]

    def run(self) -> list[str]:
        """End what runs, in the order of the starts, until nothing does; returns all that started."""
        order = []
        while self.engine.started:
            task = self.engine.started.pop(0)
            order.append(task.verb)
            if task.state == RUNNING:
                self.engine.finish(task)
        self.engine.check_over()
        return order

    def of(self, names: str) -> list[Block]:
        """The blocks with those one-letter names."""
        return [self.blocks.setdefault(name, Block(name)) for name in names]


def meet(*scripts: Script) -> Rendezvous:
    """Have the scripts' engines be ranks that meet for collectives."""
    return Rendezvous([script.engine for script in scripts])
