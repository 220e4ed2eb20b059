"""`run_model`: one call of a session, to a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from moesched.inputs.chosen_policy import PolicyGiven
from moesched.inputs.defaults import MACHINE
from moesched.inputs.options import options_from, part_of, takes
from moesched.inputs.prompts import Prompt
from moesched.jobs.options import CallOptions, RunKeywords, RunOptions, SessionOptions
from moesched.jobs.report import JobReport
from moesched.jobs.session import Session
from moesched.machines import Machine


@takes(RunOptions)
def run_model(
    model: Path | str,
    prompts: Sequence[Prompt],
    *,
    policy: PolicyGiven = "resident",
    machine: Machine | str = MACHINE,
    **options: Unpack[RunKeywords],
) -> JobReport:
    """Generate text on real hardware: open a session, make one call, and close it.

    The call ends early as that of a `Session` does: at Ctrl-C and where weights fail, with a report.

    Args:
        model: a Hugging Face folder.
        prompts: texts, or token ids.

    Raises:
        BadInput: an argument cannot be used.
        NotTraced: the trace could not be written; the error has the report.
        PolicyError: the policy submitted something illegal; raised at its own line.
        TaskFailed: a task raised on its lane.
    """
    given = options_from(RunOptions, "run_model", options, policy=policy, machine=machine)
    with Session(model, **part_of(given, SessionOptions)) as session:
        return session.run(prompts, **part_of(given, CallOptions))
