"""Answers a policy's questions about time: whether a page has arrived, when a task ends, when a lane is idle."""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import get_ident

from moesched.errors import PolicyError
from moesched.models.layout import Page
from moesched.steps.expected_ends import ExpectedEnds, expected_ends
from moesched.steps.model_pages import require_pages
from moesched.steps.pipeline_stages import STAGE_LANES, StageLane
from moesched.steps.roles import Role
from moesched.steps.verbs.base import Verbs
from moesched.tasks import DONE, Task


class Outlook(Verbs):
    """Methods that answer questions about time; they submit no task, and need `Plan.request_times`.

    Schedules that depend on the answers may differ from run to run. Expected times come from a simulation of the lanes
    with the tasks that were submitted so far. Lanes take tasks in the same order as in the run, and each task takes the
    time that it would take alone, by the machine's cost model. On CUDA, the simulation leaves out tasks that are
    already on a stream, except the one that `seconds_until` asks about.
    """

    def arrived(self, page: Page, role: Role = "accelerator") -> bool:
        """Test whether a page is in the memory `role` now, rather than on its way there or somewhere else.

        Time passes only while the policy awaits a handle. To wait for a page, await its fetch.

        Raises:
            PolicyError: the model has no such page, no times were requested, or the policy asks endlessly without
                waiting.
        """
        plan = self._state.plan
        with self._look("arrived"):
            require_pages("arrived", [page], plan.layout)
            memory = plan.memory(role, self._state.stage_of[page.layer].number)
            slot = memory._table.get(page.id)
            return slot is not None and (slot.writer is None or slot.writer.state == DONE)

    def seconds_until(self, handle: Task) -> float:
        """Return the expected seconds until a submitted task has ended; 0 if it has.

        Raises:
            PolicyError: `handle` is no task, no times were requested, or the policy asks endlessly without waiting.
        """
        if not isinstance(handle, Task):
            raise PolicyError(f"seconds_until: {handle!r} is no handle: give what a verb returned")
        now, ends = self._expected("seconds_until", handle)
        return (ends.tasks.get(handle.id, now) - now) / 1e9

    def seconds_until_idle(self, lane: StageLane, layer: int = 0) -> float:
        """Return the expected seconds until a lane has run all tasks that were submitted to it; 0 if it is idle.

        Args:
            lane: a processor ("accelerator", "host"), a copy between the memories of accelerator and host
                ("to host", "from host"), or "fetch": the copy from where the weights live to the accelerator.
            layer: in a pipeline, any layer of the stage that is meant.

        Raises:
            PolicyError: there is no such lane or layer, no times were requested, or the policy asks endlessly without
                waiting.
        """
        if lane not in STAGE_LANES:
            known = ", ".join(map(repr, STAGE_LANES))
            raise PolicyError(f"seconds_until_idle: there is no lane {lane!r}: give one of {known}")
        self._require_layer("seconds_until_idle", layer)
        now, ends = self._expected("seconds_until_idle")
        found = self._state.stage_of[layer].named_lanes.get(lane)
        return 0.0 if found is None else (ends.lanes.get(found, now) - now) / 1e9

    def _expected(self, question: str, *asked: Task) -> tuple[int, ExpectedEnds]:
        """Return the time now in nanoseconds, and the expected ends of tasks and lanes.

        Args:
            question: the calling method's name, for messages.
            asked: tasks to simulate even if they are already on a stream.
        """
        state = self._state
        with self._look(question) as now:
            return now, expected_ends(state.lanes.values(), asked, now, state.works.price)

    def _look(self, question: str) -> AbstractContextManager[int]:
        """Return a context in which the tasks' states do not change; its value is the time in nanoseconds.

        question: the calling method's name, for messages.

        Raises:
            PolicyError: no times were requested, the policy is not running, or it asks endlessly without waiting.
        """
        if self._gate.thread != get_ident():
            raise self._gate.refusal(question)
        plan = self._state.plan
        if not plan.declared.times:
            raise PolicyError(
                f"{question}: the plan requests no times: call plan.request_times() in Policy.plan"
            )
        self._looks += 1
        if self._looks > plan.task_limit:
            raise PolicyError(
                f"{question}: asked {plan.task_limit:,} times in one step: time passes only while the policy awaits a "
                "handle: await the fetch instead"
            )
        return self._state.engine.look()
