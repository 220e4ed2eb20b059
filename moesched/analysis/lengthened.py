"""Lengthens the decode steps that were recorded of a run, so that they stand for all decode steps of the run."""

from __future__ import annotations

from msgspec.structs import replace

from moesched.trace.recording import Recording, Slice


def lengthened(run: Recording, decode_steps: int) -> Recording:
    """Return a run's first steps with the time after the prefill stretched, so that it is that of all decode steps.

    The tasks are the same, and each then has its share of the whole run's time. Unstretched, a prefill and a few decode
    steps would tell of the prefill alone.

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
