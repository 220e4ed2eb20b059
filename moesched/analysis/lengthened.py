"""Stretches the recorded decode steps of a run to the time of all its decode steps."""

from __future__ import annotations

from msgspec.structs import replace

from moesched.trace.recording import Recording, Slice


def lengthened(run: Recording, decode_steps: int) -> Recording:
    """Return a run's first steps with decode stretched to the time that all decode steps of the run would take.

    No task is added. In the result the prefill has its true share of the run's time.

    Args:
        run: the first steps of a run, without the loading of weights.
        decode_steps: number of the whole run's decode steps; if no more than that were recorded, nothing is stretched.
    """
    recorded = len({each.step for each in run.slices if each.phase == "decode"})
    if not 0 < recorded < decode_steps:
        return run
    prefill = max((each.end for each in run.slices if each.phase == "prefill"), default=run.start)

    def stretched(nanoseconds: int) -> int:
        return nanoseconds * decode_steps // recorded

    def moved(moment: int) -> int:
        return prefill + stretched(moment - prefill) if moment > prefill else moment

    def moved_slice(each: Slice) -> Slice:
        if each.end <= prefill:
            return each
        longer = replace(each, start=moved(each.start), end=moved(each.end))
        if each.start < prefill:
            return longer
        delay = each.submit_delay
        return replace(
            longer,
            dispatch=stretched(each.dispatch),
            launching=stretched(each.launching),
            submit_delay=stretched(delay) if delay > 0 else delay,
        )

    return replace(run, slices=[moved_slice(each) for each in run.slices])
