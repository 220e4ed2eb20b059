"""Records and writes the traces and HTML reports of a job, with their file names and metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from moesched.analysis.helps import FEWEST_STEPS, MOST_TASKS
from moesched.errors import BadInput
from moesched.inputs.files import require_safe_outputs, texts_in
from moesched.jobs.batch_reports import NotTraced
from moesched.jobs.options import OutputOptions
from moesched.jobs.report import JobReport
from moesched.machines import Machine
from moesched.machines.cost import cost_model
from moesched.options import Options, described
from moesched.runs.listeners import Listener
from moesched.steps.plan import Plan
from moesched.system.logs import Log
from moesched.system.outputs import Output, numbered
from moesched.trace import About, Clock, FirstSteps, LastSteps, Recorder, Recording, write_trace
from moesched.trace.recording import Roof

if TYPE_CHECKING:
    from moesched.analysis.explanation import Explanation

MOST_TRACED_TASKS = 500_000

_log = Log(__name__)


def recorder_for(
    plan: Plan, files: BatchFiles, *, explained: bool, predicts: bool = False
) -> Recorder | LastSteps | None:
    """Return a recorder for a batch; None if no files are to be written and no explanation is to be made.

    Args:
        files: the files to write from the recording.
        explained: whether the batch's bottleneck is to be explained.
        predicts: whether to record also each task's predicted time, by the costs of the plan's machine.
    """
    if files.wanted:
        return recorder_of(plan, predicts=predicts)
    return FirstSteps(FEWEST_STEPS, MOST_TASKS) if explained else None


def recorder_of(plan: Plan, *, predicts: bool = False) -> Recorder | LastSteps:
    """Return a recorder of a whole run, or of its last steps if the run is too long.

    Args:
        predicts: whether to record also each task's predicted time, by the costs of the plan's machine.
    """
    recorder = _recorder_of(plan)
    if predicts:
        recorder.cost = cost_model(plan.machine, plan.layout.dtype)
    return recorder


def _recorder_of(plan: Plan) -> Recorder | LastSteps:
    per_step = tasks_of_a_step(plan)
    if per_step * plan.batch.new_tokens <= MOST_TRACED_TASKS:
        return Recorder()
    steps = max(2, MOST_TRACED_TASKS // per_step)
    _log.warning("the run is too long for a whole trace: its last steps are kept", steps=steps)
    return LastSteps(steps)


def tasks_of_a_step(plan: Plan) -> int:
    """Return an upper estimate of the number of tasks in a step of a plan."""
    return 8 * len(plan.layers) * len(plan.micro_batches) + 2 * len(plan.layout.pages)


class BatchFiles(NamedTuple):
    """Files to write from the recording of a batch; None for files that were not asked for.

    Attributes:
        html: the HTML report.
    """

    trace: Path | None
    html: Path | None

    @property
    def wanted(self) -> bool:
        """True if any file is to be written, so that the batch must be recorded."""
        return self.trace is not None or self.html is not None


def batch_files(outputs: OutputOptions, number: int) -> BatchFiles:
    """Return the files of a batch, given its number from 0."""
    return BatchFiles(
        *(None if path is None else numbered(path, number) for path in (outputs.trace, outputs.html))
    )


def require_outputs_apart(outputs: OutputOptions, *more: Options | Path) -> None:
    """Check that a job can write the files of all batches, and that none replaces a file that it reads.

    Args:
        outputs: options of the job, or of one call of a session; all other files that they name count as read.
        more: further options that name files to read, and further such files.

    Raises:
        BadInput: an output cannot be written, is an input, or is in a model's folder.
    """
    written = [Output("trace", outputs.trace, numbered=True), Output("report", outputs.html, numbered=True)]
    require_safe_outputs(written, [name for each in (outputs, *more) for name in files_named(each)])


def files_named(given: Options | Path) -> Iterator[str]:
    """Yield the names of the files in options' values, or a path itself; lists are skipped, since they hold prompts."""
    if isinstance(given, Path):
        yield str(given)
        return
    for each in described(type(given)).values():
        value = getattr(given, each.name)
        if each.flag and not each.option.writes and not isinstance(value, list | tuple):
            yield from texts_in(value)


def roofs_of(machine: Machine, dtype: str) -> dict[str, Roof]:
    """Return the peak rates of a machine's processors by name; processors without FLOP/s in the dtype are left out."""
    return {
        name: Roof(flops=processor.flops[dtype], bandwidth=machine.memories[processor.memory].bandwidth)
        for name, processor in machine.processors.items()
        if dtype in processor.flops
    }


def write_recording(
    files: BatchFiles,
    recording: Recording,
    report: JobReport,
    listener: Listener,
    *,
    clocks: Mapping[str, Clock] | None = None,
    roofs: Mapping[str, Roof] | None = None,
    explanation: Explanation | None = None,
) -> None:
    """Write the trace and the HTML report of a batch, as far as `files` names them.

    Args:
        report: the batch's report.
        listener: told of each file before it is written.
        clocks: corrections of the nodes' clocks, by the node's rank as text.
        roofs: peak rates of the processors, by name; None if they are not known.
        explanation: explanation of the batch, if it was made before.

    Raises:
        NotTraced: a file cannot be written.
    """
    about = about_of(report, clocks, roofs)
    try:
        if files.trace is not None:
            listener.writing(files.trace)
            write_trace(files.trace, recording, about)
        if files.html is not None:
            listener.writing(files.html)
            from moesched.report import write_run_page

            write_run_page(files.html, recording, about, report=report.as_dict(), explanation=explanation)
    except BadInput as error:
        raise NotTraced(error, report) from error
    finally:
        listener.ran()


def about_of(
    report: JobReport,
    clocks: Mapping[str, Clock] | None = None,
    roofs: Mapping[str, Roof] | None = None,
) -> About:
    """Return the metadata of a recording: its report, the nodes' clock corrections and the processors' peak rates."""
    return About(
        driver="realtime" if report.measured else "virtual",
        policy=report.policy,
        model=report.model,
        machine=report.place,
        plan=msgspec.to_builtins(report.plan),
        clocks=dict(clocks or {}),
        roofs=dict(roofs or {}),
        costs_measured=report.costs_measured,
        tokens_per_second=report.throughput_tokens_per_second,
    )
