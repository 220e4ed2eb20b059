"""`run_model`: prompts through a model on real hardware, in successive batches, to a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Unpack

from moesched.inputs.defaults import MACHINE
from moesched.inputs.lookup import find_machine, machine_file
from moesched.inputs.options import options_from, takes
from moesched.inputs.prompts import Prompt, encode_prompts, require_some
from moesched.inputs.tokenizer import find_tokenizer
from moesched.jobs.batch_reports import BatchReports, JobEnding, reported
from moesched.jobs.expectation import Expectation, obstacle
from moesched.jobs.explained import explained
from moesched.jobs.job import Job
from moesched.jobs.memory_ahead import pieces_to_take
from moesched.jobs.options import RunKeywords, RunOptions
from moesched.jobs.report import JobReport, job_report
from moesched.jobs.text_listener import TextListener
from moesched.jobs.trace_file import (
    BatchFiles,
    about_of,
    batch_files,
    recorded_outputs,
    recorder_for,
    roofs_of,
    write_recording,
)
from moesched.machines import Machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.requests.batch import Batch
from moesched.requests.batching import batches_of
from moesched.requests.sampling import Sampling
from moesched.runs.batch_policies import BatchPolicies
from moesched.runs.generation import TokenHandling
from moesched.runs.hardware import run
from moesched.runs.listeners import KindMeter, Listener, observers_in
from moesched.runs.ranks import Devices, Rank, open_devices, process_of
from moesched.seams import Emulates, TellsProgress
from moesched.system.memory_ahead import MemoryAhead, UsesMemoryAhead
from moesched.system.outputs import require_outputs


@takes(RunOptions)
def run_model(
    model: Path | str,
    prompts: Sequence[Prompt],
    *,
    policy: str = "resident",
    machine: Machine | str = MACHINE,
    **options: Unpack[RunKeywords],
) -> JobReport:
    """Generate text on real hardware. More prompts than fit a batch run as successive batches.

    Ctrl-C ends it cleanly: the report then says `interrupted` and holds the tokens so far. Weights that cannot be read
    and logits that are not finite end it as well, and `failure` of the report then says where. If a file of weights
    changes during a batch, no further one begins, and `failure` says that the tokens of this batch may be wrong. Any
    other error after the run began has the report as its attribute `report`.

    Args:
        model: a Hugging Face folder.
        prompts: texts, or token ids.
        policy: a name of `moesched list policies`, or file.py:Class.
        machine: "auto" for this one, a name of `moesched list machines`, a TOML file, or a Machine.

    Raises:
        BadInput: an argument cannot be used.
        NotTraced: the trace could not be written; the error has the report.
        PolicyError: the policy submitted something illegal; raised at its own line.
        TaskFailed: a task raised on its lane.
    """
    given = options_from(RunOptions, "run_model", options, policy=policy, machine=machine)
    require_outputs(*recorded_outputs(given), model=model, inputs=[machine_file(given.machine)])
    require_some(given.max_new_tokens, "--max-new-tokens")
    checkpoint = open_checkpoint(Path(model))
    config = checkpoint.config
    tokenizer = find_tokenizer(checkpoint.directory)
    encoded = encode_prompts(prompts, tokenizer, config, given.max_new_tokens)
    sampling = given.sampling or Sampling()
    listener = given.listener or Listener()
    lengths = list(map(len, encoded))
    reports = BatchReports()
    with _opened(given, checkpoint, lengths, sampling.beams) as (job, devices):
        listener.opened(devices.first)
        if isinstance(devices.first, TellsProgress):
            devices.first.tell = listener.preparing
        batches = _batches(job, lengths, given.max_new_tokens, devices)
        checkpoint.require_unchanged()
        reason = obstacle(given, job, devices)
        policies, predicted = job.policies(), job.policies()
        for number, batch in enumerate(batches):
            first = batch.first_request
            mine = encoded[first : first + len(batch.prompts)]
            texts = TextListener(listener, tokenizer, mine, first, config.stop_tokens, given.max_new_tokens)
            with suppress(KeyboardInterrupt):
                files = batch_files(given, number)
                expectation = Expectation(job, batch, devices, reason, predicted) if given.expect else None
                explains = given.explained and not number
                reports.add(
                    _run_batch,
                    job,
                    batch,
                    policies,
                    checkpoint,
                    devices,
                    mine,
                    sampling,
                    texts,
                    files,
                    expectation,
                    explains,
                )
            texts.finish_all()
            if reports.ended_early(number):
                break
    return reports.merge(requests=len(encoded), batches=len(batches))


@contextmanager
def _opened(
    given: RunOptions, checkpoint: Checkpoint, lengths: Sequence[int], beams: int
) -> Iterator[tuple[Job, Devices]]:
    """The job and its open devices; memory for weights is taken while these are imported."""
    with MemoryAhead() as ahead:
        ahead.begin(pieces_to_take(given, checkpoint.config, lengths, beams))
        found = find_machine(given.machine, given.device, foreign=given.foreign_machine)
        job = Job(given, checkpoint.config, found, beams=beams, device=given.device)
        with open_devices(given.device, given.device_settings, checkpoint, job.layout) as devices:
            ahead.stop()
            if isinstance(devices.first, UsesMemoryAhead):
                devices.first.memory_ahead = ahead
            else:
                ahead.give_back()
            job.use_process(process_of(devices.all, job.machine, ahead.nbytes))
            yield job, devices


def _batches(job: Job, lengths: Sequence[int], new_tokens: int, devices: Devices) -> list[Batch]:
    """The successive batches; one that does not fit is refused before any runs."""
    sizes = job.sizes(lengths, new_tokens, devices.slot_bytes)
    batches = list(batches_of(lengths, new_tokens, sizes))
    if len(batches) > 1:
        for batch in batches:
            job.plan(batch, devices.slot_bytes)
    return batches


def _run_batch(
    job: Job,
    batch: Batch,
    policies: BatchPolicies,
    checkpoint: Checkpoint,
    devices: Devices,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    texts: TextListener,
    files: BatchFiles,
    expectation: Expectation | None,
    explains: bool,
) -> JobReport:
    plan, policy = job.plan(batch, devices.slot_bytes, policy=policies.next_of(0))
    peers = [
        Rank(*job.plan(batch, devices.slot_bytes, policy=policies.next_of(rank)), device)
        for rank, device in enumerate(devices.all[1:], start=1)
    ]
    texts.listener.planned(plan)
    knows_rates = bool(plan.machine.cost_table) or isinstance(devices.first, Emulates)
    recorder = recorder_for(plan, files, explained=explains, predicts=knows_rates)
    kinds = KindMeter()
    read_before = devices.bytes_read
    ending = JobEnding()
    report = reported(
        partial(
            run,
            plan,
            policy,
            devices.first,
            prompts,
            sampling=sampling,
            tokens=TokenHandling(job.layout.config.stop_tokens, texts.tell),
            observers=[
                *observers_in(texts.listener),
                kinds,
                *(expectation.observers if expectation else ()),
            ],
            recorder=recorder,
            peers=peers,
            keep_open=True,
        ),
        ending,
    )
    texts.finish_all()
    texts.listener.ran()
    read = devices.bytes_read
    finished = job_report(
        report,
        plan,
        kinds,
        policy=job.options.policy,
        dtype=job.layout.dtype,
        text=texts.texts,
        cores=devices.core_plan,
        bytes_read=None if read is None or read_before is None else read - read_before,
        change=checkpoint.change(),
    )
    if expectation is not None:
        finished = expectation.added_to(finished)
    if recorder is not None:
        roofs = roofs_of(plan.machine, finished.dtype) if knows_rates else None
        recording, explanation = recorder.recording(), None
        if explains:
            finished, explanation = explained(finished, recording, about_of(finished))
        write_recording(files, recording, finished, texts.listener, roofs=roofs, explanation=explanation)
    ending.raise_error(finished)
    return finished
