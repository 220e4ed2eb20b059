"""Comparison of our predictions, at the sustained rates of our profiles, with the runs in the authors' artifact."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median

from moesched.reproduce.moe_lightning.paper import ArtifactRun, ArtifactRuns, Paper
from moesched.reproduce.moe_lightning.systems import SYSTEMS, Predicted, predict, setting_of
from moesched.reproduce.report import Section, Value, rounded


def artifact_section(paper: Paper, on_progress: Callable[[str], None]) -> Section:
    """Make the section of all runs in the artifact: measured and predicted throughput of each run.

    Notes give median errors, and the times of the prefill and of a decode step. These times follow from the durations
    of two runs that have the same system and requests, but generate different numbers of tokens.
    """
    rows: list[dict[str, Value]] = []
    notes = []
    for each in paper.artifact:
        seen: list[tuple[ArtifactRun, Predicted]] = []
        for run in each.runs:
            on_progress(f"the artifact's {each.system}, {run.new_tokens} tokens")
            setting = setting_of(
                SYSTEMS[each.system], paper.settings[each.setting], each.workload, run.new_tokens, None
            )
            seen.append((run, predict(setting, run.micro_batches, run.micro_batch_size)))
        rows += [_row(each, *one) for one in seen]
        notes += [
            _parts(each, *pair) for pair in pairwise(seen) if pair[0][0].requests == pair[1][0].requests
        ][:1]
    errors = [abs(float(row["error"] or 0)) for row in rows]
    unset = [abs(float(row["error"] or 0)) for row in rows if not row["sets_a_rate"]]
    notes.append(f"Median error: {median(errors):.0%}; of the runs that set no rate, {median(unset):.0%}.")
    return paper.section("artifact", rows, notes=notes)


def _row(of: ArtifactRuns, run: ArtifactRun, predicted: Predicted) -> dict[str, Value]:
    measured = run.requests * run.new_tokens / run.seconds
    return {
        "system": of.system,
        "workload": of.workload,
        "new_tokens": run.new_tokens,
        "requests": run.requests,
        "micro_batch_size": run.micro_batch_size,
        "measured": rounded(measured),
        "ours": rounded(predicted.tokens_per_second),
        "error": round(predicted.tokens_per_second / measured - 1, 4),
        "prefill_seconds": rounded(predicted.prefill_seconds),
        "step_seconds": rounded(predicted.step_seconds),
        "sets_a_rate": run.fit,
    }


def _parts(of: ArtifactRuns, one: tuple[ArtifactRun, Predicted], other: tuple[ArtifactRun, Predicted]) -> str:
    """Describe the prefill and decode times that follow from two runs of the same requests, beside our predictions.

    Args:
        one: the run that generates fewer tokens, and our prediction of it.
        other: the run that generates more tokens, and our prediction of it.
    """
    (short, predicted), (long, _) = one, other
    step = (long.seconds - short.seconds) / (long.new_tokens - short.new_tokens)
    prefill = short.seconds - (short.new_tokens - 1) * step
    return (
        f"{of.system}, {short.new_tokens} and {long.new_tokens} tokens: a decode step of {step:.1f} s, ours "
        f"{predicted.step_seconds:.1f} s; a prefill of {prefill:.0f} s, ours {predicted.prefill_seconds:.0f} s."
    )
