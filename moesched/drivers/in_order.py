"""Computes the times of captured steps on in-order lanes: a task starts once all tasks that it waits for have ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moesched.drivers.capture import StepGraph


def play_in_order(steps: Sequence[StepGraph], durations: Iterable[list[int]]) -> tuple[list[int], list[int]]:
    """Return the start and the end of every task, in nanoseconds.

    Each task has an edge from the task before it on its lane, so the times are computed task by task in program order.
    A step's tasks start only when the step two before it has ended; those of prefill and the first decode step, when
    loading has ended.

    Args:
        steps: the captured steps, with edges for in-order lanes.
        durations: nanoseconds of the tasks of each step, in the same order.
    """
    starts: list[int] = []
    ends: list[int] = []
    sampled: list[int] = []
    submitted = 0
    for index, (step, lasting) in enumerate(zip(steps, durations, strict=True)):
        if index:
            submitted = max(submitted, sampled[max(0, index - 2)])
        base = len(ends)
        for backs, duration in zip(step.edges, lasting, strict=True):
            start = submitted
            for back in backs:
                end = ends[-back]
                if end > start:
                    start = end
            starts.append(start)
            ends.append(start + duration)
        sampled.append(max((ends[base + position] for position in step.final), default=0))
    return starts, ends
