"""Adds to a report its batch's bottleneck, and the changes that would help most."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from moesched.analysis.explanation import Explanation, explain
from moesched.analysis.explanation_tables import bottleneck_in_words
from moesched.analysis.helps import Help, best_helps
from moesched.jobs.report import JobReport
from moesched.trace.recording import About, Recording


def explained(
    report: JobReport, recording: Recording, about: About, others: Callable[[], Iterable[Help]] = tuple
) -> tuple[JobReport, Explanation | None]:
    """Return a batch's report with its bottleneck and the changes that would help most, and the explanation.

    If the batch ended early, or no task was recorded, the report is unchanged and the explanation None.

    Args:
        about: the recording's metadata: policy, model, machine, and kind of figures.
        others: finds further changes that would help, by other means than replays of the recording.
    """
    if report.interrupted or report.failure is not None or not recording.slices:
        return report, None
    explanation = explain(recording, about, decode_steps=len(report.step_seconds) - 1)
    explanation = replace(explanation, helps=best_helps([*explanation.helps, *others()]))
    found, said = explanation.bottleneck, None
    if found is not None:
        more = sum(report.step_seconds) / explanation.seconds  # fewer steps may have been recorded
        whole = replace(found, seconds=more * found.seconds, kind_seconds=more * found.kind_seconds)
        said = bottleneck_in_words(explanation, whole)
    return replace(report, bottleneck=said, helps=explanation.helps), explanation
