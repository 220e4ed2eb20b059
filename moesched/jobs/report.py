"""A job's report, its JSON, and the merged report of successive batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from operator import add
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from moesched.analysis.helps import Help
from moesched.errors import BadInput, MoeschedError, attach_report
from moesched.planner.uncertainty import Figures
from moesched.runs.listeners import KindMeter, kind_use
from moesched.runs.outcome import (
    LaneUse,
    PoolUse,
    Report,
    Use,
    bytes_of_all_ranks,
    ratio,
    use_of,
)
from moesched.runs.process_bytes import ProcessBytes, largest
from moesched.runs.token_times import mean_of_known, merged
from moesched.seams import Dilations, EmulatedLane, Emulation
from moesched.steps.plan import Plan
from moesched.steps.preview_accuracy import Compared
from moesched.system.cores import CorePlan
from moesched.system.input_file import given_path
from moesched.system.plain_text import shown
from moesched.system.whole_file import write_json
from moesched.trace.summary import KindUse
from moesched.units import format_token_rate

Value = TypeVar("Value")


class JobReport(Report, frozen=True, kw_only=True):
    """A report with the job's budgets, tasks and batches.

    Attributes:
        dtype: the dtype that the model was computed in.
        model_dtype: the dtype of the model's weights.
        budget_bytes: budget of each memory.
        kinds: numbers and times of tasks by verb and lane.
        cores: use of the host's cores in a run on a GPU, by the fields of `CorePlan`; None without a GPU.
        bytes_read: bytes read from the checkpoint's files; None if not measured.
        batches: number of successive batches.
        chosen_at: tokens per second that the planner predicted for the policy that it chose; None if one was named.
        padded: whether prompts were padded to the longest.
        expected: prediction of a measured run, from the calibration of its machine; None if there is none.
        no_expectation: the reason why `expected` is None, if a prediction was asked for.
        band: by name of a predicted figure: low end, expected figure and high end; None without a band.
        at_peak: a prediction's figures at the machine's stated rates; None if its costs were measured.
        widest_rate: the rate that widens the band most, in words.
        bottleneck: bottleneck of the first batch, in words; None if it was not asked for, or no task ran.
        helps: the changes that would save most time of the first batch, best first.
        trace: file of the first batch's trace; None if none was asked for. It is not in the JSON.
    """

    dtype: str
    model_dtype: str
    budget_bytes: dict[str, int]
    kinds: list[KindUse]
    cores: dict[str, int] | None = None
    bytes_read: int | None = None
    batches: int = 1
    chosen_at: float | None = None
    padded: bool = False
    expected: JobReport | None = None
    no_expectation: str | None = None
    band: dict[str, tuple[float, float, float]] | None = None
    at_peak: Figures | None = None
    widest_rate: str | None = None
    bottleneck: str | None = None
    helps: list[Help] = msgspec.field(default_factory=list)
    trace: str | None = None

    def __repr__(self) -> str:
        rate = format_token_rate(self.throughput_tokens_per_second)
        ending = ", failed" if self.failure else ", interrupted" if self.interrupted else ""
        return f"<{type(self).__name__}: {self.title}, batch of {self.plan.batch_size}, {rate}{ending}>"

    def _repr_html_(self) -> str:
        from moesched.jobs.report_cell import report_html  # loaded where something is drawn

        return report_html(self, self.budget_bytes, self.trace)

    def as_dict(self) -> dict[str, Any]:
        """Convert the report to JSON values; a run omits the fields of predictions, and a prediction those of runs."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        of_predictions = (
            "simulated_seconds",
            "simulated_steps",
            "padded",
            "costs_measured",
            "band",
            "at_peak",
            "widest_rate",
        )
        of_runs = (
            "tokens",
            "scores",
            "text",
            "cores",
            "bytes_read",
            "emulation",
            "expected",
            "no_expectation",
            "warm_up_seconds",
            "weights_home",
            "kernels",
        )
        foreign = of_predictions if self.measured else of_runs
        for name in (*foreign, "trace"):
            del content[name]
        if self.expected is not None:
            content["expected"] = self.expected.as_dict()
        return content


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report on one node of a cluster.

    Attributes:
        peak_bytes: peak use of each memory.
        process_bytes: peak resident memory of the node's process; None if the node sent no report.
        clock_ahead_seconds: seconds by which the node's clock was ahead of the launcher's; None if not measured.
        clock_error_seconds: bound of the error of `clock_ahead_seconds`.
        lost: reason why the node was lost; None if it stayed to the end.
    """

    rank: int
    name: str
    load_seconds: float
    peak_bytes: dict[str, int]
    process_bytes: ProcessBytes | None
    clock_ahead_seconds: float | None
    clock_error_seconds: float | None
    lost: str | None


class ClusterReport(JobReport, frozen=True, kw_only=True):
    """A report of a run on several nodes; times, lanes and memories are those of the first node that was not lost.

    Attributes:
        members: all nodes of the cluster, in the order of their ranks; `nodes` is the number that began the run.
        epochs: 1, plus the number of times that nodes were lost or came back.
    """

    members: list[NodeReport]
    epochs: int


def job_report(
    report: Report,
    plan: Plan,
    kinds: KindMeter,
    *,
    policy: str,
    dtype: str,
    chosen_at: float | None = None,
    text: list[str] | None = None,
    cores: CorePlan | None = None,
    bytes_read: int | None = None,
    change: str | None = None,
    trace: Path | None = None,
) -> JobReport:
    """Make the job's report of one batch, with the budgets of its plan and its kinds of task.

    Args:
        kinds: observer that counted tasks by verb and lane.
        policy: name of the policy, as the user gave it or the planner chose it.
        chosen_at: tokens per second that the planner predicted for the policy that it chose; None if one was named.
        text: the generated text of each request.
        cores: use of the host's cores in a run on a GPU; None without a GPU.
        bytes_read: bytes read from the checkpoint's files; None if not measured.
        change: a sentence on a file of weights that changed before the batch ended; None if none did.
        trace: file of the batch's trace; None if none was asked for.
    """
    fields = {name: getattr(report, name) for name in report.__struct_fields__}
    fields |= {"policy": policy, "text": text}
    if change is not None:
        fields["failure"] = _doubt(change, plan, report.failure)
    return JobReport(
        **fields,
        dtype=dtype,
        chosen_at=chosen_at,
        model_dtype=plan.layout.config.dtype,
        budget_bytes={
            name: bytes_of_all_ranks(plan, memory, memory.capacity) for name, memory in plan.memories.items()
        },
        kinds=kinds.kinds(),
        cores=None if cores is None else cores._asdict(),
        bytes_read=bytes_read,
        trace=None if trace is None else str(trace),
    )


def _doubt(change: str, plan: Plan, failure: str | None) -> str:
    """Return the text for a report's field `failure`, for a batch during which a file of weights changed.

    Args:
        change: a sentence on the changed file.
        failure: another failure of the batch, which is repeated in brackets; None if there is none.
    """
    first, count = plan.batch.first_request, len(plan.batch.prompts)
    tokens = (
        f"the tokens of requests {first} to {first + count - 1}"
        if count > 1
        else f"the tokens of request {first}"
    )
    other = f" ({failure})" if failure else ""
    return f"{change}: {tokens} may be wrong{other}; restore it, or wait until it is complete, and run again"


def write_report(path: Path | str, report: JobReport) -> None:
    """Write a report as JSON.

    Raises:
        BadInput: the file cannot be written; no partial file is left.
    """
    path = given_path(path, "a report")
    if not isinstance(report, JobReport):
        raise BadInput(f"report is {shown(report)}: give the report of a run or of a prediction")
    write_json(path, "report", report.as_dict())


def require_complete(report: JobReport) -> None:
    """Raise MoeschedError, with the report, if the run failed."""
    if report.failure is not None:
        error = MoeschedError(report.failure)
        attach_report(error, report)
        raise error


def merge_reports(reports: Sequence[JobReport], *, requests: int, batches: int) -> JobReport:
    """Merge reports of successive batches: totals are summed, means and rates recomputed; the largest peaks are kept.

    Args:
        requests: number of requests in all batches; those that never ran have no tokens.
    """
    first = reports[0]
    if batches == 1:
        return first
    tokens = _of_all_requests([report.tokens for report in reports], [], requests)
    scores = _of_all_requests([report.scores for report in reports], -math.inf, requests)
    text = _of_all_requests([report.text for report in reports], "", requests)
    failure = next((report.failure for report in reports if report.failure), None)
    counts = [count for report in reports for count in _token_counts(report)]
    steps = [seconds for report in reports for seconds in report.step_seconds[1:]]
    decoding, decode_step = sum(steps), mean_of_known(steps)
    running = sum(sum(report.step_seconds) for report in reports)
    figures = {
        "throughput_tokens_per_second": ratio(sum(counts), running),
        "decode_step_seconds": decode_step or 0.0,
        "prefill_seconds": sum(report.prefill_seconds for report in reports),
    }
    return msgspec.structs.replace(
        first,
        band=first.band and {name: _around(figures[name], *edges) for name, edges in first.band.items()},
        load_seconds=sum(report.load_seconds for report in reports),
        warm_up_seconds=_sum_of_known([report.warm_up_seconds for report in reports]),
        prefill_seconds=figures["prefill_seconds"],
        decode_step_seconds=decode_step,
        first_token_seconds=_mean_of_requests(reports, "first_token_seconds"),
        between_tokens_seconds=_mean_of_requests(reports, "between_tokens_seconds"),
        request_times=merged([report.request_times for report in reports], requests),
        micro_batch_times=[times for report in reports for times in report.micro_batch_times],
        simulated_steps=None if first.measured else sum(each.simulated_steps or 0 for each in reports),
        decode_tokens_per_second=ratio(sum(max(0, count - 1) for count in counts), decoding),
        throughput_tokens_per_second=figures["throughput_tokens_per_second"],
        step_seconds=[seconds for report in reports for seconds in report.step_seconds],
        peak_bytes={name: max(report.peak_bytes[name] for report in reports) for name in first.peak_bytes},
        process_bytes=largest([each.process_bytes for each in reports if each.process_bytes]),
        lanes={
            name: _merge_lane([report.lanes[name] for report in reports if name in report.lanes], running)
            for name in first.lanes
        },
        tasks=sum(report.tasks for report in reports),
        wall_seconds=sum(report.wall_seconds for report in reports),
        simulated_seconds=None if first.measured else sum(each.simulated_seconds or 0.0 for each in reports),
        tokens=tokens,
        scores=scores,
        text=text,
        interrupted=any(report.interrupted for report in reports) or (not failure and len(reports) < batches),
        failure=failure,
        kinds=_merge_kinds([kind for report in reports for kind in report.kinds]),
        bytes_read=None if first.bytes_read is None else sum(report.bytes_read or 0 for report in reports),
        batches=batches,
        pools=_merge_pools([pool for report in reports for pool in report.pools]),
        previews=_merge_uses([each for report in reports for each in report.previews]),
        forecasts=_merge_uses([each for report in reports for each in report.forecasts]),
        kernels=_merge_kernels([report.kernels for report in reports]),
        emulation=_merge_emulations([each.emulation for each in reports if each.emulation is not None]),
        expected=_merge_expectations(reports, requests=requests, batches=batches),
        no_expectation=next((report.no_expectation for report in reports if report.no_expectation), None),
    )


def at_the_tokens_of(expected: JobReport, measured: JobReport) -> JobReport:
    """Return a batch's prediction with the number of tokens that the run really generated, and rates for these.

    Stop tokens may end requests early, so that there are fewer tokens than were asked for.
    """
    counts = _token_counts(measured)
    _, *decoding = expected.step_seconds
    return msgspec.structs.replace(
        expected,
        tokens=measured.tokens,
        decode_tokens_per_second=ratio(sum(max(0, count - 1) for count in counts), sum(decoding)),
        throughput_tokens_per_second=ratio(sum(counts), sum(expected.step_seconds)),
    )


def _merge_expectations(reports: Sequence[JobReport], *, requests: int, batches: int) -> JobReport | None:
    """Merge the predictions of all batches; None if a batch has none."""
    expected = [report.expected for report in reports if report.expected is not None]
    if len(expected) < len(reports):
        return None
    return merge_reports(expected, requests=requests, batches=batches)


def _around(figure: float, low: float, middle: float, high: float) -> tuple[float, float, float]:
    """Return a band (low, middle, high) that is scaled so that its middle is `figure`."""
    share = figure / middle if middle else 1.0
    return low * share, figure, high * share


def _mean_of_requests(reports: Sequence[JobReport], figure: str) -> float | None:
    """Return the mean of a figure over requests, without the batches that lack it; None if all batches lack it."""
    known = [each for each in reports if getattr(each, figure) is not None]
    requests = sum(each.plan.batch_size for each in known)
    total: float = sum(getattr(each, figure) * each.plan.batch_size for each in known)
    return total / requests if requests else None


def _of_all_requests(
    batches: Sequence[list[Value] | None], missing: Value, requests: int
) -> list[Value] | None:
    """Return the values of all requests, `missing` for those that never ran; None if the first batch has none."""
    if batches[0] is None:
        return None
    known = [value for values in batches for value in values or []]
    return known + [copy(missing) for _ in range(requests - len(known))]


def _sum_of_known(numbers: Sequence[float | None]) -> float | None:
    known = [each for each in numbers if each is not None]
    return sum(known) if known else None


def _token_counts(report: JobReport) -> list[int]:
    """Return the number of generated tokens by request; a prediction generates all that were asked for."""
    if report.tokens is None:
        return [report.plan.new_tokens] * report.plan.batch_size
    return list(map(len, report.tokens))


def _merge_emulations(parts: Sequence[Emulation]) -> Emulation | None:
    """Merge the emulations of batches: counts and seconds are summed; of all other figures, the largest is taken."""
    if not parts:
        return None
    lanes = {
        name: EmulatedLane(
            max(each.real_share for each in uses),
            sum(each.overruns for each in uses),
            sum(each.late for each in uses),
            sum(each.excess_seconds for each in uses),
        )
        for name in parts[0].lanes
        if (uses := [part.lanes[name] for part in parts if name in part.lanes])
    }
    dilation = Dilations(
        max(part.dilation.prefill for part in parts), max(part.dilation.decode for part in parts)
    )
    return Emulation(dilation, max(part.core_load for part in parts), lanes)


def _merge_lane(uses: Sequence[LaneUse], seconds: float) -> LaneUse:
    busy = sum(use.busy_seconds for use in uses)
    return LaneUse(busy, min(1.0, ratio(busy, seconds)))


def _merge_pools(pools: Sequence[PoolUse]) -> list[PoolUse]:
    """Merge pools of equal name and memory: counts are summed; of the numbers of slots, the largest is taken."""
    merged: dict[tuple[str, str], PoolUse] = {}
    for pool in pools:
        name, memory, slots, *counts = msgspec.structs.astuple(pool)
        before = merged.get((name, memory))
        if before is not None:
            _, _, most, *known = msgspec.structs.astuple(before)
            slots, counts = max(slots, most), list(map(add, known, counts))
        merged[name, memory] = PoolUse(name, memory, slots, *counts)
    return list(merged.values())


def _merge_uses(uses: Sequence[Use]) -> list[Use]:
    """Add up the counts of router previews or forecasts that looked equally far ahead, by the same predictor."""
    merged: dict[tuple[Any, ...], Compared] = {}
    for each in uses:
        *key, forecasts, chosen, found, _ = msgspec.structs.astuple(each)
        before = merged.get(tuple(key), Compared())
        merged[tuple(key)] = Compared(*map(add, before, (forecasts, chosen, found)))
    return [use_of(type(uses[0]), compared, *key) for key, compared in sorted(merged.items())]


def _merge_kernels(parts: Sequence[dict[str, list[str]]]) -> dict[str, list[str]]:
    """Return the names of the kernels that ran in any batch, by operation."""
    operations = dict.fromkeys(operation for part in parts for operation in part)
    return {
        operation: sorted({name for part in parts for name in part.get(operation, ())})
        for operation in operations
    }


def _merge_kinds(kinds: Sequence[KindUse]) -> list[KindUse]:
    by_key: dict[tuple[str, str], list[KindUse]] = {}
    for kind in kinds:
        by_key.setdefault((kind.kind, kind.lane), []).append(kind)
    return [
        kind_use(
            verb,
            lane,
            sum(each.tasks for each in parts),
            sum(each.seconds for each in parts),
            sum(each.nbytes for each in parts),
            sum(each.flops for each in parts),
        )
        for (verb, lane), parts in sorted(by_key.items())
    ]
