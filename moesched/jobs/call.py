"""One call of a session: runs its prompts through the model in successive batches, and makes a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from moesched.inputs.tokenizer import Tokenizer
from moesched.jobs.batch_reports import BatchReports, JobEnding, reported
from moesched.jobs.expectation import Expectation
from moesched.jobs.job import Job
from moesched.jobs.options import CallOptions
from moesched.jobs.report import JobReport, job_report
from moesched.jobs.text_listener import TextListener
from moesched.jobs.trace_file import (
    BatchFiles,
    about_of,
    batch_files,
    recorder_for,
    roofs_of,
    write_recording,
)
from moesched.models.checkpoint import Checkpoint
from moesched.requests.batch import Batch
from moesched.requests.batching import batches_of
from moesched.requests.sampling import Sampling
from moesched.runs.batch_policies import BatchPolicies
from moesched.runs.cell_progress import listener_or_cell
from moesched.runs.generation import TokenHandling
from moesched.runs.hardware import run
from moesched.runs.listeners import KindMeter, observers_in
from moesched.runs.outcome import Report
from moesched.runs.ranks import Devices, Rank
from moesched.seams import Emulates, Observer, TellsProgress
from moesched.trace import LastSteps, Recorder, Recording
from moesched.trace.recording import Roof


class Call:
    """One call of a session; a session is a model that stays open on its devices.

    Args:
        job: the job, made for this call.
        prompts: token ids of each prompt.
        obstacle: the reason why the call cannot be predicted; None if it can.
    """

    def __init__(
        self,
        job: Job,
        devices: Devices,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Sequence[int]],
        given: CallOptions,
        obstacle: str | None,
    ) -> None:
        self._job = job
        self._devices = devices
        self._checkpoint = checkpoint
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._given = given
        self._sampling = given.sampling or Sampling()
        self._listener = listener_or_cell(given.listener)
        self._obstacle = obstacle
        self._policies: BatchPolicies
        self._predicted: BatchPolicies

    def run(self) -> JobReport:
        """Run all batches, up to one that ends early, and return the merged report.

        Raises:
            Exception: the error of a batch, with the merged report as its attribute `report`.
        """
        first = self._devices.first
        self._listener.opened(first)
        if isinstance(first, TellsProgress):
            first.tell = self._listener.preparing
        batches = self._batches()
        self._checkpoint.require_unchanged()
        self._policies, self._predicted = self._job.policies(), self._job.policies()
        reports = BatchReports()
        for number, batch in enumerate(batches):
            texts = self._texts(batch)
            with suppress(KeyboardInterrupt):
                files, explains = batch_files(self._given, number), self._given.explained and not number
                reports.add(self._run_batch, batch, texts, files, explains)
            texts.finish_all()
            if reports.ended_early(number):
                break
        return reports.merge(requests=len(self._prompts), batches=len(batches))

    def _batches(self) -> list[Batch]:
        """Return the successive batches. If there are several, plan each, and raise BadInput if one does not fit."""
        lengths, new_tokens = list(map(len, self._prompts)), self._given.max_new_tokens
        sizes = self._job.sizes(lengths, new_tokens)
        batches = list(batches_of(lengths, new_tokens, sizes))
        if len(batches) > 1:
            for batch in batches:
                self._job.plan(batch)
        return batches

    def _prompts_of(self, batch: Batch) -> Sequence[Sequence[int]]:
        return self._prompts[batch.first_request : batch.first_request + len(batch.prompts)]

    def _texts(self, batch: Batch) -> TextListener:
        return TextListener(
            self._listener,
            self._tokenizer,
            self._prompts_of(batch),
            batch.first_request,
            self._checkpoint.config.stop_tokens,
            self._given.max_new_tokens,
        )

    def _run_batch(self, batch: Batch, texts: TextListener, files: BatchFiles, explains: bool) -> JobReport:
        expectation = None
        if self._given.expect:
            expectation = Expectation(self._job, batch, self._obstacle, self._predicted)
        ranks = self._ranks(batch)
        plan = ranks[0].plan
        self._listener.planned(plan)
        knows_rates = bool(plan.machine.cost_table) or isinstance(self._devices.first, Emulates)
        recorder = recorder_for(plan, files, explained=explains, predicts=knows_rates)
        kinds, ending = KindMeter(), JobEnding()
        observers: list[Observer] = [kinds, *(expectation.observers if expectation else ())]
        read_before = self._devices.bytes_read
        report = reported(partial(self._run, ranks, batch, texts, observers, recorder), ending)
        texts.finish_all()
        self._listener.ran()
        finished = job_report(
            report,
            plan,
            kinds,
            policy=self._job.policy_name,
            dtype=self._job.layout.dtype,
            chosen_at=self._job.chosen_at,
            text=texts.texts,
            cores=self._devices.core_plan,
            bytes_read=_since(read_before, self._devices.bytes_read),
            change=self._checkpoint.change(),
            trace=files.trace,
        )
        if expectation is not None:
            estimating = self._listener.estimating if self._given.band else None
            finished = expectation.added_to(finished, estimating)
            self._listener.ran()
        if recorder is not None:
            roofs = roofs_of(plan.machine, finished.dtype) if knows_rates else None
            finished = self._hand_over(finished, recorder.recording(), files, roofs, explains)
        ending.raise_error(finished)
        return finished

    def _ranks(self, batch: Batch) -> list[Rank]:
        """Return a plan and a policy for each device."""
        return [
            Rank(*self._job.plan(batch, policy=self._policies.next_of(rank)), device)
            for rank, device in enumerate(self._devices.all)
        ]

    def _run(
        self,
        ranks: Sequence[Rank],
        batch: Batch,
        texts: TextListener,
        observers: Sequence[Observer],
        recorder: Recorder | LastSteps | None,
    ) -> Report:
        first, *peers = ranks
        return run(
            first.plan,
            first.policy,
            first.device,
            self._prompts_of(batch),
            sampling=self._sampling,
            tokens=TokenHandling(self._job.layout.config.stop_tokens, texts.tell),
            observers=[*observers_in(self._listener), *observers],
            recorder=recorder,
            peers=peers,
            keep_open=True,
        )

    def _hand_over(
        self,
        report: JobReport,
        recording: Recording,
        files: BatchFiles,
        roofs: Mapping[str, Roof] | None,
        explains: bool,
    ) -> JobReport:
        """Write a batch's files, and return its report; if `explains`, the report then has its bottleneck.

        roofs: peak rates of the processors, by name; None if they are not known.
        """
        explanation = None
        if explains:
            from moesched.jobs.explained import explained  # nothing before the first token needs it

            report, explanation = explained(report, recording, about_of(report))
        write_recording(files, recording, report, self._listener, roofs=roofs, explanation=explanation)
        return report


def _since(before: int | None, now: int | None) -> int | None:
    """Return the increase from `before` to `now`; None if either was not measured."""
    return None if before is None or now is None else now - before
