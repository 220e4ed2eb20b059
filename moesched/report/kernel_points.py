"""Computes the roofline's points for a run's kernels: FLOPs per byte, FLOP/s, and the processor's limit in FLOP/s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moesched.trace.recording import Recording, Roof


class KernelPoint(NamedTuple):
    """A point of the roofline: all tasks of one verb on one processor in one phase, prefill or decode.

    Attributes:
        resource: name of the processor.
        tasks: number of tasks.
        seconds: total time of the tasks.
        intensity: FLOPs per byte that the tasks access.
        rate: FLOP/s while the tasks run.
        attainable: FLOP/s that the processor allows at this intensity; None if its limits are not known.
    """

    verb: str
    resource: str
    phase: str
    tasks: int
    seconds: float
    intensity: float
    rate: float
    attainable: float | None


def kernel_points(recording: Recording, roofs: Mapping[str, Roof]) -> list[KernelPoint]:
    """Compute the roofline's points of a run's kernels; the points with the longest total time come first.

    roofs: the limits of each processor, by its name; the limits of other processors are not known.
    """
    sums: dict[tuple[str, str, str], list[float]] = {}
    for each in recording.slices:
        task = each.task
        phase = each.phase
        if min(task.flops, task.nbytes) >= 1 and each.end > each.start and phase is not None:
            found = sums.setdefault((task.verb, task.resource, phase), [0, 0.0, 0.0, 0.0])
            for place, amount in enumerate((1, (each.end - each.start) / 1e9, task.flops, task.nbytes)):
                found[place] += amount
    points = [
        KernelPoint(
            verb,
            resource,
            phase,
            int(tasks),
            seconds,
            flops / nbytes,
            flops / seconds,
            attainable(roofs[resource], flops / nbytes) if resource in roofs else None,
        )
        for (verb, resource, phase), (tasks, seconds, flops, nbytes) in sums.items()
    ]
    return sorted(points, key=lambda point: -point.seconds)


def attainable(roof: Roof, intensity: float) -> float:
    """Return the FLOP/s that a processor allows at an intensity in FLOPs per byte."""
    return min(roof.flops, roof.bandwidth * intensity)
